"""`/v1/completions` through the real client. The fake engine repeats the prompt, so the right answer is known."""

import json

import httpx
import openai
import pytest

PROMPT = "The cat 😀 sat; "


def complete(client: openai.OpenAI, **fields: object) -> openai.types.Completion:
    return client.completions.create(**{"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 30} | fields)  # type: ignore[call-overload, no-any-return]


def stream(client: openai.OpenAI, **fields: object) -> list[openai.types.Completion]:
    return list(complete(client, stream=True, **fields))  # type: ignore[arg-type]


def joined(chunks: list[openai.types.Completion], index: int = 0) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


def repeated(num_bytes: int, prompt: str = PROMPT) -> str:
    return (prompt.encode() * 100)[:num_bytes].decode("utf-8", "replace")


@pytest.mark.parametrize("max_tokens", range(1, 20))
def test_stream_equals_plain_for_every_length(client: openai.OpenAI, max_tokens: int) -> None:
    plain = complete(client, max_tokens=max_tokens)
    assert plain.choices[0].text == repeated(max_tokens)
    assert plain.choices[0].finish_reason == "length"
    assert plain.usage is not None
    assert plain.usage.completion_tokens == max_tokens
    chunks = stream(client, max_tokens=max_tokens)
    assert joined(chunks) == plain.choices[0].text
    assert sum("\ufffd" in choice.text for chunk in chunks for choice in chunk.choices) == plain.choices[0].text.count(
        "\ufffd"
    )


@pytest.mark.parametrize(
    ("stop", "end"),
    [
        ("😀 sat", "The cat "),
        (["sat; The", "at; "], "The cat 😀 s"),
        (["cat!", "sat; The dog"], None),
        ("x" * 200, None),
        ("😀", "The cat "),
        (["zz", "T"], ""),
    ],
)
def test_stop_strings(client: openai.OpenAI, stop: str | list[str], end: str | None) -> None:
    expected = repeated(30) if end is None else end
    plain = complete(client, stop=stop)
    chunks = stream(client, stop=stop)
    assert plain.choices[0].text == joined(chunks) == expected
    assert plain.choices[0].finish_reason == ("length" if end is None else "stop")
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == [plain.choices[0].finish_reason]


def test_include_stop_and_usage_up_to_the_stop(client: openai.OpenAI) -> None:
    answer = complete(client, stop=" sat", extra_body={"include_stop_str_in_output": True})
    assert answer.choices[0].text == "The cat 😀 sat"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("The cat 😀 sat".encode())


def test_end_token_and_ignore_eos_and_min_tokens(client: openai.OpenAI) -> None:
    force_end = {"256": 100}
    answer = complete(client, logit_bias=force_end)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    late = complete(client, logit_bias=force_end, extra_body={"min_tokens": 4})
    assert (late.choices[0].text, late.choices[0].finish_reason) == ("The ", "stop")
    endless = complete(
        client, logit_bias=force_end, max_tokens=3, extra_body={"ignore_eos": True, "skip_special_tokens": False}
    )
    assert (endless.choices[0].text, endless.choices[0].finish_reason) == ("<end>" * 3, "length")


def test_stop_token_ids(client: openai.OpenAI) -> None:
    answer = complete(client, extra_body={"stop_token_ids": [ord("c")]})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("The ", "stop")


def test_choices_and_seeds(client: openai.OpenAI) -> None:
    wanted = {"n": 3, "seed": 7, "temperature": 0.8}
    first = complete(client, **wanted)
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    chunks = stream(client, stream_options={"include_usage": True}, **wanted)
    assert [joined(chunks, i) for i in range(3)] == texts
    reasons = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(reasons) == [0, 1, 2]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == len(PROMPT.encode())
    assert chunks[-1].usage.completion_tokens == 90
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert all(chunk.usage is None for chunk in stream(client, **wanted))


def test_unseeded_requests_differ(client: openai.OpenAI) -> None:
    texts = {complete(client, temperature=1.0).choices[0].text for _ in range(3)}
    assert len(texts) == 3


def test_lists_of_prompts_are_answered_prompt_by_prompt(client: openai.OpenAI) -> None:
    answer = complete(client, prompt=["ab", "cde"], n=2, max_tokens=4)
    assert [choice.text for choice in answer.choices] == ["abab", "abab", "cdec", "cdec"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 16)


@pytest.mark.parametrize(("prompt", "texts"), [([97, 98], ["aba"]), ([[97], [98, 99]], ["aaa", "bcb"])])
def test_prompts_as_token_ids(client: openai.OpenAI, prompt: list[int], texts: list[str]) -> None:
    answer = complete(client, prompt=prompt, max_tokens=3)
    assert [choice.text for choice in answer.choices] == texts


def test_cached_tokens_by_salt(client: openai.OpenAI, http: httpx.Client) -> None:
    def cached(salt: str) -> int:
        usage = complete(client, prompt="p" * 40, max_tokens=1, extra_body={"cache_salt": salt}).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.model_extra is not None
        in_l1 = usage.prompt_tokens_details.cached_tokens
        assert usage.model_extra["cached_tokens_by_tier"] == {"l1": in_l1, "l2": 0, "l3": 0}
        return usage.prompt_tokens_details.cached_tokens or 0

    assert [cached("s1"), cached("s1"), cached("s2")] == [0, 32, 0]
    flushed = http.post("/cache/flush").json()
    assert flushed["dropped_pages"] > 0
    assert flushed["kept_pages"] == 0
    assert cached("s1") == 0


def test_logprobs_follow_the_text(client: openai.OpenAI) -> None:
    plain = complete(client, logprobs=2, max_tokens=14)
    logprobs = plain.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.tokens[:4] == ["T", "h", "e", " "]
    assert logprobs.tokens[8] == "bytes:\\xf0"
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 9, 10]
    assert logprobs.top_logprobs is not None
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 14
    chunks = stream(client, logprobs=2, max_tokens=14)
    parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert [token for part in parts for token in part.tokens or ()] == logprobs.tokens
    assert [offset for part in parts for offset in part.text_offset or ()] == logprobs.text_offset


def test_echo_with_logprobs(client: openai.OpenAI) -> None:
    for fields in ({"prompt": "abc"}, {"prompt": [97, 98, 99]}):
        plain = complete(client, echo=True, logprobs=0, max_tokens=2, **fields)
        assert plain.choices[0].text == "abcab"
        logprobs = plain.choices[0].logprobs
        assert logprobs is not None
        assert (logprobs.tokens, logprobs.text_offset) == (["a", "b", "c", "a", "b"], [0, 1, 2, 3, 4])
        assert logprobs.token_logprobs is not None
        assert [value is None for value in logprobs.token_logprobs] == [True, False, False, False, False]
        assert joined(stream(client, echo=True, logprobs=0, max_tokens=2, **fields)) == "abcab"


def test_echo_that_generates_nothing_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = complete(client, prompt="abc", echo=True, logprobs=1, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "c"]


def test_hidden_states_one_row_a_token(http: httpx.Client) -> None:
    body = {"prompt": "ab", "max_tokens": 3, "temperature": 0, "return_hidden_states": True}
    rows = http.post("/v1/completions", json=body).json()["choices"][0]["hidden_states"]
    assert rows == [[97.0] * 4, [98.0] * 4, [97.0] * 4]
    events = http.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["choices"][0]["hidden_states"] == rows


def test_left_out_max_tokens_goes_up_to_the_limit(client: openai.OpenAI) -> None:
    answer = complete(client, prompt="x" * 2000, max_tokens=None)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (48, "length")


def test_accepted_and_ignored_fields(client: openai.OpenAI) -> None:
    answer = complete(
        client, user="me", max_tokens=1, extra_body={"metadata": {"a": "b"}, "store": True, "priority": -3}
    )
    assert answer.choices[0].text == "T"

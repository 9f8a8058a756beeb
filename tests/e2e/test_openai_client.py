"""The openai client against the real server with the real default model."""

import time

import httpx
import openai
import pytest

from tests.support.server_process import ServerProcess

MODEL = "smollm2-135m"
FRANCE = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
STORY = "Once upon a time, in a small village by the sea, there lived"


def text_of(client: openai.OpenAI, prompt: str = STORY, **fields: object) -> str:
    fields = {"max_tokens": 40, "temperature": 0} | fields
    return client.completions.create(model=MODEL, prompt=prompt, **fields).choices[0].text


def streamed(client: openai.OpenAI, prompt: str = STORY, **fields: object) -> tuple[list[str], str | None]:
    fields = {"max_tokens": 40, "temperature": 0} | fields
    chunks, reason = [], None
    for event in client.completions.create(model=MODEL, prompt=prompt, stream=True, **fields):
        chunks.append(event.choices[0].text)
        reason = event.choices[0].finish_reason or reason
    return chunks, reason


def chat_streamed(
    client: openai.OpenAI, messages: list[dict[str, str]], **fields: object
) -> tuple[list[str], str | None]:
    fields = {"max_tokens": 40, "temperature": 0} | fields
    chunks, reason = [], None
    for event in client.chat.completions.create(model=MODEL, messages=messages, stream=True, **fields):
        chunks.append(event.choices[0].delta.content or "")
        reason = event.choices[0].finish_reason or reason
    return chunks, reason


def test_chat_answers_and_streams_the_same(client):
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 8
    chunks, reason = chat_streamed(client, FRANCE)
    assert ("".join(chunks), reason) == ("The capital of France is Paris.", "stop")
    assert len([c for c in chunks if c]) > 3


def test_a_second_request_finds_the_prefix_and_says_so(client, server):
    prompt = "The bathyal zone begins at the edge of the shelf. " * 12 + "Unique to this test."
    first = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)
    again = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)
    assert again.choices[0].text == first.choices[0].text
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    want = (first.usage.prompt_tokens - 1) // 16 * 16
    assert again.usage.prompt_tokens_details.cached_tokens == want
    assert again.usage.model_extra["cached_tokens_by_tier"] == {"l1": want, "l2": 0, "l3": 0}


@pytest.mark.parametrize("span", [(17, 29), (3, 4), (40, 60)])
def test_stop_strings_that_straddle_tokens_are_found_and_never_leaked(client, span):
    """Case B1, both endpoints, streamed and not."""
    whole = text_of(client)
    stop = whole[slice(*span)]
    want = whole[: whole.index(stop)]
    assert text_of(client, stop=stop) == want
    chunks, reason = streamed(client, stop=[stop])
    assert ("".join(chunks), reason) == (want, "stop")
    messages = [{"role": "user", "content": "Tell me a story about a village by the sea."}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=40, temperature=0)
    whole_text = whole.choices[0].message.content
    stop = whole_text[slice(*span)]
    chunks, reason = chat_streamed(client, messages, stop=[stop])
    assert ("".join(chunks), reason) == (whole_text[: whole_text.index(stop)], "stop")


def test_near_misses_of_a_stop_string_are_delivered_whole(client):
    whole = text_of(client)
    almost = whole[-6:] + "☂"  # matches to the very end and then does not
    assert text_of(client, stop=[almost, whole[5:12] + "\x00"]) == whole
    assert "".join(streamed(client, stop=[almost, "y" * 200])[0]) == whole
    with pytest.raises(openai.BadRequestError) as refused:
        text_of(client, stop="")
    assert "stop" in str(refused.value)


LINE = "🪼👩\u200d🔬 příliš žluťoučký 한국어 \U0001d505\U0001d522 é"


def test_characters_of_several_tokens_are_never_cut(client):
    """Case B3: greedy copies a line of such characters; each length ends somewhere inside one."""
    repeat = "\n".join([LINE] * 6) + "\n"
    longest = ""
    for n in (1, 2, 3, 4, 5, 7, 8, 11, 13, 17, 21, 26, 30):
        plain = text_of(client, repeat, max_tokens=n)
        chunks, _ = streamed(client, repeat, max_tokens=n)
        assert "".join(chunks) == plain
        assert all("�" not in c or "�" in plain for c in chunks)
        assert "�" not in plain[:-1]  # only an unfinished last character may be marked
        longest = plain
    assert len(longest.encode()) > len(longest) + 10, f"the model did not copy the line: {longest!r}"


def test_logprobs_bytes_join_to_the_text(client):
    """Case B3: the bytes are the tokens' true ones, also where a token is a part of a character."""
    repeat = "\n".join([LINE] * 6) + "\n"
    answer = client.completions.create(model=MODEL, prompt=repeat, max_tokens=24, temperature=0, logprobs=1)
    assert len(answer.choices[0].logprobs.tokens) == 24
    messages = [{"role": "user", "content": f"Repeat exactly: {LINE}"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=32, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    joined = bytes(b for entry in content for b in entry.bytes or [])
    assert joined.decode(errors="replace").rstrip("�") == answer.choices[0].message.content.rstrip("�")
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, abs=1e-4)
    legacy = client.completions.create(model=MODEL, prompt=STORY, max_tokens=5, temperature=0, logprobs=2)
    assert len(legacy.choices[0].logprobs.tokens) == 5
    assert "".join(legacy.choices[0].logprobs.tokens) == legacy.choices[0].text


def test_echo_with_logprobs_covers_the_prompt(client):
    answer = client.completions.create(model=MODEL, prompt=STORY, max_tokens=2, temperature=0, echo=True, logprobs=1)
    assert answer.choices[0].text.startswith(STORY)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == answer.usage.prompt_tokens + 2
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])


def test_three_seeded_choices_are_the_same_in_any_company(client, server):
    """Case B4."""
    ask = {"model": MODEL, "prompt": STORY, "max_tokens": 12, "n": 3, "seed": 7, "temperature": 0.8}
    alone = client.completions.create(**ask)
    texts = [c.text for c in sorted(alone.choices, key=lambda c: c.index)]
    assert [c.index for c in alone.choices] == [0, 1, 2]
    assert alone.usage.completion_tokens == 36
    noise = [client.completions.create(model=MODEL, prompt=f"{i} {STORY}", max_tokens=30, temperature=1, stream=True)
             for i in range(8)]  # fmt: skip
    by_index: dict[int, str] = {0: "", 1: "", 2: ""}
    reasons: list[int] = []
    last = None
    for event in client.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        last = event
        for choice in event.choices:
            by_index[choice.index] += choice.text
            reasons += [choice.index] if choice.finish_reason else []
    assert [by_index[i] for i in range(3)] == texts
    assert sorted(reasons) == [0, 1, 2]
    assert last.choices == []
    assert last.usage.prompt_tokens == alone.usage.prompt_tokens
    assert last.usage.prompt_tokens_details.cached_tokens >= 0
    for stream in noise:
        stream.close()
    warm = client.completions.create(**ask)  # the prompt is cached by now
    assert [c.text for c in sorted(warm.choices, key=lambda c: c.index)] == texts
    different = {
        tuple(c.text for c in client.completions.create(**{**ask, "prompt": f"{STORY} {i}"}).choices) for i in range(5)
    }
    assert any(len(set(texts)) > 1 for texts in different)


def test_equal_prompts_without_a_seed_get_noise_of_their_own(client):
    answer = client.completions.create(model=MODEL, prompt=[STORY] * 4, max_tokens=12, temperature=1)
    assert len({c.text for c in answer.choices}) > 1
    seeded = client.completions.create(model=MODEL, prompt=[STORY] * 2, max_tokens=12, temperature=1, seed=5)
    assert seeded.choices[0].text == seeded.choices[1].text


def test_prompt_as_token_ids(client, server):
    ids = server.post("/tokenize", {"model": MODEL, "prompt": STORY}).json()["tokens"]
    assert text_of(client, ids) == text_of(client, STORY)
    both = client.completions.create(model=MODEL, prompt=[ids, ids[:5]], max_tokens=3, temperature=0)
    assert [c.index for c in both.choices] == [0, 1]
    assert both.usage.prompt_tokens == len(ids) + 5


def test_one_token_ends_by_length(client):
    answer = client.completions.create(model=MODEL, prompt=STORY, max_tokens=1)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 1


def test_empty_prompts_are_refused_where_the_model_adds_no_start_token(server):
    """Case B7."""
    for prompt in ("", [], [[]], [""]):
        response = server.post("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 2})
        assert response.status_code == 400, (prompt, response.text)
        assert "prompt" in response.json()["error"]["message"]
    server.complete(STORY)


def test_prompts_at_and_over_the_limit(server):
    """Case B7: context-1 tokens work and end by length; more is refused in under a second, with both numbers."""
    limit = 8192
    start = time.monotonic()
    for tokens, max_tokens in ((limit, 1), (limit + 1, 1), (limit - 10, 11)):
        response = server.post("/v1/completions", {"model": MODEL, "prompt": [5] * tokens, "max_tokens": max_tokens})
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert str(limit) in message
        assert str(tokens) in message
    assert time.monotonic() - start < 3
    server.complete(STORY)


def test_unknown_model_and_broken_bodies(server):
    response = server.post("/v1/completions", {"model": "nope", "prompt": "x"})
    assert response.status_code == 404
    for body in (b"{", b"[]", b"null", b'"x"', b"\xff\xfe"):
        answer = httpx.post(
            server.url + "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        assert 400 <= answer.status_code < 500
        assert "message" in answer.json()["error"]
        assert len(answer.content) < 4096
    server.complete(STORY)


def test_a_client_that_leaves_mid_stream_frees_its_pages(client, server):
    stream = client.completions.create(model=MODEL, prompt=STORY + " leaving", max_tokens=4000, stream=True,
                                       temperature=0, extra_body={"ignore_eos": True})  # fmt: skip
    for _, event in zip(range(4), stream, strict=False):
        assert event.choices
    assert server.get("/cache")["requests"]["running"] == 1
    stream.close()
    server.wait_quiet()
    # the same for a client that is not streaming
    with pytest.raises(httpx.ReadTimeout):
        server.post("/v1/completions", {"model": MODEL, "prompt": STORY, "max_tokens": 4000, "ignore_eos": True}, 1.0)
    server.wait_quiet()


def test_hidden_states_on_request(server):
    body = {"model": MODEL, "prompt": STORY, "max_tokens": 3, "temperature": 0, "return_hidden_states": True}
    answer = server.post("/v1/completions", body).json()
    states = answer["choices"][0]["hidden_states"]
    assert len(states) == 3
    assert len(states[0]) == 576


def test_flush_says_what_it_dropped(server):
    """Case C5, the quiet half."""
    server.complete("A page that will be flushed. " * 20)
    dropped = server.post("/cache/flush", {}).json()
    assert dropped["dropped_pages"] > 0
    again = server.complete("A page that will be flushed. " * 20)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_metrics_add_up_with_what_clients_saw(server: ServerProcess):
    """Cases H3 and H1, one rank."""

    def counters() -> dict[str, float]:
        found = {}
        for line in httpx.get(server.url + "/metrics").text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                found[name] = float(value)
        return found

    server.wait_quiet()
    time.sleep(1.5)
    before = counters()
    usages = [server.complete(f"Numbers {i}. " * 30)["usage"] for i in (1, 2, 1)]
    time.sleep(2.5)
    after = counters()

    def grown(prefix: str) -> float:
        names = [n for n in after if n.startswith(prefix)]
        assert names, f"no series {prefix}: {sorted(after)[:50]}"
        return sum(after[n] - before.get(n, 0) for n in names)

    assert grown("benthic_prompt_tokens_total") == sum(u["prompt_tokens"] for u in usages)
    assert grown("benthic_generated_tokens_total") == sum(u["completion_tokens"] for u in usages)
    assert grown("benthic_cached_tokens_total") == sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)

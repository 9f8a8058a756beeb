"""`/v1/chat/completions` through the real client."""

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

MESSAGES = [{"role": "system", "content": "S"}, {"role": "user", "content": "häß 👩‍👩‍👧"}]
RENDERED = "[system]S[user]häß 👩‍👩‍👧"


def chat(client: openai.OpenAI, **fields: object) -> ChatCompletion:
    return client.chat.completions.create(  # type: ignore[call-overload, no-any-return]
        **{"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 60} | fields
    )


def stream(client: openai.OpenAI, **fields: object) -> list[ChatCompletionChunk]:
    return list(chat(client, stream=True, **fields))  # type: ignore[arg-type]


def repeated(num_bytes: int) -> str:
    return (RENDERED.encode() * 10)[:num_bytes].decode("utf-8", "replace")


def test_plain_answer(client: openai.OpenAI) -> None:
    answer = chat(client)
    message = answer.choices[0].message
    assert (message.role, message.content, answer.choices[0].finish_reason) == ("assistant", repeated(60), "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(RENDERED.encode())
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 60


def test_stream_has_the_role_first_one_reason_and_usage_last(client: openai.OpenAI) -> None:
    chunks = stream(client, n=2, stream_options={"include_usage": True})
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    assert all(choice.delta.role is None for chunk in chunks[2:] for choice in chunk.choices)
    for index in (0, 1):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in own) == repeated(60)
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["length"]
        assert own[-1].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 120
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_logprob_bytes_are_the_text(client: openai.OpenAI) -> None:
    plain = chat(client, logprobs=True, top_logprobs=3).choices[0]
    assert plain.logprobs is not None
    assert plain.logprobs.content is not None
    data = bytes(byte for entry in plain.logprobs.content for byte in entry.bytes or ())
    assert data == (RENDERED.encode() * 10)[:60]
    assert {len(entry.top_logprobs) for entry in plain.logprobs.content} == {3}
    parts = [choice.logprobs for chunk in stream(client, logprobs=True) for choice in chunk.choices if choice.logprobs]
    assert bytes(byte for part in parts for entry in part.content or () for byte in entry.bytes or ()) == data


def test_stop_string_and_its_logprobs(client: openai.OpenAI) -> None:
    plain = chat(client, stop="user", logprobs=True).choices[0]
    assert (plain.message.content, plain.finish_reason) == ("[system]S[", "stop")
    assert plain.logprobs is not None
    assert len(plain.logprobs.content or ()) == len("[system]S[")
    choices = [choice for chunk in stream(client, stop="user", logprobs=True) for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "[system]S["
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
    assert [entry.token for entry in entries] == list("[system]S[")


def test_end_token(client: openai.OpenAI) -> None:
    answer = chat(client, logit_bias={"256": 100})
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "stop")


@pytest.mark.parametrize(
    ("messages", "rendered"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "[user]ab"),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": None}], "[user]q[assistant]"),
        (
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "refusal": None}],
            "[user]q[assistant]",
        ),
        ([{"role": "developer", "content": "d"}], "[system]d"),
        ([{"role": "user", "content": ""}], "[user]"),
    ],
)
def test_unusual_but_valid_messages(client: openai.OpenAI, messages: list[object], rendered: str) -> None:
    answer = chat(client, messages=messages, max_tokens=len(rendered))
    assert answer.choices[0].message.content == rendered


def test_max_completion_tokens_is_the_same_bound(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=openai.NOT_GIVEN, max_completion_tokens=2)
    assert answer.choices[0].message.content == "[s"


def test_template_arguments_reach_the_template(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="template refuses"):
        chat(client, extra_body={"chat_template_kwargs": {"refuse": True}})

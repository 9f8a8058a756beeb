"""`LLM` with the built-in model: answers, cache, stop strings, refusals."""

from collections.abc import Iterator

import pytest

from benthic import LLM
from benthic.common.errors import ConfigError, ModelError, RequestError


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", dtype="float32", page_size=16, l1_size="300MiB", max_running=4, seed=3) as model:
        yield model


def test_it_answers_in_order_and_finds_the_prefix_again(llm: LLM) -> None:
    prompts = ["The sea floor is home to " * 8, "Kelp forests grow " * 6]
    first = llm.generate(prompts, max_tokens=6, temperature=0.0)
    again = llm.generate(prompts, max_tokens=6, temperature=0.0)
    assert [a.text for a in first] == [a.text for a in again]
    assert [a.cached_tokens for a in first] == [0, 0]
    assert [a.cached_tokens for a in again] == [(a.prompt_tokens - 1) // 16 * 16 for a in again]
    assert all(a.finish_reason in ("length", "stop") and a.token_ids for a in first)


def test_a_chat_ends_by_the_end_token(llm: LLM) -> None:
    ids = llm.render_chat([{"role": "user", "content": "What is the capital of France? Answer in one sentence."}])
    (answer,) = llm.generate([ids], max_tokens=40, temperature=0.0)
    assert (answer.text, answer.finish_reason) == ("The capital of France is Paris.", "stop")


def test_a_stop_string_cuts_the_text_and_frees_the_request(llm: LLM) -> None:
    (whole,) = llm.generate("Once upon a time", max_tokens=30, temperature=0.0)
    stop = whole.text[20:26]
    (cut,) = llm.generate("Once upon a time", max_tokens=30, temperature=0.0, stop=stop)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert llm.engine.idle
    assert all(lane.private == 0 for lane in llm.state().lanes)


def test_a_stop_token_ends_the_answer_and_is_no_part_of_its_text(llm: LLM) -> None:
    (whole,) = llm.generate("Once upon a time", max_tokens=12, temperature=0.0)
    token = whole.token_ids[8]
    at = whole.token_ids.index(token)
    (cut,) = llm.generate("Once upon a time", max_tokens=12, temperature=0.0, stop_token_ids=[token])
    (before,) = llm.generate("Once upon a time", max_tokens=at, temperature=0.0)
    assert (cut.text, cut.token_ids, cut.finish_reason) == (before.text, whole.token_ids[: at + 1], "stop")


def test_seeds_decide_the_text(llm: LLM) -> None:
    texts = [llm.generate("The", max_tokens=12, seed=s, temperature=1.0)[0].text for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("prompt", "fields", "words"),
    [
        ("", {}, "empty"),
        ([[1] * 7000], {}, "at most"),
        ([[49152]], {}, "49151"),
        ("x", {"max_tokens": 0}, "max_tokens"),
        ("x", {"beam_width": 4}, "beam_width"),
        ("x", {"return_hidden_states": True}, "return_hidden_states"),
        ("x", {"logit_bias": {49152: 1.0}}, "logit_bias: 49152"),
        ("x", {"stop_token_ids": [-1]}, "stop_token_ids: -1"),
        ("x", {"temperature": -0.1}, "temperature -0.1"),
        ("x", {"top_p": float("nan")}, "top_p nan"),
        ("x", {"max_tokens": 3, "min_tokens": 4}, "min_tokens 4"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_does(llm, prompt, fields, words) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(prompt, **fields)
    assert llm.engine.idle


def test_prompts_of_the_wrong_kind_are_named(llm: LLM) -> None:
    with pytest.raises(RequestError, match="lists of token ids"):
        llm.generate([1, 2, 3])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="max_tokens"):
        llm.generate("x", max_tokns=9)


def test_wrong_options_and_models_are_named() -> None:
    with pytest.raises(ConfigError, match="page_sice"):
        LLM(page_sice=16)
    with pytest.raises(ModelError, match="nowhere"):
        LLM("./nowhere")

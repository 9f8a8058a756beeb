"""The built-in model's real tokenizer: prompts equal transformers' own, text equals its decode."""

# ruff: noqa: RUF001 - look-alike characters are the point here

import pytest

from benthic.common.errors import RequestError
from benthic.messages.start import ModelSource
from benthic.server.loading import find_model, load_text
from benthic.text.stream import Detokenizer
from benthic.text.text_model import CheckpointText
from benthic.weights.locate import Source
from benthic.weights.tokenizer import load_tokenizer

TEXTS = ["Hello  world\n\n1", "😀👩‍👩‍👧 Žluťoučký kůň 한국어 𝔐𝔞𝔱𝔥", " leading", "<|im_start|>user", "tab\tend "]


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return find_model("smollm2-135m")


@pytest.fixture(scope="module")
def model(source: ModelSource) -> CheckpointText:
    side = load_text(source)
    assert side.defaults.eos_token_ids == (2,)
    assert isinstance(side.tokenizing.model, CheckpointText)
    return side.tokenizing.model


@pytest.fixture(scope="module")
def reference(source: ModelSource) -> object:
    return load_tokenizer(Source(source.kind, source.path, source.written))


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_and_text_equal_the_tokenizers(model: CheckpointText, reference: object, text: str) -> None:
    tokens = model.encode(text, add_special_tokens=True)
    assert tokens == reference(text)["input_ids"]  # type: ignore[operator]
    for length in range(len(tokens) + 1):
        for skip in (True, False):
            detokenizer = Detokenizer(model.token_bytes, skip_special=skip)
            mine = "".join(detokenizer.push(token) for token in tokens[:length]) + detokenizer.flush()
            assert mine == reference.decode(tokens[:length], skip_special_tokens=skip)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "What is 1 + 1?"}],
        [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": ""}],
    ],
)
def test_chat_prompts_equal_transformers(
    model: CheckpointText, reference: object, messages: list[dict[str, str]]
) -> None:
    mine = model.encode(model.render_chat(messages, {}), add_special_tokens=False)
    theirs = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)  # type: ignore[attr-defined]
    assert mine == theirs


def test_template_arguments_can_not_replace_the_template(model: CheckpointText) -> None:
    with pytest.raises(RequestError, match="chat_template"):
        model.render_chat([{"role": "user", "content": "x"}], {"chat_template": "{{ 1 }}"})

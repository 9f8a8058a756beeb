"""Token bytes agree with the tokenizer's own decode, for both families of decoders."""

# ruff: noqa: RUF001 - look-alike characters are the point here

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benthic.common.errors import ModelError
from benthic.text.token_bytes import TokenBytes, build_token_bytes


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["two words", "<｜x▁y｜>"])
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def sentencepiece() -> Tokenizer:
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {"▁a": 256, "b": 257, "▁": 258, "</s>": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def table_of(tokenizer: Tokenizer) -> TokenBytes:
    special = [i for i, added in tokenizer.get_added_tokens_decoder().items() if added.special]
    return build_token_bytes(tokenizer.get_vocab(), special, json.loads(tokenizer.decoder.__getstate__()))


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()
BYTE_TABLE, PIECE_TABLE = table_of(BYTE_LEVEL), table_of(SENTENCEPIECE)


@given(st.lists(st.integers(0, 258), max_size=30), st.booleans())
def test_byte_level_equals_decode(tokens: list[int], skip: bool) -> None:
    decoded = BYTE_LEVEL.decode(tokens, skip_special_tokens=skip)
    assert BYTE_TABLE.join(tokens, skip_special=skip).decode("utf-8", "replace") == decoded


@given(st.lists(st.one_of(st.integers(256, 258), st.sampled_from("aé😀")), max_size=20))
def test_sentencepiece_equals_decode_of_valid_text(parts: list[int | str]) -> None:
    tokens = [token for part in parts for token in ([part] if isinstance(part, int) else part.encode())]
    text = PIECE_TABLE.join(tokens).decode()
    assert text.removeprefix(" ") == SENTENCEPIECE.decode(tokens)
    assert PIECE_TABLE.strip_start == 1


def test_ids_past_the_vocabulary_are_empty() -> None:
    assert BYTE_TABLE.bytes_of(10**6) == b""
    assert BYTE_TABLE.bytes_of(-1) == b""


def test_special_tokens_are_known() -> None:
    end = BYTE_LEVEL.token_to_id("<end>")
    assert BYTE_TABLE.is_special(end)
    assert not BYTE_TABLE.is_special(BYTE_LEVEL.token_to_id("two words"))
    assert BYTE_TABLE.longest == len("<｜x▁y｜>".encode())


def test_unknown_decoder_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="WordPiece"):
        build_token_bytes({"a": 0}, [], {"type": "WordPiece"})

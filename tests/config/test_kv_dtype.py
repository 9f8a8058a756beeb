"""What --kv-dtype may say."""

import pytest

from benthic.common.errors import ConfigError
from benthic.config import options_from_mapping, resolve
from benthic.config.kv_dtype import KVDtypes, parse_kv_dtype


@pytest.mark.parametrize(
    ("text", "target", "index"),
    [
        (None, "auto", "auto"),
        ("auto", "auto", "auto"),
        ("model", "model", "model"),
        ("fp8", "fp8", "fp8"),
        ("fp8_e4m3", "fp8", "fp8"),
        ("bf16", "bfloat16", "bfloat16"),
        ("float16", "float16", "float16"),
        ("index=fp8", "auto", "fp8"),
        (" target = fp8 , index = model ", "fp8", "model"),
        ("index=bf16,target=auto", "auto", "bfloat16"),
    ],
)
def test_one_value_for_all_or_one_for_each(text: str | None, target: str, index: str) -> None:
    assert parse_kv_dtype(text) == KVDtypes(target=target, index=index)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int8", "--kv-dtype int8: 'int8' must be one of auto, model, fp8"),
        ("fp8_e5m2", "e4m3 with scales here; write fp8"),
        ("target=fp8,draft=fp8", "'draft' is not a part of the cache; write target=fp8,index=fp8"),
        ("target=fp8,", "not a part of the cache"),
        ("target=fp8,target=model", "says target twice"),
        ("target=", "'' must be one of"),
        ("", "'' must be one of"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_kv_dtype(text)


def test_it_is_an_option_like_others() -> None:
    given = options_from_mapping({"kv-dtype": ["target=model", "index=fp8"]}, "a file")
    assert resolve(given, {}).engine.model.kv_dtype == KVDtypes(target="model", index="fp8")
    with pytest.raises(ConfigError, match="--kv-dtype nvfp4"):
        resolve(options_from_mapping({"kv_dtype": "nvfp4"}, "a caller"), {})

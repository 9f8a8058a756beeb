"""`--kv-dtype`: how the KV cache stores latents or keys and values (target), and index keys (index)."""

from dataclasses import dataclass

from benthic.common.errors import ConfigError

FLAG = "--kv-dtype"
_SPELLINGS = {
    "auto": "auto",
    "model": "model",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "float32": "float32",
    "fp32": "float32",
}
_PARTS = ("target", "index")
_KNOWN = "auto, model, fp8, bfloat16, float16, float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVDtypes:
    """What the user wants of each payload: auto, model (the model's dtype), fp8, or a dtype's name."""

    target: str = "auto"
    index: str = "auto"


def parse_kv_dtype(text: str | None) -> KVDtypes:
    """One value for all, or `target=…,index=…`; what is left out is auto. Raises ConfigError."""
    if text is None:
        return KVDtypes()
    if "=" not in text:
        value = _value(text.strip(), text)
        return KVDtypes(target=value, index=value)
    chosen: dict[str, str] = {}
    for pair in text.split(","):
        part, _, value = (piece.strip() for piece in pair.partition("="))
        if part not in _PARTS:
            raise ConfigError(f"{FLAG} {text}: {part or pair!r} is not a part of the cache; write target=fp8,index=fp8")
        if part in chosen:
            raise ConfigError(f"{FLAG} {text}: says {part} twice")
        chosen[part] = _value(value, text)
    return KVDtypes(**chosen)


def _value(value: str, text: str) -> str:
    if value == "fp8_e5m2":
        raise ConfigError(f"{FLAG} {text}: fp8 is stored as e4m3 with scales here; write fp8")
    if value not in _SPELLINGS:
        raise ConfigError(f"{FLAG} {text}: {value!r} must be one of {_KNOWN}")
    return _SPELLINGS[value]

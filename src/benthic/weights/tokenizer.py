"""The tokenizer of a checkpoint, as a transformers object with the chat template. Loads no torch.

GGUF files carry vocabulary and merges but only the *name* of the pre-tokenizer (`tokenizer.ggml.pre`), so each name
that is known to be right is listed here; transformers' own GGUF path ignores the name and splits `foo\\n\\n1` wrongly.
"""

import json
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from benthic.common.errors import ModelError
from benthic.weights.gguf import GGUFFile
from benthic.weights.locate import Source

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_apart() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _pattern(digits: str) -> Callable[[], Any]:
    def build() -> Any:
        split = pre_tokenizers.Split(Regex(_WORDS + "|" + digits + _TAIL), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _byte_level,
    "smollm": _digits_apart,
    "llama-bpe": _pattern(r"\p{N}{1,3}"),
    "qwen2": _pattern(r"\p{N}"),
}
_WHOLE_WORDS_FIRST = ("llama-bpe",)  # a piece that is a token as it stands is never merged
_COMPOSED = ("qwen2",)  # normalised to NFC first
_BEGINS_BY_DEFAULT = ("llama-bpe",)  # bos is added unless the file says otherwise


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The tokenizer, chat template included. Raises ModelError where it is missing, damaged or of an unknown kind."""
    try:
        return _from_gguf(GGUFFile(source.path)) if source.kind == "gguf" else _from_folder(source)
    except ModelError:
        raise
    except Exception as error:  # noqa: BLE001 - tokenizers raises plain Exception, transformers anything, for damaged files
        raise ModelError(f"{source.path}: its tokenizer can't be loaded: {type(error).__name__}: {error}") from None


def _from_folder(source: Source) -> PreTrainedTokenizerBase:
    if (source.path / "tokenizer.json").is_file():
        # not AutoTokenizer, which imports torch; tokenizer.json says everything that is needed
        return PreTrainedTokenizerFast(**_folder_arguments(source))  # type: ignore[no-untyped-call]  # theirs
    others = [n for n in ("tokenizer.model", "vocab.json") if (source.path / n).is_file()]
    if not others:
        raise ModelError(f"{source.path}: no tokenizer: expected tokenizer.json")
    from transformers import AutoTokenizer  # needs torch; only for old checkpoints without tokenizer.json

    return AutoTokenizer.from_pretrained(str(source.path), local_files_only=True)


def _folder_arguments(source: Source) -> dict[str, Any]:
    path = source.path / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    arguments = {key: _token(config[key]) for key in _SPECIAL.values() if config.get(key) is not None}
    template = source.path / "chat_template.jinja"
    text = (
        template.read_text(encoding="utf-8") if template.is_file() else _default_template(config.get("chat_template"))
    )
    return {
        "tokenizer_file": str(source.path / "tokenizer.json"),
        "chat_template": text,
        "model_max_length": config.get("model_max_length"),
        "clean_up_tokenization_spaces": False,
        **arguments,
    }


def _token(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _default_template(value: Any) -> str | None:
    """Some checkpoints list several templates by name; the one called `default` is for chat."""
    if isinstance(value, list):
        value = next((entry.get("template") for entry in value if entry.get("name") == "default"), None)
    return None if value is None else str(value)


def _from_gguf(file: GGUFFile) -> PreTrainedTokenizerFast:
    kind, pre = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ModelError(f"{file.path}: tokenizer of kind {kind!r}; supported in GGUF files: 'gpt2' (byte-level BPE)")
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path}: pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not supported; supported: "
            f"{', '.join(_PRE_TOKENIZERS)}. Use the model's safetensors folder, which has its tokenizer.json"
        )
    tokens = file.get("tokenizer.ggml.tokens") or []
    types = file.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise ModelError(f"{file.path}: {len(tokens)} tokens but {len(types)} token types; expected the same number")
    special = {
        argument: tokens[_token_id(file, f"tokenizer.ggml.{name}_token_id", len(tokens))]
        for name, argument in _SPECIAL.items()
        if file.get(f"tokenizer.ggml.{name}_token_id") is not None
    }
    tokenizer = _build(file, pre, tokens)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _of(tokens, types, _CONTROL)])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in _of(tokens, types, _USER_DEFINED)])
    _set_post_processor(tokenizer, file, pre, special)
    context = file.get(f"{file.get('general.architecture')}.context_length")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # theirs
        tokenizer_object=tokenizer,
        chat_template=file.get("tokenizer.chat_template"),
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        **special,
    )


def _build(file: GGUFFile, pre: str, tokens: list[str]) -> Tokenizer:
    merges = [tuple(m.split(" ", 1)) for m in file.get("tokenizer.ggml.merges") or []]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre in _WHOLE_WORDS_FIRST,
            fuse_unk=False,
        )
    )
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _of(tokens: list[str], types: list[int], wanted: int) -> list[str]:
    return [token for token, kind in zip(tokens, types, strict=True) if kind == wanted]


def _set_post_processor(tokenizer: Tokenizer, file: GGUFFile, pre: str, special: dict[str, str]) -> None:
    begin = special.get("bos_token") if file.get("tokenizer.ggml.add_bos_token", pre in _BEGINS_BY_DEFAULT) else None
    end = special.get("eos_token") if file.get("tokenizer.ggml.add_eos_token", False) else None
    level = processors.ByteLevel(trim_offsets=False)
    if begin is None and end is None:
        tokenizer.post_processor = level
        return
    single = " ".join(part for part in (begin, "$A", end) if part)
    pair = " ".join(part for part in (begin, "$A", begin, "$B", end) if part)
    ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((begin, end)) if token]
    template = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
    tokenizer.post_processor = processors.Sequence([level, template])


def _token_id(file: GGUFFile, key: str, count: int) -> int:
    value = file.get(key)
    if not isinstance(value, int) or not 0 <= value < count:
        raise ModelError(f"{file.path}: {key} is {value!r}, expected a token id below {count}")
    return value

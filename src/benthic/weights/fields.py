"""Typed access to the tables that describe a model: config.json, generation_config.json, GGUF metadata."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benthic.common.errors import ModelError

_HUGE = 1 << 24  # no size of a config is larger: a vocabulary has less than 2**24 entries


class Fields:
    """A table; a wrong type or size raises ModelError with file, field, value and what was expected.

    A field that is null counts as absent.
    """

    def __init__(self, raw: Mapping[str, Any], where: Path, prefix: str = "") -> None:
        self.raw, self.where, self._prefix = raw, where, prefix

    def bad(self, key: str, expected: str) -> ModelError:
        """The error to raise for a value that isn't supported."""
        found = repr(self.raw[key])[:100] if key in self.raw else "nothing"
        return ModelError(f"{self.where}: {self._prefix}{key}: expected {expected}, found {found}")

    def given(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self.raw.get(key) is not None

    def count(self, key: str, least: int = 1) -> int:
        """A whole number that must be there."""
        value = self.optional_count(key, least)
        if value is None:
            raise self.bad(key, f"a whole number from {least} to {_HUGE}")
        return value

    def optional_count(self, key: str, least: int) -> int | None:
        """A whole number, or None where absent."""
        value = self.raw.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _HUGE:
            raise self.bad(key, f"a whole number from {least} to {_HUGE}")
        return value

    def number(self, key: str, default: float | None, least: float, most: float) -> float:
        """A number; where absent the default, if there is one."""
        value = self.optional_number(key, least, most)
        if value is not None:
            return value
        if default is None:
            raise self.bad(key, f"a number from {least:g} to {most:g}")
        return default

    def optional_number(self, key: str, least: float, most: float) -> float | None:
        """A number, or None where absent."""
        value = self.raw.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.bad(key, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str, default: bool | None) -> bool:
        """True or false; where absent the default, if there is one."""
        value = default if self.raw.get(key) is None else self.raw[key]
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; nothing where absent."""
        value = self.raw.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= _HUGE for i in ids):
            raise self.bad(key, "a token id or a list of them")
        return tuple(ids)

    def table(self, key: str) -> "Fields":
        """A table within this one; an empty one where absent."""
        value = self.raw.get(key)
        if not isinstance(value, dict | None):
            raise self.bad(key, "a table")
        return Fields(value or {}, self.where, f"{self._prefix}{key}.")

    def demand(self, key: str, wanted: object, why: str) -> None:
        """Raises unless the field is absent or `wanted`; `why` follows the value in the message."""
        value = self.raw.get(key)
        if value is not None and (value != wanted or isinstance(value, bool) != isinstance(wanted, bool)):
            raise self.bad(key, f"{json.dumps(wanted)}{why}")


def given(raw: Mapping[str, Any] | None, key: str) -> dict[str, Any]:
    """The field as a table of one entry, or an empty one where it is absent."""
    return {key: raw[key]} if raw and raw.get(key) is not None else {}


def read_json(path: Path) -> Mapping[str, Any]:
    """The table in a JSON file. Raises ModelError if it can't be read or holds something else."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: can't be read: {error}") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{path}: expected a table, found {type(parsed).__name__}")
    return parsed


def check_tokens_and_layers(where: Path, vocab_size: int, num_layers: int, eos_token_ids: tuple[int, ...]) -> None:
    """What every architecture's config must satisfy. Raises ModelError."""
    if num_layers > 4096:
        raise ModelError(f"{where}: {num_layers} layers: expected 4096 at most")
    outside = [i for i in eos_token_ids if i >= vocab_size]
    if outside:
        raise ModelError(f"{where}: end token {outside[0]}: expected an id below the vocabulary's size, {vocab_size}")

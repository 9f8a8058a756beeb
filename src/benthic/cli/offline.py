"""What `benthic generate` and `benthic bench offline` share: an engine in this process, out of the options."""

from collections.abc import Sequence
from typing import Any, Protocol

from benthic.config import OPTIONS, demand_one_rank
from benthic.config.parallel_options import resolve_parallel
from benthic.config.resolve import DEFAULT_MODEL


class Generation(Protocol):
    """One prompt's answer."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...


class Generator(Protocol):
    """The part of `benthic.LLM` that the commands use."""

    def generate(self, prompts: Any, **sampling: Any) -> Sequence[Generation]:
        """One answer a prompt, in order."""


def engine_arguments(options: Any) -> dict[str, Any]:
    """What the user gave, as keyword arguments of `LLM(...)`; a config file's server options are left out.

    Raises ConfigError where several ranks were asked for.
    """
    demand_one_rank(resolve_parallel(options))
    given = {option.name: getattr(options, option.name) for option in OPTIONS if not option.server_only}
    return {"model": options.model or DEFAULT_MODEL} | {name: v for name, v in given.items() if v is not None}


def open_llm(arguments: dict[str, Any]) -> Any:
    """Load the model: a context manager that is a `Generator`. Raises BenthicError."""
    from benthic import LLM  # loads torch

    return LLM(**arguments)

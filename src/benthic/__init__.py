"""Benthic: an LLM serving engine for long prompts. `LLM` is the offline entry point; `benthic serve` the online one."""

from typing import TYPE_CHECKING

from benthic.common.version import __version__

__all__ = ["LLM", "__version__"]

if TYPE_CHECKING:
    from benthic.engine.llm import LLM


def __getattr__(name: str) -> object:
    """Import `LLM` at first use: `import benthic` alone must not load torch (the server process never does)."""
    if name == "LLM":
        from benthic.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'benthic' has no attribute {name!r}")

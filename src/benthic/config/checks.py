"""Single values as users give them: a default where there is none, and a refusal that names the flag."""

from typing import TypeVar

from benthic.common.errors import ConfigError
from benthic.common.units import parse_size
from benthic.config.settings import ParallelConfig

T = TypeVar("T", int, float)


def one_of(value: str | None, default: str, allowed: tuple[str, ...], flag: str) -> str:
    """`value`, or `default` where nothing was given. Raises ConfigError for anything but `allowed`."""
    if value is None:
        return default
    if value not in allowed:
        raise ConfigError(f"{flag} {value}: must be one of {', '.join(allowed)}")
    return value


def at_least(value: T | None, default: T, least: T, flag: str) -> T:
    """`value`, or `default` where nothing was given. Raises ConfigError below `least`."""
    if value is None:
        return default
    if not value >= least:
        raise ConfigError(f"{flag} {value}: must be at least {least}")
    return value


def optional_at_least(value: int | None, least: int, flag: str) -> int | None:
    """`value`, or None where nothing was given. Raises ConfigError below `least`."""
    return None if value is None else at_least(value, least, least, flag)


def positive_size(text: str, flag: str) -> int:
    """Bytes of a size such as `64GiB`. Raises ConfigError for what is none, or 0."""
    size = parse_size(text, flag)
    if size <= 0:
        raise ConfigError(f"{flag} {text}: must be more than 0")
    return size


def demand_one_rank(parallel: ParallelConfig) -> None:
    """For what runs the engine in its own process. Raises ConfigError where several ranks were asked for."""
    if parallel.world_size > 1:
        flag = parallel.flag
        raise ConfigError(
            f"{flag}: an engine of {parallel.world_size} ranks needs as many processes, and this runs in one; "
            f"use `benthic serve MODEL {flag}` and send it requests, or leave {flag.split()[0]} out"
        )

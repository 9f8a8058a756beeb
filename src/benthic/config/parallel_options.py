"""The options of several ranks: how many, what they share, and which combinations mean nothing."""

from typing import Any

from benthic.common.errors import ConfigError
from benthic.config.checks import at_least, one_of
from benthic.config.settings import ParallelConfig

DISPATCHES = ("allgather", "deepep", "flashinfer")


def resolve_parallel(options: Any) -> ParallelConfig:
    """The ranks that `options` ask for. Raises ConfigError that names the flag to change or to add."""
    cp_size = at_least(options.cp, 1, 1, "--cp")
    tp_size = at_least(options.tp, 1, 1, "--tp")
    if cp_size > 1 and tp_size > 1:
        raise ConfigError(
            f"--cp {cp_size} with --tp {tp_size}: ranks share tokens and pages (--cp) or heads (--tp), not both; "
            f"give one of the two, e.g. --cp {cp_size * tp_size}"
        )
    expert_parallel = bool(options.ep)
    if expert_parallel and cp_size * tp_size == 1:
        raise ConfigError("--ep spreads the routed experts over the ranks, and there is one; add --cp N, e.g. --cp 2")
    return ParallelConfig(
        cp_size=cp_size,
        tp_size=tp_size,
        expert_parallel=expert_parallel,
        expert_dispatch=_dispatch(options.expert_dispatch, expert_parallel),
    )


def _dispatch(value: str | None, expert_parallel: bool) -> str:
    chosen = one_of(value, "allgather", DISPATCHES, "--expert-dispatch")
    if chosen != "allgather":
        raise ConfigError(
            f"--expert-dispatch {chosen}: {chosen} is not supported here; "
            f"--expert-dispatch allgather (the default) works with every expert backend"
        )
    if value is not None and not expert_parallel:
        raise ConfigError(
            f"--expert-dispatch {value} says how tokens reach experts on other ranks, and none are there; add --ep"
        )
    return chosen

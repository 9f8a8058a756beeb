"""Which part of a model one rank computes: its heads and MLP columns, its routed experts; and which sizes work."""

import dataclasses
import math

from benthic.common.errors import ConfigError
from benthic.parallel.layout import ParallelLayout
from benthic.weights.dsa_config import DsaConfig
from benthic.weights.model_config import LlamaConfig, ModelShape


def local_shape(config: ModelShape, layout: ParallelLayout) -> ModelShape:
    """The shape of what this rank computes and keeps; heads and MLP columns are the rank's own.

    Context and expert parallelism change nothing of it: every rank has all heads. Raises ConfigError, the same on all
    ranks, for a model that can't be cut this way or sizes that do not divide.
    """
    if layout.expert_parallel:
        _check_experts(config, layout)
    if layout.tp_size == 1:
        return config
    if isinstance(config, DsaConfig):
        raise ConfigError(
            f"--tp {layout.tp_size}: {config.architecture} keeps one latent a token for all heads, which can't be "
            f"shared out by heads; take --cp {layout.tp_size}, and --ep to spread the experts"
        )
    _check_heads(config, layout.tp_size)
    return dataclasses.replace(
        config,
        num_heads=config.num_heads // layout.tp_size,
        num_kv_heads=config.num_kv_heads // layout.tp_size,
        intermediate_size=config.intermediate_size // layout.tp_size,
    )


def tensor_share(count: int, layout: ParallelLayout) -> tuple[int, int]:
    """(first, number) of this rank's part of `count` rows or columns under tensor parallelism.

    Where a whole number of heads is one rank's, the rows of all heads are cut between heads.
    """
    size = count // layout.tp_size
    return layout.tp_rank * size, size


def local_experts(config: DsaConfig, layout: ParallelLayout) -> range:
    """The routed experts that this rank holds, the same ones in every layer; all of them without `--ep`."""
    size = config.moe.num_experts // layout.ep_size
    return range(layout.ep_rank * size, (layout.ep_rank + 1) * size)


def _check_heads(config: LlamaConfig, tp_size: int) -> None:
    heads, shared, columns = config.num_heads, config.num_kv_heads, config.intermediate_size
    common = math.gcd(heads, shared, columns)
    if common % tp_size:
        raise ConfigError(
            f"--tp {tp_size}: this {config.architecture} model has {heads} heads, {shared} kv heads and {columns} MLP "
            f"columns; --tp {_divisors(common)} {'divide' if common > 1 else 'divides'} them"
        )


def _check_experts(config: ModelShape, layout: ParallelLayout) -> None:
    if isinstance(config, LlamaConfig) or not any(config.moe.layers):
        raise ConfigError(f"--ep: this {config.architecture} model has no routed experts to spread; leave the flag out")
    experts = config.moe.num_experts
    if experts % layout.ep_size:
        raise ConfigError(
            f"--ep over {layout.ep_size} ranks: {config.architecture} has {experts} routed experts; "
            f"{_divisors(experts)} ranks divide them"
        )


def _divisors(count: int) -> str:
    """In words: "1, 2 or 4"."""
    *first, last = (str(size) for size in range(1, count + 1) if count % size == 0)
    return f"{', '.join(first)} or {last}" if first else last

"""One figure of `benchmarks.kernels`, and what the cases are built of: sizes, paged pools of random content."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from benthic.attention.latent import SCALE_BLOCK

Limit = Literal["copy", "bf16", "fp8"]
Call = Callable[[], object]
CACHE_BYTES = 512 << 20  # several times any L2 cache
MOST_CALLS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Shapes of `glm_dsa_8b` by default; see `attention.latent` for the letters."""

    device: torch.device
    dtype: torch.dtype
    page: int = 64
    queries: int = 8192  # of a prefill chunk
    keys: int = 32_768  # context of index scores and of sparse prefill
    context: int = 8192  # of decode
    batches: tuple[int, ...] = (1, 16, 64)
    index_heads: int = 32
    index_dim: int = 128
    topk: int = 2048
    heads: tuple[int, ...] = (32, 64)
    q_rank: int = 1024
    rank: int = 512
    rope: int = 64
    nope: int = 128
    hidden: int = 2048
    wide: int = 1024
    num_experts: int = 64
    chosen: int = 8
    tokens: tuple[int, ...] = (2048, 8192)  # of prefill experts

    @classmethod
    def small(cls, device: torch.device) -> "Sizes":
        """So small that a CPU runs every case in seconds: to try the benchmark out."""
        return cls(
            device=device, dtype=torch.float32, page=16, queries=48, keys=160, context=96, batches=(1, 3),
            index_heads=4, index_dim=32, topk=32, heads=(4,), q_rank=64, rank=128, rope=16, nope=16, hidden=64, wide=32,
            num_experts=8, chosen=2, tokens=(40,),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Work to be timed. Give `flop` or `num_bytes`: what one call computes or moves at least.

    `calls` do the same on data of their own, so that none finds its input in the device's L2 cache; `graph`: they are
    replayed from a CUDA graph, as the engine's decode steps are. `check` raises AssertionError for a wrong result.
    """

    name: str
    calls: Sequence[Call]
    check: Callable[[], None]
    limit: Limit
    graph: bool
    flop: float = 0.0
    num_bytes: float = 0.0
    aim: str = ""
    beside: tuple[str, Sequence[Call]] | None = None  # the same work by someone else, and who


def assert_near(got: torch.Tensor, want: torch.Tensor, what: str, tolerance: float = 2e-2) -> None:
    """No difference above `tolerance` of the largest value."""
    wanted = want.float()
    worst = (got.float() - wanted).abs().max().item()
    most = wanted.abs().max().item()
    assert worst <= tolerance * most, f"{what}: off by {worst:.3g} where the largest value is {most:.3g}"


def num_calls(bytes_per_call: float, device: torch.device) -> int:
    """How many calls overflow the L2 cache."""
    if device.type != "cuda":
        return 1
    return min(MOST_CALLS, max(2, int(-(-CACHE_BYTES // bytes_per_call))))


def page_tables(batch: int, tokens: int, sizes: Sizes) -> torch.Tensor:
    """int32 [batch, pages a row]: every page of a pool for so many contexts once, shuffled."""
    pages = -(-tokens // sizes.page)
    return torch.randperm(batch * pages, device=sizes.device).to(torch.int32).view(batch, pages)


def full_lens(batch: int, tokens: int, sizes: Sizes) -> torch.Tensor:
    """int32 [batch]."""
    return torch.full((batch,), tokens, dtype=torch.int32, device=sizes.device)


def randn(*shape: int, sizes: Sizes, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Normal numbers on the device."""
    return torch.randn(shape, device=sizes.device, dtype=dtype or sizes.dtype)


def rope_table(positions: int, sizes: Sizes) -> torch.Tensor:
    """float32 [positions, P]: P/2 cosines, then P/2 sines."""
    steps = torch.arange(0, sizes.rope, 2, device=sizes.device) / sizes.rope
    angles = torch.arange(positions, device=sizes.device)[:, None] * 10_000.0**-steps
    return torch.cat((angles.cos(), angles.sin()), -1).float()


def latent_pool(pages: int, fp8: bool, sizes: Sizes) -> torch.Tensor:
    """One layer's latents, the scratch page included, in the layout of `attention.latent`."""
    rows = (pages + 1, sizes.page)
    if not fp8:
        return randn(*rows, sizes.rank + sizes.rope, sizes=sizes)
    codes = e4m3(randn(*rows, sizes.rank, sizes=sizes))
    scales = torch.rand(*rows, -(-sizes.rank // SCALE_BLOCK), device=sizes.device) + 0.5
    rope = randn(*rows, sizes.rope, sizes=sizes, dtype=torch.bfloat16)
    return torch.cat([x.view(torch.uint8) for x in (codes, scales, rope)], -1)


def index_pool(pages: int, fp8: bool, sizes: Sizes) -> torch.Tensor:
    """One indexing layer's keys, the scratch page included."""
    keys = randn(pages + 1, sizes.page, sizes.index_dim, sizes=sizes)
    if not fp8:
        return keys
    scales = torch.rand(pages + 1, sizes.page, device=sizes.device) + 0.5
    return torch.cat([e4m3(keys).view(torch.uint8).flatten(1), scales.view(torch.uint8)], -1)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rounded to float8."""
    return x.to(torch.float8_e4m3fn)

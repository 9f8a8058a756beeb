"""Random steps for backends of attention over latents, which write their own context first."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benthic.attention.latent import (
    IndexNorm,
    IndexSpec,
    LatentBackend,
    LatentSpec,
    LayerNorms,
    Turn,
    latent_bytes,
)
from benthic.forward import ForwardBatch

HIGHEST = 4096  # positions in the rope table
QUERY_LATENT = 8  # Q


def latent_spec(
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    topk: int | None = 24,
    fp8: bool = False,
    index_fp8: bool = False,
    max_seq_len: int = 256,
    heads: int = 4,
    rank: int = 32,
    rope_dim: int = 16,
    index_heads: int = 4,
    index_dim: int = 32,
    page_size: int = 16,
) -> LatentSpec:
    """Two layers, of which the second indexes; topk None: dense."""
    index = None
    if topk is not None:
        index = IndexSpec(num_layers=1, num_heads=index_heads, head_dim=index_dim, topk=topk, fp8=index_fp8)
    return LatentSpec(
        num_layers=2, num_heads=heads, rank=rank, rope_dim=rope_dim, scale=0.1, page_size=page_size, dtype=dtype,
        device=device, max_seq_len=max_seq_len, fp8=fp8, index=index,
    )  # fmt: skip


def make_pools(spec: LatentSpec, num_pages: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Zeroed latents and index keys with a scratch page."""
    pages, size = num_pages + 1, spec.page_size
    latents = torch.zeros(spec.num_layers, pages, size, spec.rank + spec.rope_dim, dtype=spec.dtype)
    if spec.fp8:
        record = latent_bytes(spec.rank, spec.rope_dim, spec.dtype.itemsize, fp8=True)
        latents = torch.zeros(spec.num_layers, pages, size, record, dtype=torch.uint8)
    if spec.index is None:
        return latents.to(spec.device), None
    keys = torch.zeros(spec.index.num_layers, pages, size, spec.index.head_dim, dtype=spec.dtype)
    if spec.index.fp8:
        keys = torch.zeros(spec.index.num_layers, pages, size * (spec.index.head_dim + 4), dtype=torch.uint8)
    return latents.to(spec.device), keys.to(spec.device)


@dataclass(frozen=True)
class Drawn:
    """A step's tensors: of its new tokens, or of the context before them."""

    batch: ForwardBatch
    turn: Turn
    projected: torch.Tensor  # [T, R + P]
    index_projected: torch.Tensor  # [T, E]
    norm: torch.Tensor  # [R]
    index_norm: tuple[torch.Tensor, torch.Tensor]  # [E] weight and bias
    q_latent: torch.Tensor  # [T, H, R]
    q_rope: torch.Tensor  # [T, H, P]
    queries: torch.Tensor  # [T, I, E]
    weights: torch.Tensor  # float32 [T, I]


@dataclass(frozen=True)
class StepCase:
    """Rows with `seq_lens` of context, the last `query_lens` tokens of it new; each row has shuffled pages."""

    spec: LatentSpec
    history: Drawn  # every token of every context before the step
    step: Drawn
    num_pages: int

    def new_backend(self, kind: type[LatentBackend]) -> LatentBackend:
        """Over pools of its own that hold the history, by its own writes."""
        backend = kind(self.spec, *make_pools(self.spec, self.num_pages))
        write(backend, self.history)
        return backend


def step_case(
    spec: LatentSpec, seq_lens: Sequence[int], query_lens: Sequence[int], num_decode: int, seed: int = 0
) -> StepCase:
    """The first `num_decode` rows decode, with a query length of 1."""
    assert list(query_lens[:num_decode]) == [1] * num_decode
    rng, size = torch.Generator().manual_seed(seed), spec.page_size
    counts = [-(-n // size) for n in seq_lens]
    order = torch.randperm(sum(counts) + 2, generator=rng).to(torch.int32)
    table = torch.full((len(counts), max(counts) + 1), 0, dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = order[sum(counts[:row]) : sum(counts[: row + 1])]
    firsts = [n - q for n, q in zip(seq_lens, query_lens, strict=True)]
    norms = _norms(spec, rng)
    history = _draw(spec, table, [0] * len(firsts), firsts, 0, rng, norms)
    step = _draw(spec, table, firsts, list(seq_lens), num_decode, rng, norms)
    return StepCase(spec, history, step, len(order))


def write(backend: LatentBackend, drawn: Drawn) -> None:
    """All writes of a step: both layers' latents, and the index keys."""
    if not len(drawn.projected):
        return
    for layer in range(backend.spec.num_layers):
        sign = 1 - 2 * layer  # the layers differ
        index = IndexNorm(ordinal=0, weight=drawn.index_norm[0], bias=drawn.index_norm[1], interleaved=True)
        norms = LayerNorms(
            query=drawn.norm.new_ones(QUERY_LATENT),
            latent=drawn.norm,
            eps=1e-5,
            index=index if layer == 0 and backend.spec.index is not None else None,
        )
        backend.take_in(layer, first_product(drawn, sign), norms, drawn.turn, drawn.batch)


def first_product(drawn: Drawn, sign: int = 1) -> torch.Tensor:
    """A layer's first product: query latent (ones), latent and rope part, index key."""
    query = drawn.projected.new_ones(len(drawn.projected), QUERY_LATENT)
    return torch.cat((query, drawn.projected * sign, drawn.index_projected), 1)


def select(backend: LatentBackend, drawn: Drawn, batch: ForwardBatch | None = None) -> torch.Tensor | None:
    """The step's selection, or None where it needs none."""
    batch = batch or drawn.batch
    metadata = backend.begin(batch)
    if not backend.needs_selection(metadata):
        return None
    return backend.select(0, *turned(backend, drawn), batch, metadata)


def turned(backend: LatentBackend, drawn: Drawn) -> tuple[torch.Tensor, torch.Tensor]:
    """What `turn_queries` makes of the step's index queries and weights."""
    heads = torch.cat((drawn.q_latent, drawn.q_rope), -1)
    product = torch.cat((heads.flatten(1), drawn.queries.flatten(1)), 1)
    return backend.turn_queries(product, drawn.weights.clone(), heads.shape[2], True, drawn.turn)[:2]


def attend(
    backend: LatentBackend, drawn: Drawn, selected: torch.Tensor | None, batch: ForwardBatch | None = None
) -> torch.Tensor:
    """Of the second layer."""
    batch = batch or drawn.batch
    return backend.attend(1, drawn.q_latent, drawn.q_rope, selected, batch, backend.begin(batch))


def _norms(spec: LatentSpec, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size = spec.index.head_dim if spec.index is not None else 1
    drawn = (torch.rand(spec.rank, generator=rng), torch.rand(size, generator=rng), torch.rand(size, generator=rng))
    norm, weight, bias = (part.to(spec.device, spec.dtype) for part in drawn)
    return norm + 0.5, weight + 0.5, bias - 0.5


def _draw(
    spec: LatentSpec,
    table: torch.Tensor,
    firsts: list[int],
    ends: list[int],
    num_decode: int,
    rng: torch.Generator,
    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> Drawn:
    """Tokens firsts[r] … ends[r] - 1 of each row."""
    device, size = spec.device, spec.page_size
    positions = [torch.arange(first, end) for first, end in zip(firsts, ends, strict=True)]
    slots = [table[row, p // size].long() * size + p % size for row, p in enumerate(positions)]
    query_lens = [len(p) for p in positions[num_decode:]]
    tokens = sum(map(len, positions))
    batch = ForwardBatch(
        num_tokens=tokens,
        num_decode=num_decode,
        max_seq_len=max(ends),
        max_query_len=max(query_lens, default=0),
        input_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
        positions=torch.cat(positions).to(device),
        kv_slots=torch.cat(slots).to(device),
        seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
        page_table=table.to(device),
        cu_query_lens=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(device),
        query_lens_host=tuple(query_lens),
        seq_lens_host=tuple(ends),
    )

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(tokens, *shape, generator=rng).to(device, spec.dtype)

    index_heads, index_dim = (spec.index.num_heads, spec.index.head_dim) if spec.index else (1, 1)
    return Drawn(
        batch=batch,
        turn=Turn(table=rope_table(spec.rope_dim).to(device), positions=batch.positions),
        projected=normal(spec.rank + spec.rope_dim + 8)[:, : spec.rank + spec.rope_dim],  # columns of a wider product
        index_projected=normal(index_dim),
        norm=norms[0],
        index_norm=(norms[1], norms[2]),
        q_latent=normal(spec.num_heads, spec.rank).transpose(0, 1).contiguous().transpose(0, 1),  # as of a bmm
        q_rope=normal(spec.num_heads, 24 + spec.rope_dim)[..., 24:],  # the last part of each head
        queries=normal(index_heads, index_dim),
        weights=torch.randn(tokens, index_heads, generator=rng).to(device),
    )


def rope_table(rope_dim: int) -> torch.Tensor:
    """float32 [HIGHEST, P]: cosines, then sines."""
    inverse = 10000.0 ** (-torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim)
    angles = torch.arange(HIGHEST, dtype=torch.float64)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), 1).float()

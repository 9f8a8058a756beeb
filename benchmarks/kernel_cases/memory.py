"""What the score step allocates beside its inputs and its result, by the number of queries, at one long context."""

from collections.abc import Sequence

import torch

from benchmarks.kernel_cases.case import Sizes, index_pool, latent_pool, page_tables, randn
from benthic.attention.latent import IndexSpec, LatentBackend, LatentSpec
from benthic.forward import ForwardBatch

CONTEXT = 131_072
QUERIES = (2048, 8192, 32_768)


def score_memory(
    backend: type[LatentBackend], sizes: Sizes, context: int, counts: Sequence[int]
) -> list[tuple[int, int]]:
    """(queries, peak bytes of `select` beside inputs and result) for the last queries of a context of `context`."""
    table = page_tables(1, context, sizes)
    spec = _spec(sizes, context)
    latents = latent_pool(0, False, sizes)[None]  # the score step reads none
    attention = backend(spec, latents, index_pool(table.numel(), False, sizes)[None])
    found = []
    for count in counts:
        batch = _last(count, context, table)
        metadata = attention.begin(batch)
        queries = randn(count, sizes.index_heads, sizes.index_dim, sizes=sizes)
        weights = randn(count, sizes.index_heads, sizes=sizes, dtype=torch.float32)
        before = _restart_peak(sizes.device)
        selected = attention.select(0, queries, weights, batch, metadata)
        assert selected.shape == (count, sizes.topk)
        assert int(selected.min()) >= 0
        assert bool((selected.max(-1).values <= batch.positions).all()), "a query selected a position after its own"
        found.append((count, _peak(sizes.device) - before - selected.numel() * selected.element_size()))
    return found


def _spec(sizes: Sizes, context: int) -> LatentSpec:
    index = IndexSpec(
        num_layers=1, num_heads=sizes.index_heads, head_dim=sizes.index_dim, topk=sizes.topk, fp8=False
    )  # fmt: skip
    return LatentSpec(
        num_layers=1,
        num_heads=sizes.heads[0],
        rank=sizes.rank,
        rope_dim=sizes.rope,
        scale=(sizes.nope + sizes.rope) ** -0.5,
        page_size=sizes.page,
        dtype=sizes.dtype,
        device=sizes.device,
        max_seq_len=context,
        fp8=False,
        index=index,
    )


def _last(count: int, context: int, table: torch.Tensor) -> ForwardBatch:
    """A prefill of one row's last `count` tokens."""
    device = table.device
    positions = torch.arange(context - count, context, device=device)
    return ForwardBatch(
        num_tokens=count,
        num_decode=0,
        max_seq_len=context,
        max_query_len=count,
        input_ids=torch.zeros(count, dtype=torch.int64, device=device),
        positions=positions,
        kv_slots=positions,
        seq_lens=torch.tensor([context], dtype=torch.int32, device=device),
        page_table=table,
        cu_query_lens=torch.tensor([0, count], dtype=torch.int32, device=device),
        query_lens_host=(count,),
        seq_lens_host=(context,),
    )


def _restart_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0

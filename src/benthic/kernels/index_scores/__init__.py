"""Scores of the lightning indexer over paged keys: sum over heads of weight x relu(query . key)."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.index_scores.reference import index_scores_decode_reference, index_scores_prefill_reference


def index_scores_prefill(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    page_row: torch.Tensor,
    first_position: int,
    num_keys: int,
    out: torch.Tensor,
) -> None:
    """out[t, s] = sum over i of weights[t, i] * relu(queries[t, i] . key[s]), for s up to first_position + t.

    One row's n consecutive queries [n, I, E] against its first `num_keys` keys; weights float32 [n, I], of any sign.
    keys [pages + 1, page_size, E] in the queries' dtype, or uint8 [pages + 1, page_size * (E + 4)] (a page's keys in
    e4m3, then a float32 scale a token): the queries are then e4m3, their scale in `weights`. page_row int32 [M].
    out float32 [n, >= num_keys], unit last stride. What lies past a query's position, up to num_keys, is undefined.
    The Triton kernel sums in one order along E and over heads whatever the chunk, `first_position` or the tile: a
    token's scores don't depend on where a chunk begins (see its module for what holds against decode).
    """
    page_size = check_index_shapes(queries, weights, keys, out)
    if page_row.dim() != 1 or page_row.shape[0] * page_size < num_keys or out.shape[1] < num_keys:
        raise ValueError(
            f"page_row {tuple(page_row.shape)} of {page_size} tokens a page and out {tuple(out.shape)} are too short "
            f"for {num_keys} keys"
        )
    if use_triton(queries):
        from benthic.kernels.index_scores.kernel import index_scores_prefill_triton  # triton is optional

        index_scores_prefill_triton(queries, weights, keys, page_row, first_position, num_keys, out)
    else:
        index_scores_prefill_reference(queries, weights, keys, page_row, first_position, num_keys, out)


def index_scores_decode(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    out: torch.Tensor,
    *,
    skip_below: int = 0,
) -> None:
    """out[d, s] for s < seq_lens[d], as `index_scores_prefill` with one query a row; the rest of `out` is untouched.

    queries [D, I, E]; weights float32 [D, I]; keys as there; page_table int32 [D, M]; seq_lens int32 [D], at most
    max_seq_len, which only shapes the launch; out float32 [D, >= max_seq_len], unit last stride. Rows with
    seq_lens[d] <= skip_below (the K of a selection that takes everything) are not scored.
    """
    check_index_shapes(queries, weights, keys, out)
    rows = queries.shape[0]
    if page_table.dim() != 2 or page_table.shape[0] != rows or seq_lens.shape != (rows,) or out.shape[1] < max_seq_len:
        raise ValueError(
            f"page_table {tuple(page_table.shape)}, seq_lens {tuple(seq_lens.shape)} and out {tuple(out.shape)} do not "
            f"fit {rows} rows of up to {max_seq_len} keys"
        )
    if use_triton(queries):
        from benthic.kernels.index_scores.kernel import index_scores_decode_triton  # triton is optional

        index_scores_decode_triton(queries, weights, keys, page_table, seq_lens, max_seq_len, out, skip_below)
    else:
        index_scores_decode_reference(queries, weights, keys, page_table, seq_lens, max_seq_len, out, skip_below)


def queries_per_pass(num_keys: int, budget_bytes: int) -> int:
    """Queries whose scores over `num_keys` keys fit in `budget_bytes` at once, at least 1; float32, nothing else."""
    return max(1, budget_bytes // (4 * max(1, num_keys)))


def check_index_shapes(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, out: torch.Tensor) -> int:
    """The keys' page size; raises ValueError where heads, head_dim, dtypes or rows don't fit together."""
    if queries.dim() != 3 or weights.shape != queries.shape[:2] or out.dim() != 2 or out.shape[0] != queries.shape[0]:
        raise ValueError(
            f"queries {tuple(queries.shape)}, weights {tuple(weights.shape)} and out {tuple(out.shape)} do not fit: "
            f"[n, I, E], [n, I], [n, keys]"
        )
    if weights.dtype != torch.float32 or out.dtype != torch.float32:
        raise ValueError(f"weights ({weights.dtype}) and out ({out.dtype}) must be float32")
    head_dim = queries.shape[2]
    if keys.dtype == torch.uint8:
        fits = keys.dim() == 2 and keys.shape[1] % (head_dim + 4) == 0 and queries.dtype == torch.float8_e4m3fn
        page_size = keys.shape[-1] // (head_dim + 4)
    else:
        fits = keys.dim() == 3 and keys.shape[2] == head_dim and queries.dtype == keys.dtype
        page_size = keys.shape[1]
    if not fits:
        raise ValueError(
            f"queries {tuple(queries.shape)} ({queries.dtype}) do not fit keys {tuple(keys.shape)} ({keys.dtype}): "
            f"[pages, page, E] of one dtype, or e4m3 and uint8 [pages, page * (E + 4)]"
        )
    if page_size & (page_size - 1):
        raise ValueError(f"page size {page_size} is not a power of two")
    return page_size


__all__ = [
    "check_index_shapes",
    "index_scores_decode",
    "index_scores_decode_reference",
    "index_scores_prefill",
    "index_scores_prefill_reference",
    "queries_per_pass",
]

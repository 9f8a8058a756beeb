"""`index_scores_prefill` and `index_scores_decode` in plain torch.

In float64 and rounded once: the order of a product's sums, which the library picks by its shape, then can't show in a
score, so that a token selects the same positions whatever chunk or batch it comes in.
"""

import torch

_QUERIES = 256  # at once; bounds the float64 scratch at 256 x keys


def index_scores_prefill_reference(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    page_row: torch.Tensor,
    first_position: int,
    num_keys: int,
    out: torch.Tensor,
) -> None:
    """See `benthic.kernels.index_scores.index_scores_prefill`; scores every key for every query."""
    context = gather_keys(keys, page_row, num_keys, queries.shape[2])
    for start in range(0, queries.shape[0], _QUERIES):
        part = slice(start, min(start + _QUERIES, queries.shape[0]))
        out[part, :num_keys] = _scores(queries[part], weights[part], context)


def index_scores_decode_reference(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    out: torch.Tensor,
    skip_below: int = 0,
) -> None:
    """See `benthic.kernels.index_scores.index_scores_decode`. Reads the lengths on the host."""
    for row, length in enumerate(seq_lens.tolist()):
        if length > skip_below:
            context = gather_keys(keys, page_table[row], length, queries.shape[2])
            out[row, :length] = _scores(queries[row : row + 1], weights[row : row + 1], context)[0]


def gather_keys(keys: torch.Tensor, page_row: torch.Tensor, num_keys: int, head_dim: int) -> torch.Tensor:
    """The first `num_keys` keys of a row in float64, [num_keys, head_dim], whatever the pool holds."""
    if keys.dtype != torch.uint8:
        page_size = keys.shape[1]
        pages = keys[page_row[: -(-num_keys // page_size)].long()]
        return pages.reshape(-1, head_dim)[:num_keys].double()
    page_size = keys.shape[1] // (head_dim + 4)
    pages = keys[page_row[: -(-num_keys // page_size)].long()]
    codes = pages[:, : page_size * head_dim].contiguous().view(torch.float8_e4m3fn)
    scales = pages[:, page_size * head_dim :].contiguous().view(torch.float32)
    return (codes.float().reshape(-1, head_dim).double() * scales.reshape(-1, 1))[:num_keys]


def _scores(queries: torch.Tensor, weights: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(queries.shape[0], context.shape[0], dtype=torch.float64, device=context.device)
    for head in range(queries.shape[1]):  # one head at a time: never queries x heads x keys
        products = queries[:, head].to(torch.float32).double() @ context.T
        total += weights[:, head, None].double() * products.relu_()
    return total.float()

"""Layer-norm, turn and write new tokens' index keys into one layer of the pool."""

import torch

from benthic.kernels.choice import use_triton
from benthic.kernels.index_write.reference import INDEX_EPS, check_index_write, index_write_reference


def index_write(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    *,
    page_size: int,
    interleaved: bool,
) -> None:
    """keys[slot] = layer_norm(projected) with eps 1e-6 in float32, the FIRST P components turned, rounded once.

    projected [T, E], any row stride; weight, bias [E]; table float32 [max_position, P]; positions, slots int64 [T].
    keys [pages + 1, page_size, E] in the model's dtype, or uint8 [pages + 1, page_size * (E + 4)]: a page's keys in
    e4m3, then a float32 scale a token (attention/latent.py); changed in place.
    """
    check_index_write(projected, weight, bias, table, positions, slots, keys, page_size)
    if use_triton(keys):
        from benthic.kernels.index_write.kernel import index_write_triton  # triton is optional

        write = index_write_triton
    else:
        write = index_write_reference
    write(projected, weight, bias, table, positions, slots, keys, page_size=page_size, interleaved=interleaved)


__all__ = ["INDEX_EPS", "check_index_write", "index_write", "index_write_reference"]

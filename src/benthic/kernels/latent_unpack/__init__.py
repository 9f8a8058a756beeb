"""One sequence's fp8 latents as numbers, in the order of its positions, for prefill's products.

A prefill reads each entry for many queries: turned into numbers once it takes the kernels for 16-bit latents.
"""

import torch

from benthic.common.layout import ceil_div
from benthic.kernels.choice import use_triton
from benthic.kernels.latent_records import SCALE_BLOCK
from benthic.kernels.latent_unpack.reference import latent_unpack_reference


def latent_unpack(
    latents: torch.Tensor, page_row: torch.Tensor, num_keys: int, dtype: torch.dtype, *, rank: int
) -> torch.Tensor:
    """The entries at positions 0 … num_keys - 1 as a pool of `dtype` of their own, whose pages are in order.

    latents: one layer's fp8 pool, see `latent_records`; page_row int32 [M], the sequence's pages. Each value is rounded
    once, as attention over the fp8 pool itself rounds it. Returns [ceil(num_keys / page_size), page_size, R + P]; what
    lies behind num_keys is not written. Raises ValueError where shapes don't fit.
    """
    rope_bytes = latents.shape[-1] - rank - 4 * -(-rank // SCALE_BLOCK)
    if latents.dtype != torch.uint8 or latents.dim() != 3 or rope_bytes < 2 or rope_bytes % 2 or rank % 4:
        raise ValueError(f"latents {tuple(latents.shape)} of {latents.dtype} are not fp8 records of rank {rank}")
    page_size = latents.shape[1]
    if page_row.dim() != 1 or not 0 < num_keys <= len(page_row) * page_size:
        raise ValueError(
            f"{num_keys} keys are not 1 to {page_row.numel()} pages of {page_size}, which {tuple(page_row.shape)} gives"
        )
    pages = ceil_div(num_keys, page_size)
    out = torch.empty((pages, page_size, rank + rope_bytes // 2), dtype=dtype, device=latents.device)
    if use_triton(latents):
        from benthic.kernels.latent_unpack.kernel import latent_unpack_triton  # triton is optional

        return latent_unpack_triton(latents, page_row, num_keys, out, rank=rank)
    return latent_unpack_reference(latents, page_row, num_keys, out, rank=rank)


__all__ = ["latent_unpack", "latent_unpack_reference"]

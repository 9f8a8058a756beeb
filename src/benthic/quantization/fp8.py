"""Block-wise fp8: e4m3 codes [N, K] and a float32 scale for each 128 x 128 of them, the last blocks cut off.

    W[n, k] = float(code[n, k]) * scale_inv[n // 128, k // 128]

The files call the scale `weight_scale_inv`, but it multiplies. The format is that of DeepSeek-V3's release.
"""

import torch

from benthic.common.layout import ceil_div
from benthic.weights.quantization_config import BLOCK

_LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a weight of `shape`."""
    return tuple(ceil_div(size, BLOCK) for size in shape)


def dequantise_fp8(weight: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """float32 [N, K] from e4m3 [N, K] and float32 [ceil(N / 128), ceil(K / 128)]."""
    rows, columns = weight.shape
    assert tuple(scale_inv.shape) == scale_shape((rows, columns)), (scale_inv.shape, weight.shape)
    values = weight.float()
    scales = scale_inv.repeat_interleave(BLOCK, dim=1)[:, :columns]  # [ceil(N / 128), K]: a 128th of the weight
    whole = rows // BLOCK
    values[: whole * BLOCK].view(whole, BLOCK, columns).mul_(scales[:whole].unsqueeze(1))
    values[whole * BLOCK :].mul_(scales[whole:])
    return values


def quantise_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 [N, K] and float32 scales of a float [N, K]: the largest value of a block becomes 448, zeros get scale 1."""
    rows, columns = weight.shape
    blocks_n, blocks_k = scale_shape((rows, columns))
    padded = weight.new_zeros((blocks_n * BLOCK, blocks_k * BLOCK), dtype=torch.float32)
    padded[:rows, :columns] = weight
    blocks = padded.view(blocks_n, BLOCK, blocks_k, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    scale = largest / _LARGEST
    scale = torch.where(scale > 0, scale, 1.0)  # zeros, and what is so small that its scale would be zero
    # clamped: a largest value so small that its scale is rounded coarsely would give more than 448, which is NaN
    codes = (blocks / scale[:, None, :, None]).clamp_(-_LARGEST, _LARGEST).view_as(padded)
    return codes[:rows, :columns].to(torch.float8_e4m3fn).contiguous(), scale

"""Tile sizes of latent attention, which kernel runs it, and how many parts its decode cuts the keys into.

Other devices than `tiles.TUNED_ON` take the same tiles, with fewer stages, then keys, where shared memory is smaller.
"""

import functools
import importlib
from dataclasses import dataclass, replace

import torch

from benthic.kernels.tiles import next_power_of_two, num_sms, shared_bytes

_SPLIT_KEYS = 64  # a part is worth its 64 KiB of partial result only from so many keys on


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """One program's share: `rows` query rows (a query's heads) against `keys` keys at a time.

    `turned`: the result is kept with latents as rows and heads as columns, so that 32 heads fill a tensor-core tile.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    turned: bool = False


def hopper_rows(
    num_heads: int, rank: int, rope_dim: int, latents: torch.Tensor, *, codes_of: torch.dtype | None = None
) -> int | None:
    """Heads a program of `latent_hopper` takes for selected positions of the pool `latents`; None: it does not fit.

    `codes_of`: what an fp8 pool's codes become, where the kernel takes such pools at all.
    """
    rows = _head_rows(num_heads)
    wide = codes_of if codes_of is not None and latents.dtype == torch.uint8 else latents.dtype
    fits = rows >= 32 and (rank, rope_dim) == (512, 64) and wide in (torch.bfloat16, torch.float16)
    return rows if fits and has_hopper_kernels(latents.device) else None


def sparse_tiles(num_heads: int, rank: int, element_bytes: int, device: torch.device) -> LatentTiles:
    """Tiles where all rows of a program belong to one query: selected positions, and any decode."""
    rows = _head_rows(num_heads)
    if element_bytes == 4:
        tiles = LatentTiles(16, 16, 4, 1)
    elif rows == 64:
        tiles = LatentTiles(64, 32, 8, 4)
    else:
        tiles = LatentTiles(rows, 64, 4, 2, turned=rows == 32)
    return _fit(tiles, rank, element_bytes, shared_bytes(device))


def dense_tiles(rank: int, element_bytes: int, device: torch.device) -> LatentTiles:
    """Tiles of dense prefill: rows are (token, head) pairs of consecutive tokens."""
    tiles = LatentTiles(16, 16, 4, 1) if element_bytes == 4 else LatentTiles(64, 64, 8, 2)
    return _fit(tiles, rank, element_bytes, shared_bytes(device))


def num_latent_splits(batch: int, row_blocks: int, max_keys: int, device: torch.device) -> int:
    """Parts of each row's keys in decode: static numbers only, so a graph's grid never changes. A power of two."""
    wanted = max(1, num_sms(device) // max(1, batch * row_blocks))  # one wave: a program fills a multiprocessor
    useful = max(1, max_keys // _SPLIT_KEYS)
    return min(1 << (wanted.bit_length() - 1), next_power_of_two(useful), 64)


@functools.cache
def has_hopper_kernels(device: torch.device) -> bool:
    """Whether `latent_hopper` runs there: a Hopper GPU and a Triton whose Gluon has what it uses."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return has_gluon()


def has_gluon() -> bool:
    """Whether this Triton's Gluon has what `latent_hopper` uses: measured with 3.6, compiled with 3.7."""
    try:
        language = importlib.import_module("triton.experimental.gluon.language")
        importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
    except ImportError:
        return False
    return hasattr(language, "thread_barrier") or hasattr(language, "barrier")


def _head_rows(num_heads: int) -> int:
    return max(16, min(64, next_power_of_two(num_heads)))


def _fit(tiles: LatentTiles, rank: int, element_bytes: int, shared: int) -> LatentTiles:
    entry = element_bytes * (rank + rank // 8)  # the rope part is an eighth
    while entry * (tiles.stages * tiles.keys + tiles.rows) > shared:
        if tiles.stages > 1:
            tiles = replace(tiles, stages=tiles.stages - 1)
        elif tiles.keys > 16:
            tiles = replace(tiles, keys=tiles.keys // 2)
        else:
            break
    return tiles

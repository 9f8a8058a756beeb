"""Tile sizes of the attention kernels, and the device that they are for.

Other devices take the same tiles; `_fit` lowers stages, then keys, until a program's operands fit in shared memory.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

TUNED_ON = "NVIDIA H200"  # sm_90, 132 multiprocessors, 227 KiB of shared memory a block
_CPU_SHARED_BYTES = 227 << 10  # the interpreter takes the H200's tiles
_CPU_SMS = 4  # small, so that the interpreter runs few programs


@dataclass(frozen=True, slots=True)
class Tiles:
    """One program's share: `rows` query rows (tokens × heads of a group) against `keys` keys at a time."""

    rows: int
    keys: int
    warps: int
    stages: int


# (bytes of an element, largest head_dim) -> tiles; the first row that covers the head_dim counts
_PREFILL: dict[int, tuple[tuple[int, Tiles], ...]] = {
    2: ((64, Tiles(128, 64, 4, 3)), (128, Tiles(128, 64, 8, 3)), (256, Tiles(128, 64, 8, 2))),
    4: ((64, Tiles(64, 32, 4, 2)), (128, Tiles(64, 32, 4, 2)), (256, Tiles(32, 32, 4, 2))),
}
_DECODE: dict[int, tuple[tuple[int, Tiles], ...]] = {  # rows follow from the group
    2: ((64, Tiles(16, 64, 4, 4)), (128, Tiles(16, 64, 4, 3)), (256, Tiles(16, 64, 4, 2))),
    4: ((64, Tiles(16, 64, 4, 2)), (128, Tiles(16, 32, 4, 2)), (256, Tiles(16, 32, 4, 2))),
}


def prefill_tiles(head_dim: int, element_bytes: int, device: torch.device) -> Tiles:
    """Tiles of `paged_prefill`."""
    return _fit(_first(_PREFILL[element_bytes], head_dim), head_dim, element_bytes, shared_bytes(device))


def decode_tiles(head_dim: int, element_bytes: int, group: int, device: torch.device) -> Tiles:
    """Tiles of `paged_decode`: a program's rows are the `group` query heads of one KV head, at least the dot's 16."""
    tiles = replace(_first(_DECODE[element_bytes], head_dim), rows=max(16, next_power_of_two(group)))
    return _fit(tiles, head_dim, element_bytes, shared_bytes(device))


def num_splits(batch: int, num_kv_heads: int, max_seq_len: int, device: torch.device) -> int:
    """Parts that `paged_decode` cuts a context into; depends on static numbers only, so a graph's grid never changes.

    About four programs a multiprocessor in all, never a part under 128 keys of the longest context. A power of two.
    """
    wanted = max(1, 4 * num_sms(device) // max(1, batch * num_kv_heads))
    useful = max(1, -(-max_seq_len // 128))
    return min(1 << (wanted.bit_length() - 1), next_power_of_two(useful), 128)


def next_power_of_two(n: int) -> int:
    """The least power of two that is at least `n` (n >= 1)."""
    return 1 << (n - 1).bit_length()


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of the device."""
    if device.type != "cuda":
        return _CPU_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one block may take, bytes."""
    if device.type != "cuda":
        return _CPU_SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack this field
    return int(properties.shared_memory_per_block_optin)


def _first(table: tuple[tuple[int, Tiles], ...], head_dim: int) -> Tiles:
    return next(tiles for largest, tiles in table if head_dim <= largest)


def _fit(tiles: Tiles, head_dim: int, element_bytes: int, shared: int) -> Tiles:
    def need(t: Tiles) -> int:  # K and V in every stage, the query rows and the probabilities once
        return element_bytes * (2 * t.stages * t.keys * head_dim + t.rows * head_dim + t.rows * t.keys)

    while need(tiles) > shared:
        if tiles.stages > 1:
            tiles = replace(tiles, stages=tiles.stages - 1)
        elif tiles.keys > 16:
            tiles = replace(tiles, keys=tiles.keys // 2)
        else:
            break
    return tiles

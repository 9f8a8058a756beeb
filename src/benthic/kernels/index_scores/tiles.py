"""Tile sizes of the index scores' kernels, and the device that they are for."""

from dataclasses import dataclass, replace

import torch

from benthic.kernels.tiles import next_power_of_two, num_sms, shared_bytes

TUNED_ON = "NVIDIA H200"  # sm_90, 132 multiprocessors, 227 KiB of shared memory a block


@dataclass(frozen=True, slots=True)
class ScoreTiles:
    """A program's product: `keys` rows against `columns` columns (queries x heads, heads padded) at a time."""

    keys: int
    columns: int
    warps: int
    stages: int
    ahead: bool = False  # a tile's page is looked up one tile before its keys are loaded: pays for short products


# by bytes of an element. Keys are the rows of the product, so that the sum over heads stays within four threads:
# queries as rows reach less than half as much. 256 columns of a 64-key tile are 128 registers a thread.
_PREFILL = {1: ScoreTiles(64, 128, 4, 3, ahead=True), 2: ScoreTiles(64, 128, 4, 3), 4: ScoreTiles(32, 64, 4, 2)}
# the columns are one query's heads, padded
_DECODE = {1: ScoreTiles(64, 32, 4, 2, ahead=True), 2: ScoreTiles(64, 32, 4, 3), 4: ScoreTiles(32, 16, 4, 2)}
_PART_KEYS = 4096  # of a prefill program at most: its queries' load is then a few percent of its keys'
_WAVES = 8  # programs a multiprocessor that prefill aims at, so that the last ones to end leave little idle


def prefill_tiles(heads: int, head_dim: int, element_bytes: int, device: torch.device) -> ScoreTiles:
    """Tiles of `index_scores_prefill`; `heads` and `head_dim` are the padded ones."""
    return _fit(_PREFILL[element_bytes], heads, head_dim, element_bytes, device)


def decode_tiles(heads: int, head_dim: int, element_bytes: int, device: torch.device) -> ScoreTiles:
    """Tiles of `index_scores_decode`: the columns are one query's heads."""
    tiles = _fit(_DECODE[element_bytes], heads, head_dim, element_bytes, device)
    return replace(tiles, columns=max(heads, _DECODE[element_bytes].columns))


def padded(size: int, least: int) -> int:
    """`size` as a product's dimension: a power of two, at least `least`."""
    return max(least, next_power_of_two(size))


def prefill_part(num_queries: int, num_keys: int, tiles: ScoreTiles, heads: int, device: torch.device) -> int:
    """Key tiles of one prefill program: enough programs for the device, none much shorter than its start is long."""
    query_tiles = -(-num_queries * heads // tiles.columns)
    key_tiles = -(-num_keys // tiles.keys)
    wanted = -(-key_tiles * query_tiles // (_WAVES * num_sms(device)))
    return max(min(4, key_tiles), min(wanted, _PART_KEYS // tiles.keys))


def decode_parts(rows: int, max_seq_len: int, tiles: ScoreTiles, device: torch.device) -> int:
    """Programs of a decode row, from static numbers only. They take its tiles in turn, so a short row uses many too."""
    return max(1, min(-(-max_seq_len // tiles.keys), 8 * num_sms(device) // max(1, rows)))


def _fit(tiles: ScoreTiles, heads: int, head_dim: int, element_bytes: int, device: torch.device) -> ScoreTiles:
    """At least one query's heads as columns; fewer columns, then stages, until the operands fit in shared memory."""
    tiles = replace(tiles, columns=max(heads, tiles.columns))

    def need(t: ScoreTiles) -> int:
        return element_bytes * head_dim * (t.columns + t.stages * t.keys)

    while need(tiles) > shared_bytes(device):
        if tiles.columns > heads:
            tiles = replace(tiles, columns=tiles.columns // 2)
        elif tiles.stages > 1:
            tiles = replace(tiles, stages=tiles.stages - 1)
        else:
            break
    return tiles

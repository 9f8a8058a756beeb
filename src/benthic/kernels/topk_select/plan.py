"""How `topk_select` cuts its work: sizes of a program, and the device that they are for."""

from dataclasses import dataclass

import torch

from benthic.kernels.tiles import next_power_of_two, num_sms

TUNED_ON = "NVIDIA H200"  # sm_90, 132 multiprocessors, 60 MiB of L2


@dataclass(frozen=True, slots=True)
class SelectSizes:
    """One program, which takes rows in turn."""

    lanes: int  # each counts and places its own scores: four a thread make a thread's vector
    depth: int  # scores of a lane read at a time
    sample: int  # scores that guess where the k-th largest lies
    candidates: int  # scores between two guesses, kept in registers to find the k-th largest among them
    warps: int
    per_sm: int  # programs a multiprocessor
    registers: int | None = None  # of a thread at most, so that several programs fit
    deviations: float = 2.5  # of a sample's count that a guess keeps off: more is less often wrong, but less narrow


# many rows keep every multiprocessor busy and want several programs there; a few want the least time for one
_MANY = SelectSizes(1024, 2, 1024, 1024, 8, 4, 64)
_MANY_LONG = SelectSizes(1024, 8, 4096, 1024, 8, 2)
_MANY_LONGEST = SelectSizes(1024, 4, 4096, 2048, 8, 4, 64)
_FEW = SelectSizes(512, 8, 1024, 1024, 4, 1)
_FEW_LONG = SelectSizes(1024, 8, 4096, 2048, 8, 1)
_LONG = 8192  # beyond, 1,024 samples leave more than 1,024 candidates for k = 2,048
_PART = 16384  # scores of a part: see `parts_of`
_WHOLE = 65536  # up to here one program is as fast as the parts and their second stage


def sizes_of(rows: int, width: int, device: torch.device) -> SelectSizes:
    """Sizes for that many rows of at most that many scores; static numbers only, so a graph's grid never changes."""
    if rows > num_sms(device):
        return _MANY_LONGEST if width > _WHOLE else _MANY_LONG if width > _LONG else _MANY
    return _FEW_LONG if width > _LONG else _FEW


def parts_of(rows: int, width: int, k: int, device: torch.device) -> tuple[int, int]:
    """Parts that a row is cut into, and the scores of each. One program reads a row at a few percent of the memory's
    rate: where few rows are long, the k best of each part are chosen first, side by side, then the k best of these.
    """
    size = max(_PART, 2 * next_power_of_two(k))
    parts = -(-width // size)
    if width <= _WHOLE or rows * 2 > num_sms(device) or parts * k * 2 > width:
        return 1, width
    return parts, size

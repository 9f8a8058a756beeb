"""The one bridge from what a rank saw to what all ranks know: a MIN all-reduce over the operations in flight."""

from collections.abc import Callable, Mapping, Sequence

from benthic.kvcache.commands import SETTLES_IN_ORDER, Agreed, OpId, Stream
from benthic.kvcache.errors import InvariantError

MinReduce = Callable[[Sequence[int]], Sequence[int]]  # element by element over all ranks; the identity for one


def agree(windows: Sequence[Sequence[OpId]], seen: Mapping[OpId, int], min_reduce: MinReduce) -> tuple[Agreed, ...]:
    """What is over on every rank, in stream order.

    `windows` has the operations in flight of each stream (replicated); `seen` what this rank's workers have reported.
    Nothing reported is 0, so the least over the ranks is above 0 only where every rank has finished, is `FAILED`
    where any has failed, and is the least position any rank can vouch for where positions are reported.
    """
    in_flight = [op for window in windows for op in window]
    if not in_flight:  # replicated: `windows` is, so all ranks skip the collective together
        return ()
    reduced = min_reduce([seen.get(op, 0) for op in in_flight])
    agreed: list[Agreed] = []
    at = 0
    for stream, window in enumerate(windows):
        for op, value in zip(window, reduced[at : at + len(window)], strict=True):
            if value > 0:
                agreed.append(Agreed(op, value))
            elif Stream(stream) in SETTLES_IN_ORDER:
                break
        at += len(window)
    return tuple(agreed)


def assert_same_state(tick: int, digest: bytes, min_reduce: MinReduce) -> None:
    """Raises InvariantError with both digests when the ranks' states differ. Two collectives; for debugging."""
    words = [int.from_bytes(digest[i : i + 4], "big") for i in range(0, len(digest), 4)]
    least = list(min_reduce(words))
    most = [-word for word in min_reduce([-word for word in words])]
    if least != most:
        raise InvariantError(
            f"the ranks have parted in tick {tick}: this rank's state is {digest.hex()}; over all ranks its words go "
            f"from {least} to {most}"
        )

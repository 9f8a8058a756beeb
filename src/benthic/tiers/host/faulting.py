"""Bringing shared memory in before it is used, by several threads, without ever raising SIGBUS."""

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from benthic.common.units import MIB

MADV_POPULATE_WRITE = 23  # Linux 5.14: fault pages in; where a touch would raise SIGBUS it returns EFAULT
CHUNK_BYTES = 64 * MIB
MAX_THREADS = 8  # beyond these the kernel's locks limit

_libc = ctypes.CDLL(None, use_errno=True)  # calls let go of the interpreter lock
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Place:
    """Mapped memory that nobody uses yet, and the file that it comes from; both at multiples of 4 KiB."""

    address: int
    num_bytes: int
    file: int
    offset: int


def fault_in(
    places: Sequence[Place],
    progress: Callable[[int, int], None],
    populate: Callable[[Place], None] | None = None,
) -> None:
    """Fault the places in. `progress` gets (bytes done, bytes in all); `populate` does one piece (for tests).

    Raises OSError (EFAULT, ENOMEM or ENOSPC) where the memory can't be had.
    """
    pieces = [
        Place(p.address + start, min(CHUNK_BYTES, p.num_bytes - start), p.file, p.offset + start)
        for p in places
        for start in range(0, p.num_bytes, CHUNK_BYTES)
    ]
    total, done = sum(piece.num_bytes for piece in pieces), 0
    progress(0, total)
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, thread_name_prefix="l2-fault-in") as pool:
        futures = {pool.submit(populate or populate_write, piece): piece for piece in pieces}
        try:
            for future in as_completed(futures):
                future.result()
                done += futures[future].num_bytes
                progress(done, total)
        finally:
            pool.shutdown(cancel_futures=True)


def populate_write(place: Place) -> None:
    """By madvise; before Linux 5.14 by `allocate_and_touch`."""
    while _libc.madvise(place.address, place.num_bytes, MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        if code == errno.EINVAL:
            allocate_and_touch(place)
            return
        if code not in (errno.EINTR, errno.EAGAIN):
            raise OSError(code, os.strerror(code))


def allocate_and_touch(place: Place) -> None:
    """Make sure that the file has the blocks, which fails with ENOSPC, not SIGBUS; then touch the memory."""
    os.posix_fallocate(place.file, place.offset, place.num_bytes)
    ctypes.memset(place.address, 0, place.num_bytes)

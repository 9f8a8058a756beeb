"""Staging buffers: bounded, aligned, header beside frame."""

import os

import numpy as np
import pytest

from benthic.tiers.disk.format import PAGE
from benthic.tiers.disk.staging import Staging

FRAME = 3 * PAGE


def test_all_buffers_can_be_taken_and_no_more() -> None:
    staging = Staging(3, FRAME)
    taken = [staging.take() for _ in range(3)]
    assert all(buffer is not None for buffer in taken)
    assert staging.take() is None
    assert staging.num_free == 0
    for buffer in taken:
        assert buffer is not None
        staging.give(buffer)
    assert staging.num_free == 3


def test_a_buffer_handed_back_twice_is_loud() -> None:
    staging = Staging(1, FRAME)
    buffer = staging.take()
    assert buffer is not None
    staging.give(buffer)
    with pytest.raises(AssertionError, match="twice"):
        staging.give(buffer)


def test_header_and_frame_are_aligned_and_apart() -> None:
    staging = Staging(4, FRAME)
    buffers = [staging.take() for _ in range(4)]
    for mark, buffer in enumerate(buffers):
        assert buffer is not None
        assert (len(buffer.header), len(buffer.frame)) == (PAGE, FRAME)
        assert np.frombuffer(buffer.header, np.uint8).ctypes.data % PAGE == 0
        assert np.frombuffer(buffer.frame, np.uint8).ctypes.data % PAGE == 0
        buffer.header[:] = bytes([mark]) * PAGE
        buffer.fill(memoryview(bytes([mark + 100]) * FRAME))
    for mark, buffer in enumerate(buffers):
        assert buffer is not None
        assert bytes(buffer.header) == bytes([mark]) * PAGE
        assert bytes(buffer.frame) == bytes([mark + 100]) * FRAME


def test_filling_copies() -> None:
    staging = Staging(1, FRAME)
    buffer = staging.take()
    assert buffer is not None
    frame = bytearray(os.urandom(FRAME))
    before = bytes(frame)
    buffer.fill(memoryview(frame))
    frame[:] = bytes(FRAME)
    assert bytes(buffer.frame) == before

"""A slot's bytes: what is written is found again, and nothing else passes for it."""

import ctypes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.tiers.disk.format import HEADER_BYTES, PAGE, FrameGeometry, Verdict, check, pack_header, stored_hash
from benthic.tiers.disk.slab import aligned_buffer
from tests.support.disk_floor import GEOMETRY, page_bytes, page_hash

TWO_KINDS = FrameGeometry(frame_bytes=8192, payload_mask=0b101, payloads=(("target_kv", 5000), ("draft_kv", 1000)))


def packed(number: int = 1, geometry: FrameGeometry = GEOMETRY) -> tuple[bytearray, bytearray]:
    block, frame = bytearray(PAGE), bytearray(page_bytes(number, geometry))
    pack_header(memoryview(block), page_hash(number), frame, geometry)
    return block, frame


@pytest.mark.parametrize("geometry", [GEOMETRY, TWO_KINDS])
def test_round_trip(geometry: FrameGeometry) -> None:
    block, frame = packed(7, geometry)
    assert check(block, page_hash(7), frame, geometry) is Verdict.OK
    assert check(block, None, None, geometry) is Verdict.OK
    assert stored_hash(block) == page_hash(7)
    assert HEADER_BYTES == 64
    assert not any(block[HEADER_BYTES:])


def test_the_bytes_are_those_of_the_description() -> None:
    block, _ = packed(7, TWO_KINDS)
    assert block[0:4] == b"BSLT"
    assert int.from_bytes(block[4:6], "little") == 1
    assert int.from_bytes(block[8:12], "little") == 0b101
    assert int.from_bytes(block[12:16], "little") == 6000
    assert block[16:48] == page_hash(7)


@settings(deadline=None)
@given(bit=st.integers(0, 8 * (HEADER_BYTES + GEOMETRY.payload_bytes) - 1))
def test_every_flipped_bit_is_seen(bit: int) -> None:
    block, frame = packed()
    whole = block[:HEADER_BYTES] + frame[: GEOMETRY.payload_bytes]
    whole[bit // 8] ^= 1 << bit % 8
    verdict = check(whole[:HEADER_BYTES], page_hash(1), whole[HEADER_BYTES:], GEOMETRY)
    in_header = bit < 8 * HEADER_BYTES
    assert verdict in ((Verdict.FOREIGN, Verdict.TORN_HEADER) if in_header else (Verdict.BAD_PAYLOAD,))


def test_padding_is_not_part_of_the_page() -> None:
    block, frame = packed()
    frame[-1] ^= 0xFF
    assert check(block, page_hash(1), frame, GEOMETRY) is Verdict.OK


def test_verdicts() -> None:
    block, frame = packed()
    assert check(bytes(PAGE), page_hash(1), frame, GEOMETRY) is Verdict.EMPTY
    assert check(b"GIF89a".ljust(PAGE, b"x"), page_hash(1), frame, GEOMETRY) is Verdict.FOREIGN
    assert check(block, page_hash(2), frame, GEOMETRY) is Verdict.WRONG_HASH
    assert check(block, page_hash(1), page_bytes(2), GEOMETRY) is Verdict.BAD_PAYLOAD
    assert check(block, page_hash(1), frame, TWO_KINDS) is Verdict.WRONG_LENGTH
    other_kind = FrameGeometry(frame_bytes=4096, payload_mask=2, payloads=GEOMETRY.payloads)
    assert check(block, page_hash(1), frame, other_kind) is Verdict.WRONG_LENGTH


def test_a_header_of_another_version_is_foreign() -> None:
    block, frame = packed()
    block[4] = 2
    assert check(block, page_hash(1), frame, GEOMETRY) is Verdict.FOREIGN


@pytest.mark.parametrize(
    ("frame_bytes", "mask", "payload"), [(4000, 1, 100), (0, 1, 0), (4096, 1, 5000), (4096, 0, 100), (4096, 1, 0)]
)
def test_impossible_geometries_are_refused(frame_bytes: int, mask: int, payload: int) -> None:
    with pytest.raises(ValueError, match=r"bytes|mask"):
        FrameGeometry(frame_bytes=frame_bytes, payload_mask=mask, payloads=(("target_kv", payload),))


def test_a_buffer_is_aligned_and_zero() -> None:
    buffer = aligned_buffer(3 * PAGE)
    assert ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % PAGE == 0
    assert len(buffer) == 3 * PAGE
    assert not any(buffer)

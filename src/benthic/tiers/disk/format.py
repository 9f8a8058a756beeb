"""The bytes of a disk slot: one header block and one frame, both 4 KiB aligned and a multiple of 4 KiB long.

A slab file is nothing but slots: slot i begins at byte i * (4096 + frame_bytes). Little endian; offsets from the
slot's beginning:

    byte    0   4   magic, b"BSLT"
            4   2   format version, 1
            6   2   reserved, 0
            8   4   payload mask: bit i says that the frame holds payload i of the manifest's list
           12   4   payload length L in bytes: the payloads side by side, without the padding behind them
           16  32   content hash of the page
           48   8   xxh3-64 of the payload, the bytes 4096 … 4096 + L - 1
           56   8   xxh3-64 of the header's bytes 0 … 55
           64       up to 4095: written as zeros, not read
         4096   L   the payloads, in the manifest's order, each page-first as it lies in host memory
     4096 + L       padding up to a multiple of 4 KiB: whatever the frame held, not covered by the checksum

A block of zeros is a slot that was never written. The header goes to disk in one transfer with the frame and is
checked on every read: what doesn't match in every field is a miss.
"""

import struct
from dataclasses import dataclass
from enum import Enum

from xxhash import xxh3_64_intdigest

from benthic.tiers.disk.io import Buffer

PAGE = 4096  # bytes: the header block, and the unit of alignment
FORMAT_VERSION = 1
MAGIC = b"BSLT"
HASH_BYTES = 32
_FIELDS = struct.Struct("<4sHHII32sQ")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECK.size
_NO_HEADER = bytes(HEADER_BYTES)
_MAX_PAYLOAD = 2**32 - 1


@dataclass(frozen=True)
class FrameGeometry:
    """What a frame is made of. Raises ValueError for lengths that can't be."""

    frame_bytes: int  # a multiple of 4096
    payload_mask: int  # bit i: payload i is in the frame
    payloads: tuple[tuple[str, int], ...]  # name and bytes, in order; padding follows at the end

    def __post_init__(self) -> None:
        if self.frame_bytes <= 0 or self.frame_bytes % PAGE:
            raise ValueError(f"a frame of {self.frame_bytes} bytes: must be a positive multiple of {PAGE}")
        if not 0 < self.payload_bytes <= min(self.frame_bytes, _MAX_PAYLOAD):
            raise ValueError(f"payloads of {self.payload_bytes} bytes in a frame of {self.frame_bytes}")
        if not 0 < self.payload_mask < 2**32:
            raise ValueError(f"payload mask {self.payload_mask:#x} is not a 32-bit mask")

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payloads together, without padding."""
        return sum(size for _, size in self.payloads)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: header block and frame."""
        return PAGE + self.frame_bytes


class Verdict(Enum):
    """What a slot's bytes turned out to be."""

    OK = "ok"
    EMPTY = "empty"  # never written
    TORN_HEADER = "torn header"
    FOREIGN = "foreign"  # not ours, or of another format version
    WRONG_HASH = "wrong hash"  # a whole page, but another one
    WRONG_LENGTH = "wrong length"  # length or kinds of the payloads
    BAD_PAYLOAD = "bad payload"


def pack_header(block: memoryview, content_hash: bytes, frame: Buffer, geometry: FrameGeometry) -> None:
    """Write the header of `frame` (at least its payload bytes) into `block`, 4096 bytes; the rest becomes zero."""
    payload = memoryview(frame)[: geometry.payload_bytes]
    fields = _FIELDS.pack(
        MAGIC, FORMAT_VERSION, 0, geometry.payload_mask, len(payload), content_hash, xxh3_64_intdigest(payload)
    )
    block[:PAGE] = (fields + _CHECK.pack(xxh3_64_intdigest(fields))).ljust(PAGE, b"\0")


def check(block: Buffer, content_hash: bytes | None, frame: Buffer | None, geometry: FrameGeometry) -> Verdict:
    """Verify a header block and, where `frame` is given, the payload; `content_hash` None accepts any page's."""
    header = bytes(memoryview(block)[:HEADER_BYTES])
    if header == _NO_HEADER:
        return Verdict.EMPTY
    magic, version, _, mask, length, found, payload_sum = _FIELDS.unpack_from(header)
    if magic != MAGIC or version != FORMAT_VERSION:
        return Verdict.FOREIGN
    if _CHECK.unpack_from(header, _FIELDS.size)[0] != xxh3_64_intdigest(header[: _FIELDS.size]):
        return Verdict.TORN_HEADER
    if mask != geometry.payload_mask or length != geometry.payload_bytes:
        return Verdict.WRONG_LENGTH
    if content_hash is not None and found != content_hash:
        return Verdict.WRONG_HASH
    if frame is not None and payload_sum != xxh3_64_intdigest(memoryview(frame)[:length]):
        return Verdict.BAD_PAYLOAD
    return Verdict.OK


def stored_hash(block: Buffer) -> bytes:
    """The content hash that a header block names; meaningful only where `check` finds nothing wrong with the header."""
    return bytes(memoryview(block)[16 : 16 + HASH_BYTES])

"""Turns the stored blocks of GGUF tensors into float32, bit-equal to the `gguf` package, without loops over blocks.

Each block holds scales and then packed integers q; the formats are ggml's (ggml-quants.c). B is the number of blocks.
"""

from collections.abc import Callable

import torch

from benthic.common.errors import ModelError
from benthic.weights.gguf import BLOCK_TYPES, GGUFFile

_BLOCK_BYTES = {b.name: (b.block, b.num_bytes) for b in BLOCK_TYPES.values()}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFReader(GGUFFile):
    """A GGUF file whose tensors can be loaded."""

    def load(self, name: str) -> torch.Tensor:
        """The tensor on the CPU: float32 where quantised, else as stored and sharing the file. Raises ModelError."""
        info = self.info(name)
        stored = torch.frombuffer(self.raw(name), dtype=torch.uint8)
        if info.dtype in _PLAIN:
            return stored.view(_PLAIN[info.dtype]).view(info.shape)
        return dequantise(stored, info.dtype, name).view(info.shape)


def dequantise(stored: torch.Tensor, dtype: str, name: str = "tensor") -> torch.Tensor:
    """float32 [n] from the stored bytes, uint8 [n / block * bytes a block]. Raises ModelError for an unknown type."""
    if dtype not in _QUANTISED:
        raise ModelError(f"{name} is stored as {dtype}, which is not supported; supported: {', '.join(_QUANTISED)}")
    _, num_bytes = _BLOCK_BYTES[dtype]
    return _QUANTISED[dtype](stored.view(-1, num_bytes)).reshape(-1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block, as float32 [B, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [B, 16] -> uint8 [B, 32]: the low halves, then the high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [B, 4] (32 bits, lowest first) -> uint8 [B, 32], each 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((packed.unsqueeze(-1) >> shifts) & 1) << 4).view(-1, 32)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    q = _nibbles(blocks[:, 2:]).to(torch.int8).sub_(8)
    return q.float().mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    q = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).to(torch.int8).sub_(16)
    return q.float().mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return q.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """float16 d and dmin, 12 bytes with 8 scales and 8 minima of 6 bits, 128 bytes of nibbles: 8 groups of 32."""
    packed = blocks[:, 4:16].view(-1, 3, 4)
    first, second, mixed = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = torch.cat((first & 63, (mixed & 15) | ((first >> 2) & 48)), dim=-1).float()  # [B, 8]
    minima = torch.cat((second & 63, (mixed >> 4) | ((second >> 2) & 48)), dim=-1).float()
    q = blocks[:, 16:].view(-1, 4, 1, 32)
    q = torch.cat((q & 15, q >> 4), dim=2).view(-1, 8, 32).float()
    return q.mul_((_half(blocks, 0) * scales).unsqueeze(-1)).sub_((_half(blocks, 2) * minima).unsqueeze(-1))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales, float16 d: two halves of four groups of 32."""
    low = blocks[:, :128].view(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), dim=2).view(-1, 8, 32)
    high = blocks[:, 128:192].view(-1, 2, 1, 32)
    high = torch.cat(tuple((high >> shift) & 3 for shift in (0, 2, 4, 6)), dim=2).view(-1, 8, 32)
    q = (low | (high << 4)).to(torch.int8).sub_(32).view(-1, 16, 16).float()
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return q.mul_((_half(blocks, 208) * scales).unsqueeze(-1))


_QUANTISED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}

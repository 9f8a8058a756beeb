"""The named static buffers of a graph family: device tensors whose addresses a captured graph keeps."""

from dataclasses import dataclass

import torch

_MB = 1e6


@dataclass(frozen=True, slots=True)
class BufferRow:
    """One line of the attribution table."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    megabytes: float
    shared_with: str  # whose buffer it is, where it is not this family's own; else empty


class StaticBuffers:
    """Owns one family's buffers. A family may lend one to a later family whose graphs never run at the same time."""

    def __init__(self, family: str, device: torch.device) -> None:
        self.family = family
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}
        self._shared_with: dict[str, str] = {}

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A new zeroed buffer."""
        assert name not in self._tensors, name
        self._tensors[name] = torch.zeros(shape, dtype=dtype, device=self._device)
        return self._tensors[name]

    def alias(self, name: str, tensor: torch.Tensor, owner: str) -> torch.Tensor:
        """List a buffer that belongs to `owner` (another family, or the runner) under `name`."""
        assert name not in self._tensors, name
        self._tensors[name] = tensor
        self._shared_with[name] = owner
        return tensor

    def rows(self) -> tuple[BufferRow, ...]:
        """Every buffer, in the order of allocation."""
        return tuple(
            BufferRow(n, tuple(t.shape), t.dtype, t.nbytes / _MB, self._shared_with.get(n, ""))
            for n, t in self._tensors.items()
        )

    def total_megabytes(self) -> float:
        """Of the family's own buffers, in units of 1e6 bytes; what it shares counts at its owner."""
        return sum(row.megabytes for row in self.rows() if not row.shared_with)

"""How a stored tensor is described. Loads no torch: the server process reads GGUF metadata."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor: name, stored type (`F32`, `BF16`, `Q4_1`, …), shape (outermost first) and bytes on disk."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

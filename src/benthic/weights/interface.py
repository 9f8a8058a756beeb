"""What a reader of weights offers, whatever the file format."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from benthic.weights.tensor_info import TensorInfo


class TensorReader(Protocol):
    """Read access to the tensors of one checkpoint. Readers map files into memory and copy nothing before `load`."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold tensors."""

    def names(self) -> Sequence[str]:
        """Names of the tensors that a model is made of."""

    def stored_names(self) -> Sequence[str]:
        """Those and the others in the files, such as the scales of quantised weights; `info` and `raw` know all."""

    def info(self, name: str) -> TensorInfo:
        """Raises ModelError if there is no tensor of that name."""

    def raw(self, name: str) -> memoryview:
        """The stored bytes. Raises ModelError."""

    def load(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, float32 where it is quantised; it may share the mapped file. Raises ModelError."""

"""Dequantised tensors, bit by bit against the `gguf` package."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from benthic.common.errors import ModelError
from benthic.weights.dequantise import GGUFReader, dequantise
from benthic.weights.locate import BUILT_IN, locate
from tests.support.gguf_files import write_tensors

QUANTISABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def test_all_tensors_of_the_built_in_model_are_bit_equal() -> None:
    path = locate(BUILT_IN).path
    ours, theirs = GGUFReader(path), gguf.GGUFReader(str(path))
    assert len(ours.names()) == len(theirs.tensors) == 272
    for tensor in theirs.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        loaded = ours.load(tensor.name)
        assert loaded.shape == expected.shape
        assert np.array_equal(loaded.numpy().view(np.uint32), expected.view(np.uint32)), tensor.name


@pytest.mark.parametrize("kind", QUANTISABLE)
def test_each_type_is_bit_equal(kind: str, tmp_path: Path) -> None:
    values = np.random.default_rng(3).standard_normal((6, 96), dtype=np.float32)
    path = write_tensors(tmp_path / "x.gguf", {"t": (values, kind)})
    stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(GGUFReader(path).load("t").float().numpy(), expected)


@pytest.mark.parametrize(("kind", "num_bytes", "halves"), [("Q4_K", 144, (0, 2)), ("Q6_K", 210, (208,))])
def test_k_types_are_bit_equal_on_random_blocks(
    kind: str, num_bytes: int, halves: tuple[int, ...], tmp_path: Path
) -> None:
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (8, num_bytes), dtype=np.uint8)
    for at in halves:  # any bits but the scales' are valid; a random float16 may be no number
        blocks[:, at : at + 2] = rng.standard_normal((8, 1)).astype(np.float16).view(np.uint8)
    path = write_tensors(tmp_path / "x.gguf", {"t": (blocks, kind)})
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    loaded = GGUFReader(path).load("t")
    assert loaded.shape == (8, 256)
    assert np.array_equal(loaded.numpy(), expected)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ModelError, match="w is stored as IQ1_S, which is not supported; supported: Q4_0"):
        dequantise(torch.zeros(4, dtype=torch.uint8), "IQ1_S", "w")

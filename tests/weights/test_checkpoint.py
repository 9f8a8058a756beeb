"""Folders of safetensors, and the ways in which they can be wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from benthic.common.errors import ModelError
from benthic.weights.checkpoint import INDEX_NAME, SafetensorsReader, take, total_bytes

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.randn(5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "c": torch.tensor([[1, -2]], dtype=torch.int8),
    "d": torch.empty(0, 3),
}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": TENSORS["a"], "c": TENSORS["c"]}, tmp_path / "one.safetensors")
    save_file({"b": TENSORS["b"], "d": TENSORS["d"]}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one", "b": "two", "c": "one", "d": "two"})
    return tmp_path


def write_index(folder: Path, places: dict[str, str]) -> None:
    weight_map = {tensor: f"{name}.safetensors" for tensor, name in places.items()}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_read_as_they_were_written(sharded: Path) -> None:
    reader = SafetensorsReader(sharded)
    assert sorted(reader.names()) == sorted(TENSORS)
    assert [path.name for path in reader.files] == ["one.safetensors", "two.safetensors"]
    for name, tensor in TENSORS.items():
        loaded = reader.load(name)
        assert loaded.dtype == tensor.dtype
        assert torch.equal(loaded, tensor)
    assert bytes(reader.raw("c")) == b"\x01\xfe"
    assert total_bytes(reader, ["a", "b"]) == 48 + 10


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert sorted(SafetensorsReader(tmp_path).names()) == sorted(TENSORS)


def test_a_wrong_shape_is_refused_with_both(sharded: Path) -> None:
    reader = SafetensorsReader(sharded)
    assert torch.equal(take(reader, "a", (3, 4)), TENSORS["a"])
    with pytest.raises(ModelError, match=r"tensor 'a' has shape \[3, 4\], the config wants \[4, 3\]"):
        take(reader, "a", (4, 3))
    with pytest.raises(ModelError, match="no tensor 'z' among its 4 tensors"):
        take(reader, "z", (1,))


def test_a_missing_shard_is_named_with_what_it_held(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"names 2 files, 1 of them missing: two\.safetensors \(holds 2 tensors, e\.g\. 'b'"
    ):
        SafetensorsReader(sharded)


def test_an_index_that_lies_is_refused(sharded: Path) -> None:
    write_index(sharded, {"a": "two", "b": "two"})
    with pytest.raises(ModelError, match=r"expects tensor 'a' in two\.safetensors, which has 2 tensors"):
        SafetensorsReader(sharded)
    write_index(sharded, {"a": "../one"})
    with pytest.raises(ModelError, match="expected a file name of the same folder"):
        SafetensorsReader(sharded)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "[" * 100_000])
def test_a_damaged_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(ModelError, match=r"index\.json"):
        SafetensorsReader(tmp_path)


def test_a_folder_without_weights_says_what_it_wants(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"no weights: expected model\.safetensors or model\.safetensors\.index\.json$"
    ):
        SafetensorsReader(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"found pytorch_model\.bin: convert them"):
        SafetensorsReader(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("st") / "x.safetensors"
    save_file(TENSORS, path)
    return path.read_bytes()


def read_all(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    reader = SafetensorsReader(folder)
    for name in reader.names():
        reader.load(name)


def test_every_cut_is_a_model_error(whole: bytes, tmp_path: Path) -> None:
    for length in range(len(whole)):
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            read_all(tmp_path, whole[:length])


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, 2**31), value=st.binary(min_size=1, max_size=9))
def test_damage_anywhere_is_a_model_error_or_harmless(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, at: int, value: bytes
) -> None:
    position = at % len(whole)
    folder = tmp_path_factory.getbasetemp()
    message = ""
    try:
        read_all(folder, whole[:position] + value + whole[position + len(value) :])
    except ModelError as error:
        message = str(error)
    assert not message or "model.safetensors" in message or "tensor" in message


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 1 << 70]},
        {"shape": [1], "data_offsets": [0, 4]},
        [],
    ],
)
def test_a_contradictory_header_is_refused(tmp_path: Path, entry: Any) -> None:
    header = json.dumps({"w": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ModelError, match="tensor 'w'"):
        SafetensorsReader(tmp_path)


def test_a_type_that_torch_lacks_is_named(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(1))
    with pytest.raises(ModelError, match="tensor 'w' is stored as F4; supported: F64"):
        SafetensorsReader(tmp_path).load("w")

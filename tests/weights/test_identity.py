"""The identity of weights depends on their content alone, the namespace on everything that shapes KV bytes."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benthic.weights.checkpoint import SafetensorsReader
from benthic.weights.identity import namespace, weights_identity


def identity(folder: Path, **tensors: torch.Tensor) -> str:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return weights_identity(SafetensorsReader(folder))


def test_a_copy_elsewhere_under_other_names_has_the_same_identity(tmp_path: Path) -> None:
    first = identity(tmp_path / "a", w=torch.ones(3000), v=torch.zeros(2))
    other = tmp_path / "b"
    other.mkdir()
    shutil.copy(tmp_path / "a" / "model.safetensors", other / "shard.safetensors")
    os.utime(other / "shard.safetensors", (1, 1))
    index = '{"weight_map": {"w": "shard.safetensors", "v": "shard.safetensors"}}'
    (other / "model.safetensors.index.json").write_text(index)
    assert weights_identity(SafetensorsReader(other)) == first


def test_any_difference_changes_the_identity(tmp_path: Path) -> None:
    changed = torch.ones(3000)
    changed[1234] = 2.0
    found = [
        identity(tmp_path / "a", w=torch.ones(3000)),
        identity(tmp_path / "b", w=changed),
        identity(tmp_path / "c", w=torch.ones(3000, 1)),
        identity(tmp_path / "d", v=torch.ones(3000)),
        identity(tmp_path / "e", w=torch.ones(3000).to(torch.bfloat16)),
        identity(tmp_path / "f", w=torch.ones(3000), v=torch.ones(1)),
    ]
    assert len(set(found)) == len(found)


def test_large_files_are_sampled_at_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benthic.weights.identity._WHOLE_FILE_BELOW", 0)
    size = 1 << 16
    base = identity(tmp_path / "a", w=torch.zeros(size, dtype=torch.uint8))
    for name, at, differs in (
        ("first", 0, True),
        ("middle", size // 2, True),
        ("last", size - 1, True),
        ("q", 9000, False),
    ):
        changed = torch.zeros(size, dtype=torch.uint8)
        changed[at] = 1
        assert (identity(tmp_path / name, w=changed) != base) is differs


BASE: dict[str, Any] = {
    "weights": "aa", "model": {"layers": 2, "heads": 4}, "rope": {"theta": 1e4}, "weights_dtype": "float32",
    "kv_dtype": "float32", "page_size": 64, "payloads": ("target_kv",),
}  # fmt: skip


def test_the_namespace_is_32_bytes_and_ignores_the_order_of_fields() -> None:
    digest = namespace(**BASE)
    assert len(digest) == 32
    assert namespace(**(BASE | {"model": {"heads": 4, "layers": 2}})) == digest


def test_every_field_changes_the_namespace() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"weights": "ab"}, {"model": {"layers": 3, "heads": 4}}, {"rope": {"theta": 2e4}}, {"page_size": 32},
        {"weights_dtype": "bfloat16"}, {"kv_dtype": "bfloat16"}, {"payloads": ("target_kv", "draft_kv")},
        {"layout_version": 2},
    ]  # fmt: skip
    assert len({namespace(**(BASE | change)) for change in changes}) == len(changes)


def test_numbers_that_json_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        namespace(**(BASE | {"rope": {"theta": float("nan")}}))

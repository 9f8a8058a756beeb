"""Quantised checkpoints read as plain ones, and the ways in which their scales can be wrong."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benthic.common.errors import ModelError
from benthic.quantization import DequantisingReader, quantise_fp8
from benthic.weights.checkpoint import SafetensorsReader, take, total_bytes
from benthic.weights.identity import weights_identity

ORACLE = Path(__file__).parents[1] / "data" / "oracles" / "deepseek_v32-fp8"
WEIGHT = torch.randn(200, 130, generator=torch.Generator().manual_seed(0))


def checkpoint(folder: Path, **changes: torch.Tensor | None) -> SafetensorsReader:
    """A folder with an fp8 matrix `a.weight` and a bf16 one `b.weight`; None leaves a tensor out."""
    codes, scales = quantise_fp8(WEIGHT)
    tensors: dict[str, torch.Tensor | None] = {
        "a.weight": codes,
        "a.weight_scale_inv": scales,
        "b.weight": torch.ones(4, 6, dtype=torch.bfloat16),
        **changes,
    }
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    return SafetensorsReader(folder)


def test_fp8_weights_load_as_float32_and_others_as_stored(tmp_path: Path) -> None:
    reader = DequantisingReader(checkpoint(tmp_path))
    assert sorted(reader.names()) == ["a.weight", "b.weight"]
    loaded = take(reader, "a.weight", (200, 130))
    assert loaded.dtype == torch.float32
    assert (loaded - WEIGHT).abs().max() < WEIGHT.abs().max() / 16
    assert reader.load("b.weight").dtype == torch.bfloat16
    assert total_bytes(reader, reader.names()) == 200 * 130 + 2 * 24


def test_scales_are_part_of_the_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benthic.weights.identity._WHOLE_FILE_BELOW", 0)  # as for files too large to hash whole
    stored = checkpoint(tmp_path)
    assert weights_identity(DequantisingReader(stored)) == weights_identity(stored)
    before = weights_identity(DequantisingReader(stored))
    other = tmp_path / "other"
    other.mkdir()
    changed = checkpoint(other, **{"a.weight_scale_inv": torch.full((2, 2), 0.5)})
    assert weights_identity(DequantisingReader(changed)) != before


def test_a_plain_checkpoint_passes_through(tmp_path: Path) -> None:
    stored = checkpoint(tmp_path, **{"a.weight": None, "a.weight_scale_inv": None})
    reader = DequantisingReader(stored)
    assert reader.names() == reader.stored_names() == ("b.weight",)
    assert reader.files == stored.files
    assert bytes(reader.raw("b.weight")) == bytes(stored.raw("b.weight"))
    with pytest.raises(ModelError, match="no tensor 'c' among its 1 tensors"):
        reader.load("c")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a.weight_scale_inv": None}, r"'a\.weight' is stored as F8_E4M3, but its scales .*_scale_inv' are missing$"),
        (
            {"a.weight_scale_inv": None, "a.weight_scale": torch.ones(1)},
            "are missing; found 'a.weight_scale': scales of rows or of the whole tensor are not supported",
        ),
        ({"a.weight": None}, r"'a\.weight_scale_inv' has no weight 'a\.weight' beside it"),
        ({"b.weight_scale_inv": torch.ones(1, 1)}, r"'b\.weight' is stored as BF16, expected F8_E4M3"),
        ({"a.weight_scale_inv": torch.ones(2, 1)}, r"has shape \[2, 1\], expected \[2, 2\]: .* of \[200, 130\]"),
        ({"a.weight_scale_inv": torch.ones(())}, r"has shape \[\], expected \[2, 2\]"),
        ({"a.weight_scale_inv": torch.ones(2, 2, dtype=torch.bfloat16)}, "is stored as BF16, expected F32"),
        ({"a.weight": torch.ones(5).to(torch.float8_e4m3fn)}, r"has shape \[5\], expected two dimensions"),
        ({"b.weight": torch.ones(4, 3, dtype=torch.uint8)}, r"'b\.weight' belongs to NVFP4 weights"),
        ({"b.weight_scale_2": torch.ones(())}, r"'b\.weight_scale_2' belongs to NVFP4 weights"),
        ({"c.k_scale": torch.ones(2, 2).to(torch.float8_e4m3fn)}, r"'c\.k_scale' is stored as F8_E4M3"),
    ],
)
def test_scales_that_do_not_fit_are_refused_before_loading(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        DequantisingReader(checkpoint(tmp_path, **changes))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_no_scales_are_refused_on_loading(tmp_path: Path, value: float) -> None:
    scales = torch.ones(2, 2)
    scales[1, 0] = value
    reader = DequantisingReader(checkpoint(tmp_path, **{"a.weight_scale_inv": scales}))
    with pytest.raises(ModelError, match=r"'a\.weight_scale_inv' has \S+ for block \(1, 0\) of \[2, 2\]; expected pos"):
        reader.load("a.weight")


def test_the_oracle_loads_whole_and_says_what_is_quantised() -> None:
    reader = DequantisingReader(SafetensorsReader(ORACLE))
    stored = reader.stored_names()
    assert set(stored) - set(reader.names()) == {name for name in stored if name.endswith("_scale_inv")}
    for name in reader.names():
        tensor = reader.load(name)
        assert tuple(tensor.shape) == reader.info(name).shape
        assert torch.isfinite(tensor).all()
    summary = reader.summary()
    assert summary["F8_E4M3"] == {
        "mlp.down_proj": 1, "mlp.experts.down_proj": 64, "mlp.experts.gate_proj": 64, "mlp.experts.up_proj": 64,
        "mlp.gate_proj": 1, "mlp.shared_experts.down_proj": 4, "mlp.shared_experts.gate_proj": 4,
        "mlp.shared_experts.up_proj": 4, "mlp.up_proj": 1, "self_attn.indexer.wk": 5, "self_attn.indexer.wq_b": 5,
        "self_attn.kv_a_proj_with_mqa": 5, "self_attn.kv_b_proj": 5, "self_attn.o_proj": 5, "self_attn.q_a_proj": 5,
        "self_attn.q_b_proj": 5,
    }  # fmt: skip
    assert summary["BF16"] == {
        "eh_proj": 1, "embed_tokens": 1, "lm_head": 1, "mlp.gate": 4, "self_attn.indexer.weights_proj": 5,
    }  # fmt: skip


def test_a_surplus_scale_of_the_oracle_is_named(tmp_path: Path) -> None:
    shutil.copytree(ORACLE, tmp_path / "m")
    index = tmp_path / "m" / "model.safetensors.index.json"
    dropped = "model.layers.1.self_attn.o_proj.weight"
    index.write_text("\n".join(line for line in index.read_text().splitlines() if f'"{dropped}"' not in line))
    with pytest.raises(ModelError, match=f"{dropped}_scale_inv' has no weight '{dropped}' beside it"):
        DequantisingReader(SafetensorsReader(tmp_path / "m"))

"""Which tensors are loaded, refused, ignored or kept for later."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benthic.common.errors import ModelError
from benthic.models.registry import load_model
from benthic.weights.locate import locate
from tests.support.model_driver import ModelDriver

ORACLE = Path(__file__).parents[1] / "data" / "oracles" / "glm_moe_dsa"
MTP = "model.layers.6."  # behind the six layers of the model
Tensors = dict[str, torch.Tensor]


def stored() -> Tensors:
    tensors: Tensors = {}
    for shard in ORACLE.glob("model-*.safetensors"):
        tensors |= load_file(shard)
    return tensors


def changed(folder: Path, change: Callable[[Tensors], object], **fields: object) -> Path:
    """The oracle's model with other tensors and config fields."""
    tensors = stored()
    change(tensors)
    config = json.loads((ORACLE / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = load_model(locate(str(folder)), torch.device("cpu"), dtype)
    return ModelDriver(model).prefill(range(100, 130))


def test_the_mtp_layer_is_recognised_and_not_loaded(caplog: pytest.LogCaptureFixture) -> None:
    kept = {name: tensor for name, tensor in stored().items() if name.startswith(MTP)}
    sizes: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO):
        load_model(locate(str(ORACLE)), torch.device("cpu"), torch.float32, lambda *step: sizes.append(step))
    size = sum(tensor.nbytes for tensor in kept.values()) / (1 << 20)
    assert f"kept for speculative decoding: {len(kept)} tensors, {size:.0f} MiB, not loaded" in caplog.messages
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert sizes[-1][0] == sizes[-1][1] == sum(t.nbytes for n, t in stored().items() if n not in kept)


def test_an_mtp_layer_that_lacks_tensors_is_said_but_serves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = changed(tmp_path, lambda tensors: tensors.pop(f"{MTP}eh_proj.weight"))
    with caplog.at_level(logging.INFO):
        assert torch.equal(logits(folder), logits(ORACLE))
    assert any(f"lacks 1 of its 47 tensors: {MTP}eh_proj.weight" in message for message in caplog.messages)


def test_an_mtp_tensor_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path, lambda tensors: tensors.update({f"{MTP}eh_proj.weight": torch.zeros(128, 128)}))
    with pytest.raises(
        ModelError, match=r"layers\.6\.eh_proj\.weight' has shape \[128, 128\], the config wants \[128, 256\]"
    ):
        logits(folder)


def test_copies_indexers_of_sharing_layers_and_old_frequencies_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def add(tensors: Tensors) -> None:
        tensors[f"{MTP}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{MTP}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        tensors["model.layers.2.self_attn.indexer.wk.weight"] = torch.ones(32, 128)  # layer 2 shares the one of 1
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    folder = changed(tmp_path, add)
    with caplog.at_level(logging.INFO):
        assert torch.equal(logits(folder), logits(ORACLE))
    assert any(message.startswith("ignored: 3 tensors") for message in caplog.messages)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_unknown_tensors_are_one_warning_that_names_three(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = changed(tmp_path, lambda tensors: tensors.update({f"other.{i}": torch.ones(2) for i in range(5)}))
    assert torch.equal(logits(folder), logits(ORACLE))
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["5 tensors of the checkpoint are unknown and not used: other.0, other.1, other.2, …"]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.self_attn.kv_b_proj.weight",
        "model.layers.4.self_attn.indexer.k_norm.bias",
        "model.layers.5.mlp.experts.7.up_proj.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "lm_head.weight",
    ],
)
def test_missing_tensors_and_wrong_shapes_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ModelError, match=f"no tensor '{name}'"):
        logits(changed(tmp_path / "a", lambda tensors: tensors.pop(name)))
    (tmp_path / "b").mkdir()
    folder = changed(tmp_path / "b", lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    with pytest.raises(ModelError, match=f"{name}' has shape .*, the config wants"):
        logits(folder)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    (tmp_path / "tied").mkdir()
    (tmp_path / "copied").mkdir()
    tied = changed(tmp_path / "tied", lambda tensors: tensors.pop("lm_head.weight"), tie_word_embeddings=True)
    copied = changed(
        tmp_path / "copied",
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    )
    assert torch.equal(logits(tied), logits(copied))


def test_bfloat16_is_near_float32_where_attention_is_dense(tmp_path: Path) -> None:
    """With room for the whole context in a selection: random models tear apart where selections flip."""
    folder = changed(tmp_path, lambda tensors: None, index_topk=64)
    exact, rounded = logits(folder), logits(folder, torch.bfloat16)
    differ = (exact - rounded).abs()
    assert differ.mean().item() < 0.02 * exact.abs().max().item()

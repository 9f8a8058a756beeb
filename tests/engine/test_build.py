"""What is settled before the weights load."""

from pathlib import Path

import pytest
import torch

from benthic.common.errors import CapacityError
from benthic.config import options_from_mapping, resolve
from benthic.engine import build
from benthic.models.kv_layout import KVFormats
from benthic.models.registry import open_checkpoint
from benthic.weights.dsa_config import DsaConfig
from benthic.weights.locate import locate
from tests.support.tiny_checkpoint import write_checkpoint
from tests.support.tiny_dsa import write_dsa_checkpoint


@pytest.mark.parametrize("option", [{"l1_size": "90000GiB"}, {"l1_pages": 1 << 40}])
def test_an_l1_that_cannot_fit_is_refused_before_the_weights_load(
    option: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_model(*_: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(build, "load_model", load_model)
    config = resolve(options_from_mapping({"device": "cpu", **option}, "test")).engine
    with pytest.raises(CapacityError, match="lower --l1-pages or --l1-size"):
        build.build_engine(config, locate(config.model.model))


def test_latents_unpacked_for_a_prefill_are_counted_where_fp8_ones_are_on_a_gpu(tmp_path: Path) -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    shape = open_checkpoint(locate(str(write_dsa_checkpoint(tmp_path)))).config
    assert isinstance(shape, DsaConfig)
    assert shape.max_position % 64 == 0
    entry = 2 * (shape.kv_lora_rank + shape.qk_rope_head_dim)
    fp8, plain = KVFormats(dtype=torch.bfloat16, target_fp8=True), KVFormats(dtype=torch.bfloat16, index_fp8=True)
    config = resolve(options_from_mapping({"page_size": 64, "max_context": 1000}, "test")).engine
    assert build.unpacked_bytes(config, fp8, shape, gpu) == 1024 * entry
    assert build.unpacked_bytes(config, fp8, shape, cpu) == 0
    assert build.unpacked_bytes(config, plain, shape, gpu) == 0
    whole = resolve(options_from_mapping({"page_size": 64}, "test")).engine
    assert build.unpacked_bytes(whole, fp8, shape, gpu) == shape.max_position * entry


def test_a_start_that_fails_half_way_leaves_memory_and_files_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "device": "cpu", "dtype": "float32", "page_size": 16, "l1_pages": 8, "max_context": 64, "l2_size": "4MiB",
        "l3_dir": str(tmp_path / "floor"), "l3_size": "8MiB",
    }  # fmt: skip
    checkpoint = write_checkpoint(tmp_path / "model")
    config = resolve(options_from_mapping({"model": str(checkpoint), **options}, "test")).engine
    source = locate(config.model.model)
    (tmp_path / "floor").mkdir()

    def load_model(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(build, "load_model", load_model)
        with pytest.raises(MemoryError) as kept:  # its traceback keeps every local of the failed start alive
            build.build_engine(config, source)
    engine, ready = build.build_engine(config, source)  # an index that is open can't be opened again in a process
    assert any(row.name == "L3" for row in ready.table)
    assert engine.close()
    assert kept.value is not None

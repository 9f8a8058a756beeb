"""The namespace of a loaded checkpoint."""

import shutil
from pathlib import Path

import pytest
import torch

from benthic.models.kv_layout import KVFormats
from benthic.models.registry import model_namespace, open_checkpoint
from benthic.weights.locate import locate
from tests.support.tiny_dsa import write_dsa_checkpoint

FOLDER = Path(__file__).parents[1] / "data" / "oracles" / "llama"


def of(folder: Path, dtype: torch.dtype = torch.float32, page_size: int = 64) -> bytes:
    namespace = model_namespace(open_checkpoint(locate(str(folder))), KVFormats(dtype=dtype), page_size)
    assert namespace.words["page_size"] == str(page_size)
    return namespace.digest


@pytest.mark.parametrize(
    ("dtype", "page_size", "digest"),
    [
        (torch.float32, 64, "e2ba3b426c3ee431327add95f53dea5f3d4ac8061ca51bd149009e282a264425"),
        (torch.bfloat16, 16, "88ffd6a3578b8083aaeacd12064931346f78d00a77ffcdcf36c3028caf715a93"),
    ],
)
def test_a_llama_s_namespace_never_changes(dtype: torch.dtype, page_size: int, digest: str) -> None:
    """Written by the version before other model families came: what it left on disk must still be found."""
    assert of(FOLDER, dtype, page_size).hex() == digest


def test_a_copy_has_the_same_namespace(tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere"
    shutil.copytree(FOLDER, copied)
    (copied / "generation_config.json").write_text('{"eos_token_id": 5}')  # not a matter of KV bytes
    assert of(copied) == of(FOLDER)


def test_dtype_page_size_and_rope_change_it(tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(FOLDER, changed)
    config = (changed / "config.json").read_text()
    (changed / "config.json").write_text(config.replace("100000.0", "200000.0"))
    found = [of(FOLDER), of(FOLDER, torch.bfloat16), of(FOLDER, page_size=32), of(changed)]
    assert len(set(found)) == 4


def test_formats_of_each_payload_are_part_of_a_latent_model_s_namespace(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(locate(str(write_dsa_checkpoint(tmp_path))))
    found = {}
    for target_fp8 in (False, True):
        for index_fp8 in (False, True):
            formats = KVFormats(dtype=torch.float32, target_fp8=target_fp8, index_fp8=index_fp8)
            namespace = model_namespace(checkpoint, formats, 16)
            found[namespace.digest] = namespace.words
    assert len(found) == 4
    words = list(found.values())[1]
    assert words["kv_dtype"] == "target_kv=float32,index_k=fp8"
    assert words["payloads"] == '["target_kv", "index_k"]'
    assert '"order": "interleaved", "index_order": "interleaved"' in words["rope"]
    assert '"index_transform": "none"' in words["model"]


def test_the_pairs_that_index_keys_turn_in_change_it(tmp_path: Path) -> None:
    digests = set()
    for name in ("true", "false"):
        folder = write_dsa_checkpoint(tmp_path / name)
        config = (folder / "config.json").read_text()
        (folder / "config.json").write_text(config.replace("{", f'{{"indexer_rope_interleave": {name}, ', 1))
        digests.add(model_namespace(open_checkpoint(locate(str(folder))), KVFormats(dtype=torch.float32), 16).digest)
    assert len(digests) == 2


def test_opening_says_which_modules_are_fp8(caplog: pytest.LogCaptureFixture) -> None:
    folder = Path(__file__).parents[1] / "data" / "oracles" / "deepseek_v32-fp8"
    with caplog.at_level("INFO", logger="benthic.models.registry"):
        open_checkpoint(locate(str(folder)))
    assert "fp8 weights, dequantised on loading: " in caplog.text
    assert "self_attn.kv_b_proj (" in caplog.text

"""The namespace of a loaded checkpoint."""

import shutil
from pathlib import Path

import torch

from benthic.models.registry import model_namespace, open_checkpoint
from benthic.weights.locate import locate

FOLDER = Path(__file__).parents[1] / "data" / "oracles" / "llama"


def of(folder: Path, dtype: torch.dtype = torch.float32, page_size: int = 64) -> bytes:
    namespace = model_namespace(
        open_checkpoint(locate(str(folder))), weights_dtype=dtype, kv_dtype=dtype, page_size=page_size
    )
    assert namespace.words["page_size"] == str(page_size)
    return namespace.digest


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

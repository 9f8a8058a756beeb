"""The manifest: written whole, read back, and a contradiction is refused with the way out."""

import errno
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.tiers.disk.io import SystemDisk
from benthic.tiers.disk.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestDamaged,
    check_manifest,
    is_namespace,
    read_manifest,
    remove_temporary,
    write_manifest,
)
from tests.support.disk_floor import GEOMETRY, NAMESPACE, WORDS, NoSync
from tests.support.faulty_disk import FaultyDisk, TracingDisk, fail

IO = SystemDisk()
MANIFEST = Manifest(namespace=NAMESPACE.hex(), geometry=GEOMETRY, words=WORDS)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.text(max_size=20), st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=4)
)
def test_any_words_come_back(tmp_path_factory: pytest.TempPathFactory, words: dict[str, str]) -> None:
    folder = tmp_path_factory.mktemp("namespace")
    manifest = replace(MANIFEST, words=words, index_dir=Path("/ssd 1/index"))
    write_manifest(folder, manifest, NoSync())
    assert read_manifest(folder) == manifest
    assert tomllib.loads((folder / MANIFEST_NAME).read_text())["format_version"] == 1


def test_no_manifest_is_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


def test_it_is_put_in_place_whole_and_durably(tmp_path: Path) -> None:
    io = TracingDisk()
    write_manifest(tmp_path, MANIFEST, io)
    assert [event.kind for event in io.trace] == ["create", "truncate", "write", "sync", "rename", "folder"]
    assert io.trace[4].new == tmp_path / MANIFEST_NAME


def test_a_failed_write_leaves_the_old_one(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST, IO)
    with pytest.raises(OSError, match=r"\[Errno 28\]"):
        write_manifest(tmp_path, replace(MANIFEST, words={}), FaultyDisk(fail("pwritev", errno.ENOSPC)))
    assert read_manifest(tmp_path) == MANIFEST
    remove_temporary(tmp_path, IO)
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_NAME]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"namespace": "ab" * 32}, "namespace"),
        ({"geometry": replace(GEOMETRY, frame_bytes=8192)}, "frame_bytes = 8192"),
        ({"geometry": replace(GEOMETRY, payload_mask=3)}, "payload_mask = 3"),
        ({"geometry": replace(GEOMETRY, payloads=(("index_k", 4000),))}, "index_k"),
        ({"format_version": 2}, "format_version = 2"),
    ],
)
def test_a_contradiction_names_itself_and_the_remedy(tmp_path: Path, change: dict[str, object], says: str) -> None:
    folder = tmp_path / NAMESPACE.hex()
    with pytest.raises(ManifestDamaged, match=says) as caught:
        check_manifest(folder, replace(MANIFEST, **change), MANIFEST)  # type: ignore[arg-type]
    assert f"benthic cache clear {tmp_path} --namespace {NAMESPACE.hex()[:12]}" in str(caught.value)
    check_manifest(folder, MANIFEST, MANIFEST)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"format_version = 1", b"format_version = 9\nnamespace = 'x'", b"[[[", b"a = 1"]
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(ManifestDamaged, match=r"can't be right.*benthic cache clear"):
        read_manifest(tmp_path)


@settings(max_examples=60, deadline=None)
@given(bit=st.integers(0, 8 * 300))
def test_a_flipped_bit_gives_another_manifest_or_a_refusal(tmp_path_factory: pytest.TempPathFactory, bit: int) -> None:
    folder = tmp_path_factory.mktemp("namespace")
    write_manifest(folder, MANIFEST, NoSync())
    content = bytearray((folder / MANIFEST_NAME).read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    (folder / MANIFEST_NAME).write_bytes(content)
    try:
        found = read_manifest(folder)
    except ManifestDamaged:
        return
    assert found is not None
    assert found != MANIFEST  # no bit of it is without a meaning


def test_what_a_namespace_is_called() -> None:
    assert is_namespace(NAMESPACE.hex())
    assert not any(map(is_namespace, ("", "lock", NAMESPACE.hex()[:-1], NAMESPACE.hex().upper(), "g" * 64)))

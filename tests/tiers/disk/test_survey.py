"""Looking at a cache folder from outside: what is there, what is damaged, and that looking changes nothing."""

import os
from pathlib import Path

import pytest

from benthic.common.errors import ConfigError
from benthic.tiers.disk.index import Entry, pack_value
from benthic.tiers.disk.io import SystemDisk
from benthic.tiers.disk.layout import namespace_folder
from benthic.tiers.disk.manifest import MANIFEST_NAME
from benthic.tiers.disk.survey import (
    Damage,
    choose,
    index_folders,
    namespaces,
    remove_namespace,
    survey,
    survey_slabs,
    verify,
)
from tests.support.disk_floor import GEOMETRY, KIB, NAMESPACE, WORDS, config_for, flip_bit, open_one, page_hash, store
from tests.support.faulty_disk import TracingDisk
from tests.tiers.disk.test_floor import raw_puts

SLOT = GEOMETRY.slot_bytes
OTHER = bytes(32)


def filled(path: Path, num: int = 6, namespace: bytes = NAMESPACE, **more: object) -> Path:
    floor = open_one(config_for(path, **more), namespace=namespace)  # type: ignore[arg-type]
    store(floor, range(num))
    floor.close()
    return namespace_folder(path, namespace)


def findings(folder: Path) -> list[Damage]:
    return list(verify(survey(folder), SystemDisk(), lambda done, total: None))


def test_namespaces_are_listed_with_words_and_sizes(tmp_path: Path) -> None:
    filled(tmp_path)
    filled(tmp_path, namespace=OTHER)
    (tmp_path / "notes").mkdir()
    found = namespaces(tmp_path)
    assert [one.name for one in found] == sorted((OTHER.hex(), NAMESPACE.hex()))
    assert all(one.manifest is not None and one.manifest.words == WORDS for one in found)
    assert all(700 * KIB < one.num_bytes <= 1024 * KIB for one in found)
    assert choose(found, None, tmp_path) == found
    assert [one.name for one in choose(found, NAMESPACE.hex()[:5].upper(), tmp_path)] == [NAMESPACE.hex()]
    for prefix in ("zz", ""):
        with pytest.raises(ConfigError, match="there are: 000000000000"):
            choose(found, prefix, tmp_path)


@pytest.mark.parametrize("path", ["", "missing", "file"])
def test_a_wrong_folder_is_one_clear_sentence(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"not a cache folder|No such file|Not a directory") as caught:
        namespaces(tmp_path / path)
    assert str(tmp_path / path) in str(caught.value)


def test_slabs_pages_and_ages(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    [slab] = survey_slabs(survey(folder), live=False)
    assert (slab.path.name, slab.num_pages, slab.ages) == ("slab-0.dat", 6, (0, 5))
    assert slab.num_slots * SLOT == slab.path.stat().st_size
    (folder / "index-0.lmdb").write_bytes(bytes(8192))
    [slab] = survey_slabs(survey(folder), live=False)
    assert slab.problem


def test_whole_pages_give_no_finding_and_progress_reaches_the_end(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    heard: list[tuple[int, int]] = []
    before = {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(tmp_path.rglob("*")) if path.is_file()
    }
    assert list(verify(survey(folder), SystemDisk(), lambda *at: heard.append(at))) == []
    assert heard[-1] == (6, 6)
    assert {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(tmp_path.rglob("*")) if path.is_file()
    } == before


def test_every_kind_of_damage_is_named_with_slot_and_hash(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    floor = open_one(config_for(tmp_path))
    slots = {n: floor.live[page_hash(n)].slot for n in range(6)}
    floor.close()
    slab, index = folder / "slab-0.dat", folder / "index-0.lmdb"
    flip_bit(slab, 8 * (slots[0] * SLOT + 5000))
    flip_bit(slab, 8 * (slots[1] * SLOT + 20))
    with slab.open("r+b") as file:
        file.seek(slots[2] * SLOT)
        file.write(bytes(4096))
    raw_puts(
        index,
        (page_hash(50), pack_value(page_hash(50), Entry(slots[3], 0, 0))),
        (page_hash(51), pack_value(page_hash(51), Entry(10**6, 0, 0))),
        (page_hash(52), b"x"),
    )
    found = {damage.content_hash: (damage.slot, damage.kind) for damage in findings(folder)}
    assert found == {
        page_hash(0): (slots[0], "bad payload"),
        page_hash(1): (slots[1], "torn header"),
        page_hash(2): (slots[2], "empty"),
        page_hash(3): (slots[3], "slot with 2 owners"),
        page_hash(50): (slots[3], "slot with 2 owners"),
        page_hash(51): (10**6, f"past the end of the file, which has {slab.stat().st_size // SLOT} slots"),
        page_hash(52): (-1, "damaged index entry"),
    }


def test_a_damaged_index_and_a_cut_slab_are_findings(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    os.truncate(folder / "slab-0.dat", 4 * SLOT)
    assert len(findings(folder)) == 2
    os.truncate(folder / "slab-0.dat", 0)
    assert len(findings(folder)) == 6
    (folder / "index-0.lmdb").write_bytes(b"x" * 9000)
    [damage] = findings(folder)
    assert damage.path.name == "index-0.lmdb"
    assert damage.kind.startswith("index: ")


def test_a_damaged_or_missing_manifest_is_told_apart(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    (folder / MANIFEST_NAME).write_text("x")
    assert survey(folder).damaged
    (folder / MANIFEST_NAME).unlink()
    assert survey(folder).problem
    assert not survey(folder).damaged
    assert findings(folder) == []
    folder.rename(tmp_path / ("ef" * 32))
    filled(tmp_path)
    (tmp_path / ("ef" * 32) / MANIFEST_NAME).write_bytes((folder / MANIFEST_NAME).read_bytes())
    assert "of another namespace" in survey(tmp_path / ("ef" * 32)).problem


def test_removing_takes_the_indexes_first_and_leaves_what_is_not_ours(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    other = filled(tmp_path, namespace=OTHER)
    (folder / "notes.txt").write_text("mine")
    io = TracingDisk()
    assert remove_namespace(survey(folder), io) == ["notes.txt"]
    gone = [event.path.name for event in io.trace if event.kind == "unlink"]
    assert gone[:2] == ["index-0.lmdb", "index-0.lmdb-lock"]
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert remove_namespace(survey(other), SystemDisk()) == []
    assert not other.exists()


def test_an_index_elsewhere_is_found_and_removed(tmp_path: Path) -> None:
    folder = filled(tmp_path / "kv", index_dir=tmp_path / "fast")
    assert findings(folder) == []
    [slab] = survey_slabs(survey(folder), live=False)
    assert slab.num_pages == 6
    assert index_folders(namespaces(tmp_path / "kv")) == [tmp_path / "fast"]
    remove_namespace(survey(folder), SystemDisk())
    assert list((tmp_path / "fast").iterdir()) == []

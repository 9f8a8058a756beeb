"""Starts on folders in every condition: what was stored is found, what is damaged is not, and nothing stops a start
that could go on."""

import errno
import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from benthic.common.errors import BenthicError, CapacityError, ConfigError
from benthic.tiers.disk.format import PAGE, FrameGeometry, Verdict
from benthic.tiers.disk.index import Entry, pack_value
from benthic.tiers.disk.layout import namespace_folder
from benthic.tiers.disk.manifest import MANIFEST_NAME, ManifestDamaged, read_manifest
from tests.support.as_user import open_folder, run_as_user
from tests.support.disk_floor import (
    GEOMETRY,
    KIB,
    NAMESPACE,
    WORDS,
    config_for,
    flip_bit,
    open_one,
    page_hash,
    read_page,
    readable,
    store,
)
from tests.support.faulty_disk import FaultyDisk, TracingDisk, fail, refuse_direct

SLOT = GEOMETRY.slot_bytes


def filled(path: Path, num: int = 20) -> Path:
    """A floor with pages 0 … num - 1, closed; returns its namespace's folder."""
    floor = open_one(config_for(path))
    store(floor, range(num))
    floor.close()
    return namespace_folder(path, NAMESPACE)


def raw_puts(index: Path, *puts: tuple[bytes, bytes]) -> None:
    with lmdb.open(str(index), subdir=False, map_size=1 << 24) as env, env.begin(write=True) as txn:
        for key, value in puts:
            txn.put(key, value)


def test_pages_and_ages_outlive_a_restart(tmp_path: Path) -> None:
    filled(tmp_path)
    floor = open_one(config_for(tmp_path))
    assert readable(floor, range(25)) == list(range(20))
    assert floor.next_age == 20
    assert floor.pool.num_taken == 20
    assert (floor.report.live_pages, floor.report.dropped_entries, floor.report.rebuilt) == (20, 0, ())
    floor.close()


def test_a_new_folder_is_private_and_complete(tmp_path: Path) -> None:
    floor = open_one(config_for(tmp_path / "a" / "kv"))
    folder = namespace_folder(tmp_path / "a" / "kv", NAMESPACE)
    assert sorted(p.name for p in folder.iterdir()) == [
        "index-0.lmdb", "index-0.lmdb-lock", "manifest.toml", "slab-0.dat",
    ]  # fmt: skip
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())
    slab = folder / "slab-0.dat"
    assert slab.stat().st_size == floor.slab.num_slots * SLOT
    assert slab.stat().st_blocks * 512 >= slab.stat().st_size
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 1024 * KIB
    assert floor.next_age == 1
    floor.close()


def test_the_manifest_is_the_last_thing_that_a_first_start_does(tmp_path: Path) -> None:
    io = TracingDisk()
    open_one(config_for(tmp_path), io=io).close()
    kinds = [(event.kind, (event.new or event.path).name) for event in io.trace]
    folder = ("folder", NAMESPACE.hex())
    assert kinds[-3:] == [("rename", MANIFEST_NAME), folder, folder]  # the last: the empty index's name
    assert ("sync", "slab-0.dat") in kinds[: kinds.index(("create", "manifest.toml.new"))]


def test_without_a_manifest_nothing_counts_as_stored(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    (folder / MANIFEST_NAME).unlink()
    floor = open_one(config_for(tmp_path))
    assert floor.live == {}
    assert read_manifest(folder) is not None
    floor.close()


def test_a_manifest_that_contradicts_its_folder_stops_the_start(tmp_path: Path) -> None:
    filled(tmp_path)
    other = FrameGeometry(frame_bytes=8192, payload_mask=1, payloads=(("target_kv", 8192),))
    with pytest.raises(ManifestDamaged, match="frame_bytes = 4096, and this model's is 8192"):
        open_one(config_for(tmp_path), geometry=other)
    floor = open_one(config_for(tmp_path))
    assert len(readable(floor, range(20))) == 20
    floor.close()


def test_other_settings_have_a_folder_of_their_own_and_going_back_finds_all(tmp_path: Path) -> None:
    filled(tmp_path)
    fp8, big = hashlib.sha256(b"fp8").digest(), hashlib.sha256(b"page size 128").digest()
    two_pages = FrameGeometry(frame_bytes=8192, payload_mask=1, payloads=(("target_kv", 8000),))
    for namespace, geometry in ((fp8, GEOMETRY), (big, two_pages)):
        floor = open_one(config_for(tmp_path), namespace=namespace, geometry=geometry)
        assert floor.live == {}
        floor.close()
    floor = open_one(config_for(tmp_path))
    assert len(readable(floor, range(20))) == 20
    assert sorted(name for _, name, _ in floor.report.prepared.others) == sorted((fp8.hex(), big.hex()))  # type: ignore[union-attr]
    floor.close()


def test_clear_forgets_before_it_serves(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    before = (folder / "slab-0.dat").read_bytes()
    floor = open_one(config_for(tmp_path, cold_start="clear"))
    assert floor.live == {}
    assert floor.pool.num_free == floor.slab.num_slots
    assert (folder / "slab-0.dat").read_bytes() == before  # blobs stay until they are overwritten
    floor.close()
    floor = open_one(config_for(tmp_path))
    assert floor.live == {}
    floor.close()


@pytest.mark.parametrize("content", [bytes(32768), b"\xff" * 32768, b"junk", b""])
def test_a_damaged_index_is_built_anew_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    folder = filled(tmp_path)
    (folder / "index-0.lmdb").write_bytes(content)
    floor = open_one(config_for(tmp_path))
    assert floor.live == {}
    assert len(floor.report.rebuilt) == (1 if content else 0)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (1 if content else 0)
    assert all("index-0.lmdb: the index is damaged" in line for line in lines)
    store(floor, range(3))
    floor.close()
    floor = open_one(config_for(tmp_path))
    assert readable(floor, range(20)) == [0, 1, 2]
    floor.close()


def test_a_missing_index_is_an_empty_one(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    (folder / "index-0.lmdb").unlink()
    floor = open_one(config_for(tmp_path))
    assert floor.live == {}
    floor.close()


@pytest.mark.parametrize("left", [0, 5 * SLOT, 5 * SLOT + PAGE, 5 * SLOT + 100])
def test_a_truncated_slab_loses_what_was_behind_and_grows_again(tmp_path: Path, left: int) -> None:
    folder = filled(tmp_path)
    size = (folder / "slab-0.dat").stat().st_size
    os.truncate(folder / "slab-0.dat", left)
    floor = open_one(config_for(tmp_path))
    assert readable(floor, range(20)) == list(range(left // SLOT))
    assert len(floor.live) == left // SLOT
    assert (folder / "slab-0.dat").stat().st_size == size
    store(floor, range(20, 40))
    assert readable(floor, range(20, 40)) == list(range(20, 40))
    floor.close()


def test_a_foreign_file_in_the_place_of_the_slab(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    (folder / "slab-0.dat").write_bytes(b"some other program's data\n" * 4000)
    floor = open_one(config_for(tmp_path))
    assert readable(floor, range(20)) == []
    for entry in floor.live.values():
        assert read_page(floor.slab, entry.slot, entry.position) in (Verdict.FOREIGN, Verdict.EMPTY)
    floor.close()


def test_entries_without_their_slot_are_dropped_for_good(tmp_path: Path) -> None:
    folder = filled(tmp_path, 3)
    raw_puts(
        folder / "index-0.lmdb",
        (page_hash(70), pack_value(page_hash(70), Entry(10**6, 0, 0))),  # past the end
        (page_hash(71), b"nonsense"),
        (b"short", b"x" * 20),
    )
    floor = open_one(config_for(tmp_path))
    assert (len(floor.live), floor.report.dropped_entries) == (3, 3)
    floor.close()
    floor = open_one(config_for(tmp_path))
    assert (len(floor.live), floor.report.dropped_entries) == (3, 0)
    floor.close()


def test_of_two_entries_for_one_slot_the_header_names_the_owner(tmp_path: Path) -> None:
    folder = filled(tmp_path, 4)
    floor = open_one(config_for(tmp_path))
    slots = {n: floor.live[page_hash(n)].slot for n in range(4)}
    floor.close()
    raw_puts(
        folder / "index-0.lmdb",
        *((page_hash(80 + n), pack_value(page_hash(80 + n), Entry(slots[1], 9, 999))) for n in range(2)),
        (page_hash(90), pack_value(page_hash(90), Entry(50, 9, 999))),  # two that both lie: the slot was never written
        (page_hash(91), pack_value(page_hash(91), Entry(50, 9, 999))),
    )
    floor = open_one(config_for(tmp_path))
    assert sorted(floor.live) == sorted(page_hash(n) for n in range(4))
    assert floor.report.dropped_entries == 4
    assert readable(floor, range(4)) == [0, 1, 2, 3]
    floor.close()


@pytest.mark.parametrize("bit", [5, 8 * 20, 8 * 60, 8 * PAGE + 3, 8 * (PAGE + 3999)])
def test_a_flipped_bit_on_disk_makes_one_page_unreadable(tmp_path: Path, bit: int) -> None:
    folder = filled(tmp_path, 5)
    floor = open_one(config_for(tmp_path))
    slot = floor.live[page_hash(2)].slot
    flip_bit(folder / "slab-0.dat", 8 * slot * SLOT + bit)
    assert readable(floor, range(5)) == [0, 1, 3, 4]
    floor.close()


def test_another_budget_keeps_what_fits_the_newest_first(tmp_path: Path) -> None:
    floor = open_one(config_for(tmp_path, 2048 * KIB))
    num = floor.slab.num_slots - 10
    store(floor, range(num))
    floor.close()
    floor = open_one(config_for(tmp_path, 1024 * KIB))
    kept = readable(floor, range(num))
    assert kept == list(range(num - len(kept), num))
    assert floor.slab.num_slots - 16 <= len(kept) <= floor.slab.num_slots
    floor.close()
    floor = open_one(config_for(tmp_path, 4096 * KIB))
    assert readable(floor, range(num)) == kept
    floor.close()


def test_the_index_moves_with_the_configuration(tmp_path: Path) -> None:
    folder = filled(tmp_path / "kv")
    for index_dir in (tmp_path / "fast", tmp_path / "faster", None):
        config = replace(config_for(tmp_path / "kv"), index_dir=index_dir)
        floor = open_one(config)
        assert len(readable(floor, range(20))) == 20
        assert floor.index.path == (index_dir / NAMESPACE.hex() if index_dir else folder) / "index-0.lmdb"
        floor.close()
        manifest = read_manifest(folder)
        assert manifest is not None
        assert manifest.index_dir == index_dir
    left = [path for path in tmp_path.rglob("index-*") if folder not in path.parents]
    assert left == []


@pytest.mark.parametrize("at_open", [True, False])
def test_without_o_direct_pages_are_kept_too(tmp_path: Path, at_open: bool) -> None:
    for stored in ([], [0, 1, 2]):
        floor = open_one(config_for(tmp_path), io=FaultyDisk(refuse_direct(at_open)))
        assert not floor.slab.direct
        assert readable(floor, range(3)) == stored
        if not stored:
            store(floor, range(3))
        floor.close()


def test_without_preallocation_pages_are_kept_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        floor = open_one(config_for(tmp_path), io=FaultyDisk(fail("preallocate", errno.EOPNOTSUPP)))
        floor.close()
    assert len([r for r in caplog.records if "preallocate" in r.getMessage()]) == 1
    slab = namespace_folder(tmp_path, NAMESPACE) / "slab-0.dat"
    assert slab.stat().st_blocks * 512 >= slab.stat().st_size > 0


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")
def test_on_tmpfs_pages_are_kept_and_it_is_called_memory(tmp_path: Path) -> None:
    folder = Path("/dev/shm") / f"benthic-test-{os.getpid()}"
    try:
        floor = open_one(config_for(folder))
        store(floor, range(5))
        assert "lost at a reboot" in str(floor.report.prepared.plp[0])  # type: ignore[union-attr]
        floor.close()
        with pytest.raises(ConfigError, match="require_plp"):
            open_one(config_for(folder, require_plp=True))
        floor = open_one(config_for(folder))
        assert readable(floor, range(5)) == [0, 1, 2, 3, 4]
        floor.close()
    finally:
        subprocess.run(["rm", "-r", folder], check=False)


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EACCES, errno.ENOSPC])
@pytest.mark.parametrize("name", ["make_folder", "open", "preallocate", "before_commit", "rename", "fsync_folder"])
def test_what_the_filesystem_refuses_is_one_paragraph_with_errno_and_remedy(
    tmp_path: Path, name: str, number: int
) -> None:
    io = FaultyDisk(fail(name, number))
    if name == "before_commit":
        folder = filled(tmp_path)
        os.truncate(folder / "slab-0.dat", SLOT)  # so that there is something to commit at the start
    with pytest.raises(BenthicError) as caught:
        open_one(config_for(tmp_path), io=io)
    text = str(caught.value)
    assert f"errno {number}: {os.strerror(number)}" in text
    assert str(tmp_path) in text
    assert "\n" not in text
    assert "--l3-" in text
    assert isinstance(caught.value, CapacityError if number == errno.ENOSPC else ConfigError)


IMPORTS = """
import sys
from pathlib import Path
from benthic.common.errors import BenthicError
from benthic.config.disk import DiskConfig, DiskSpec
from benthic.tiers.disk.floor import open_floor
from benthic.tiers.disk.format import FrameGeometry
from benthic.tiers.disk.io import SystemDisk
"""
OPEN = """
config = DiskConfig(disks=(DiskSpec(path=Path(sys.argv[1]), budget_bytes=2**20),))
geometry = FrameGeometry(frame_bytes=4096, payload_mask=1, payloads=(("target_kv", 4000),))
try:
    open_floor(config, namespace=bytes.fromhex(sys.argv[2]), words={}, geometry=geometry, rank=0, num_ranks=1,
               io=SystemDisk())
    print("opened")
except BenthicError as error:
    print(error)
"""


def test_an_ordinary_user_opens_a_folder_and_is_refused_one_of_mode_0500() -> None:
    with open_folder() as folder:
        assert run_as_user(IMPORTS, OPEN, folder / "kv", NAMESPACE.hex()).stdout == "opened\n"
        (folder / "kv" / NAMESPACE.hex()).chmod(0o500)
        said = run_as_user(IMPORTS, OPEN, folder / "kv", NAMESPACE.hex())
        assert said.stderr == ""
        assert "errno 13: Permission denied" in said.stdout
        assert "mode 0500" in said.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_a_slab_of_another_user_is_refused() -> None:
    with open_folder() as folder:
        namespace = folder / NAMESPACE.hex()
        namespace.mkdir()
        namespace.chmod(0o777)
        (namespace / "slab-0.dat").touch(mode=0o600)
        said = run_as_user(IMPORTS, OPEN, folder, NAMESPACE.hex())
        assert said.stderr == ""
        assert f"{namespace}/slab-0.dat" in said.stdout
        assert "belongs to root (uid 0)" in said.stdout


def test_the_floor_loads_no_torch() -> None:
    code = "import sys, benthic.tiers.disk.floor, benthic.tiers.disk.survey; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_words_stand_in_the_manifest(tmp_path: Path) -> None:
    folder = filled(tmp_path, 1)
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest.words == WORDS

"""The durable map: what a commit holds, what a failed one does not, and what is made of damaged files."""

import errno
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.tiers.disk.index import (
    Entry,
    IndexDamaged,
    IndexFile,
    SlotIndex,
    inspect_file,
    map_bytes_for,
    pack_value,
    read_entries,
    unpack_value,
)
from benthic.tiers.disk.io import IndexCommit, SystemDisk
from tests.support.disk_floor import flip_bit, page_hash
from tests.support.faulty_disk import FaultyDisk, fail

IO = SystemDisk()


def filled(path: Path, num: int = 500) -> dict[bytes, Entry]:
    entries = {page_hash(n): Entry(n, n % 7, n + 1) for n in range(num)}
    index = SlotIndex.open(path, num, IO)
    index.apply(list(entries.items()), [])
    index.close()
    return entries


def test_entries_outlive_a_restart(tmp_path: Path) -> None:
    entries = filled(tmp_path / "index-0.lmdb")
    index = SlotIndex.open(tmp_path / "index-0.lmdb", 500, IO)
    assert dict(index.load()) == entries
    index.apply([(page_hash(1), Entry(7, 1, 99))], [page_hash(0), page_hash(12345)])
    entries[page_hash(1)] = Entry(7, 1, 99)
    del entries[page_hash(0)]
    assert dict(index.load()) == entries
    index.clear()
    assert list(index.load()) == []
    index.close()
    assert read_entries(tmp_path / "index-0.lmdb", live=False) == []


def test_the_value_is_as_described() -> None:
    value = pack_value(page_hash(3), Entry(slot=0x01020304, position=5, age=2**40))
    assert value[:4] == b"\4\3\2\1"
    assert len(value) == 20
    assert unpack_value(page_hash(3), value) == Entry(0x01020304, 5, 2**40)


@settings(deadline=None)
@given(bit=st.integers(0, 8 * 52 - 1))
def test_a_flipped_bit_in_key_or_value_is_seen(bit: int) -> None:
    whole = bytearray(page_hash(3) + pack_value(page_hash(3), Entry(1, 2, 3)))
    whole[bit // 8] ^= 1 << bit % 8
    assert unpack_value(bytes(whole[:32]), bytes(whole[32:])) is None


def test_other_lengths_are_damage() -> None:
    value = pack_value(page_hash(3), Entry(1, 2, 3))
    assert unpack_value(page_hash(3)[:31], value) is None
    assert unpack_value(page_hash(3), value[:-1]) is None
    assert unpack_value(page_hash(3), pack_value(page_hash(3), Entry(1, 2, 2**63))) is None


def test_the_map_grows_when_it_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = SlotIndex.open(tmp_path / "index-0.lmdb", 4000, IO, map_bytes=32768)
    entries = [(page_hash(n), Entry(n, n, n)) for n in range(2000)]
    index.apply(entries, [])
    assert dict(index.load()) == dict(entries)
    assert index.files[0].map_bytes > 100_000
    assert "the index was full" in caplog.text
    index.close()


def test_the_map_sized_from_the_slots_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    num = 3000
    index = SlotIndex.open(tmp_path / "index-0.lmdb", num, IO)
    rng = random.Random(1)
    live: dict[bytes, Entry] = {}
    for turn in range(60):  # fill it, then turn its content over, as collecting does
        puts = [(rng.randbytes(32), Entry(n, 0, turn)) for n in range(100)]
        gone = list(live)[: max(0, len(live) + 100 - num)]
        index.apply(puts, gone)
        for key in gone:
            del live[key]
        live.update(puts)
    assert dict(index.load()) == live
    assert caplog.text == ""
    assert (tmp_path / "index-0.lmdb").stat().st_size <= map_bytes_for(num)
    index.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_commit_changes_nothing_and_can_be_tried_again(tmp_path: Path, number: int) -> None:
    entries = filled(tmp_path / "index-0.lmdb", 20)
    io = FaultyDisk(fail("before_commit", number))
    index = SlotIndex.open(tmp_path / "index-0.lmdb", 30, io)
    with pytest.raises(OSError, match=rf"\[Errno {number}\]"):
        index.apply([(page_hash(20), Entry(20, 0, 0))], [page_hash(0)])
    assert dict(index.load()) == entries
    io.fault = lambda call: None
    index.apply([(page_hash(20), Entry(20, 0, 0))], [page_hash(0)])
    assert page_hash(0) not in dict(index.load())
    assert dict(index.load())[page_hash(20)] == Entry(20, 0, 0)
    index.close()


def test_a_full_filesystem_is_told_and_room_mends_it(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small filesystem")
    try:
        index = SlotIndex.open(tmp_path / "index-0.lmdb", 10_000, IO)
        index.apply([(page_hash(n), Entry(n, n, n)) for n in range(500)], [])
        (tmp_path / "filler").write_bytes(bytes(IO.free_bytes(tmp_path)))
        with pytest.raises(OSError, match=rf"\[Errno {errno.ENOSPC}\].*No space left on device.*index-0.lmdb"):
            index.apply([(page_hash(n), Entry(n, n, n)) for n in range(500, 1500)], [])
        assert len(dict(index.load())) == 500
        (tmp_path / "filler").unlink()
        index.apply([(page_hash(n), Entry(n, n, n)) for n in range(500, 1500)], [])
        assert len(dict(index.load())) == 1500
        index.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_file_that_cannot_be_written_keeps_its_number(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=rf"\[Errno {errno.ENOENT}\]"):
        IndexFile(tmp_path / "missing" / "index-0.lmdb", 1 << 20, IO)


def test_several_files_count_their_slots_on(tmp_path: Path) -> None:
    files = [IndexFile(tmp_path / f"index-{k}.lmdb", 1 << 20, IO) for k in range(2)]
    index = SlotIndex([(files[0], 10), (files[1], 5)])
    entries = {page_hash(n): Entry(n, n, n) for n in (0, 9, 10, 14)}
    index.apply(list(entries.items()), [])
    assert dict(index.load()) == entries
    assert dict(files[1].load()) == {page_hash(10): Entry(0, 10, 10), page_hash(14): Entry(4, 14, 14)}
    index.apply([(page_hash(9), Entry(11, 9, 50))], [page_hash(10)])  # moves from the first file to the second
    assert dict(files[0].load()).keys() == {page_hash(0)}
    assert dict(files[1].load()).keys() == {page_hash(9), page_hash(14)}
    with pytest.raises(ValueError, match="slot 15 does not exist"):
        index.apply([(page_hash(1), Entry(15, 0, 0))], [])
    index.clear()
    assert list(index.load()) == []
    index.close()


def test_entries_past_the_end_are_left_out(tmp_path: Path) -> None:
    filled(tmp_path / "index-0.lmdb", 20)
    index = SlotIndex.open(tmp_path / "index-0.lmdb", 5, IO)
    assert {entry.slot for _, entry in index.load()} == set(range(5))
    index.close()


def test_a_reader_beside_a_writer_sees_the_last_commit(tmp_path: Path) -> None:
    path = tmp_path / "index-0.lmdb"
    writer = SlotIndex.open(path, 10, IO)
    writer.apply([(page_hash(1), Entry(1, 1, 1))], [])
    code = (
        "import sys; from pathlib import Path; from benthic.tiers.disk.index import read_entries;"
        "print(read_entries(Path(sys.argv[1]), live=True))"
    )  # another process: LMDB opens a file once in each
    seen = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True).stdout
    assert seen.strip() == repr([(page_hash(1), Entry(1, 1, 1))])
    writer.close()


@pytest.mark.parametrize("content", [bytes(8192), b"not an index" * 1000, bytes(100), b"x"])
def test_what_is_no_index_is_damage(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "index-0.lmdb"
    path.write_bytes(content)
    with pytest.raises(IndexDamaged):
        inspect_file(path)
    with pytest.raises(IndexDamaged):
        IndexFile(path, 1 << 20, IO)
    with pytest.raises(IndexDamaged):
        read_entries(path, live=False)


def test_a_cut_index_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "index-0.lmdb"
    filled(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(IndexDamaged):
        inspect_file(path)


@settings(max_examples=60, deadline=None)
@given(bit=st.integers(0, 8 * 60000))
def test_no_flipped_bit_crashes_or_gives_a_wrong_entry(tmp_path_factory: pytest.TempPathFactory, bit: int) -> None:
    path = tmp_path_factory.mktemp("index") / "index-0.lmdb"
    entries = filled(path, 400)
    flip_bit(path, bit % (8 * path.stat().st_size))
    try:
        found = read_entries(path, live=False)
    except IndexDamaged:
        return
    assert all(entry is None or entries[key] == entry for key, entry in found)


def test_a_commit_in_the_trace_says_what_it_stores(tmp_path: Path) -> None:
    heard: list[IndexCommit] = []

    class Hearing(SystemDisk):
        def after_commit(self, commit: IndexCommit) -> None:
            heard.append(commit)

    path = tmp_path / "index-0.lmdb"
    index = SlotIndex.open(path, 5, Hearing())
    index.apply([(page_hash(1), Entry(1, 2, 3))], [page_hash(2)])
    index.apply([], [])
    index.clear()
    assert heard == [
        IndexCommit(path, ((page_hash(1), pack_value(page_hash(1), Entry(1, 2, 3))),), (page_hash(2),)),
        IndexCommit(path, (), (), clear=True),
    ]
    index.close()

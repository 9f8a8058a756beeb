"""Slots in real files: whole transfers, fallbacks that are said once, errors that keep their errno."""

import errno
import logging
from pathlib import Path

import pytest

from benthic.tiers.disk.format import PAGE, Verdict
from benthic.tiers.disk.io import DiskIO, SystemDisk
from benthic.tiers.disk.slab import Slab, SlabFile, aligned_buffer, reserve_file
from tests.support.disk_floor import GEOMETRY, read_page, write_page
from tests.support.faulty_disk import Call, FaultyDisk, error, fail, refuse_direct

SLOT = GEOMETRY.slot_bytes


def make_slab(path: Path, io: DiskIO, *sizes: int) -> Slab:
    files = []
    for number, num_slots in enumerate(sizes):
        reserve_file(path / f"slab-{number}.dat", num_slots * SLOT, io)
        files.append(SlabFile(path / f"slab-{number}.dat", num_slots, GEOMETRY, io))
    return Slab(files)


def test_pages_come_back_and_others_stay(tmp_path: Path) -> None:
    slab = make_slab(tmp_path, SystemDisk(), 5)
    write_page(slab, 4, 44)
    write_page(slab, 0, 40)
    slab.sync()
    assert read_page(slab, 4, 44) is Verdict.OK
    assert read_page(slab, 0, 40) is Verdict.OK
    assert read_page(slab, 3, 43) is Verdict.EMPTY
    slab.close()


def test_several_files_are_one_row_of_slots(tmp_path: Path) -> None:
    slab = make_slab(tmp_path, SystemDisk(), 2, 3)
    for slot in range(5):
        write_page(slab, slot, slot)
    assert [read_page(slab, slot, slot) for slot in range(5)] == [Verdict.OK] * 5
    assert [slab.number_of(slot) for slot in range(5)] == [0, 0, 1, 1, 1]
    assert (tmp_path / "slab-1.dat").read_bytes()[SLOT : SLOT + 4] == b"BSLT"
    for wrong in (-1, 5):
        with pytest.raises(ValueError, match="does not exist"):
            write_page(slab, wrong, 0)
    slab.close()


@pytest.mark.parametrize("step", [1000, PAGE, SLOT - 1])
def test_short_transfers_are_carried_on(tmp_path: Path, step: int) -> None:
    def short(call: Call) -> int | None:
        return min(step, call.num_bytes) if call.name in ("pwritev", "preadv") else None

    io = FaultyDisk(refuse_direct(at_open=True))  # buffered: such short pieces are not aligned
    slab = make_slab(tmp_path, io, 3)
    io.fault = short
    write_page(slab, 1, 11)
    assert read_page(slab, 1, 11) is Verdict.OK
    assert io.calls["pwritev"] >= SLOT // step
    slab.close()


@pytest.mark.parametrize("at_open", [True, False])
def test_without_o_direct_transfers_are_buffered_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at_open: bool
) -> None:
    slab = make_slab(tmp_path, FaultyDisk(refuse_direct(at_open)), 3)
    for slot in range(3):
        write_page(slab, slot, slot)
    assert [read_page(slab, slot, slot) for slot in range(3)] == [Verdict.OK] * 3
    assert not slab.direct
    said = [record.getMessage() for record in caplog.records if "O_DIRECT" in record.getMessage()]
    assert len(said) == 1
    assert str(tmp_path / "slab-0.dat") in said[0]
    assert f"errno {errno.EINVAL}" in said[0]
    slab.close()


def test_o_direct_refused_at_the_first_write_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    io = FaultyDisk(lambda call: error(errno.EINVAL) if call.direct and call.name == "pwritev" else None)
    slab = make_slab(tmp_path, io, 2)
    assert slab.direct
    write_page(slab, 1, 5)
    assert not slab.direct
    assert read_page(slab, 1, 5) is Verdict.OK
    assert len(caplog.records) == 1
    slab.close()


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_without_preallocation_zeros_are_written(tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int) -> None:
    path = tmp_path / "slab-0.dat"
    path.write_bytes(b"x" * 100)
    reserve_file(path, 5 * SLOT, FaultyDisk(fail("preallocate", number)))
    content = path.read_bytes()
    assert content == b"x" * 100 + bytes(5 * SLOT - 100)
    assert path.stat().st_blocks * 512 >= 5 * SLOT
    assert [f"errno {number}" in record.getMessage() for record in caplog.records] == [True]


def test_a_full_disk_is_no_reason_for_a_fallback(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"\[Errno 28\]"):
        reserve_file(tmp_path / "slab-0.dat", 5 * SLOT, FaultyDisk(fail("preallocate", errno.ENOSPC)))


def test_reserving_grows_and_cuts(tmp_path: Path) -> None:
    path = tmp_path / "slab-0.dat"
    heard: list[int] = []
    reserve_file(path, 10 * PAGE, SystemDisk(), heard.append, step=4 * PAGE)
    assert heard == [4 * PAGE, 8 * PAGE, 10 * PAGE]
    assert path.stat().st_blocks * 512 >= 10 * PAGE
    assert path.stat().st_mode & 0o777 == 0o600
    reserve_file(path, 3 * PAGE, SystemDisk())
    assert path.stat().st_size == 3 * PAGE


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("name", ["pwritev", "preadv", "fdatasync"])
def test_errors_of_the_disk_keep_their_number(tmp_path: Path, name: str, number: int) -> None:
    io = FaultyDisk()
    slab = make_slab(tmp_path, io, 2)
    io.fault = fail(name, number)
    with pytest.raises(OSError, match=rf"\[Errno {number}\]"):  # noqa: PT012  which of the three fails is the parameter
        write_page(slab, 0, 1)
        slab.sync()
        read_page(slab, 0, 1)
    assert slab.direct
    slab.close()


def test_a_failed_sync_is_tried_again(tmp_path: Path) -> None:
    io = FaultyDisk()
    slab = make_slab(tmp_path, io, 2)
    write_page(slab, 0, 1)
    io.fault = fail("fdatasync", errno.EIO)
    with pytest.raises(OSError, match=r"\[Errno 5\]"):
        slab.sync()
    io.fault = lambda call: None
    before = io.calls["fdatasync"]
    slab.sync()
    slab.sync()  # nothing left to do
    assert io.calls["fdatasync"] == before + 1
    slab.close()


def test_a_file_that_was_cut_gives_an_error_not_bytes(tmp_path: Path) -> None:
    slab = make_slab(tmp_path, SystemDisk(), 3)
    write_page(slab, 2, 1)
    with (tmp_path / "slab-0.dat").open("r+b") as file:
        file.truncate(2 * SLOT + PAGE)
    with pytest.raises(OSError, match="ends inside slot 2"):
        read_page(slab, 2, 1)
    block = aligned_buffer(PAGE)
    slab.read_header(2, block)
    assert bytes(block[:4]) == b"BSLT"
    slab.close()


def test_nothing_is_logged_where_all_is_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        make_slab(tmp_path, SystemDisk(), 3).close()
    assert [record for record in caplog.records if record.name.startswith("benthic")] == []

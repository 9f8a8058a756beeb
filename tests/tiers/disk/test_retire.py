"""When a disk is taken out of service, and how it comes back."""

import errno
import os

import pytest

from benthic.tiers.disk.retire import ERRORS_IN_A_ROW, TRY_AGAIN_S, Service, errno_name, spoils_slot


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _fail(service: Service, number: int, times: int, now: float = 0.0) -> None:
    for _ in range(times):
        service.note_error(_error(number), now)


def test_single_errors_leave_a_disk_in_service() -> None:
    service = Service("/d/slab-0.dat")
    for _ in range(5):
        _fail(service, errno.EIO, ERRORS_IN_A_ROW - 1)
        service.note_success()
    assert service.reason == ""
    assert service.admits(0.0)


def test_repeated_errors_take_it_out_and_the_reason_names_path_errno_count_and_remedy() -> None:
    service = Service("/d/slab-0.dat")
    _fail(service, errno.EIO, ERRORS_IN_A_ROW)
    assert not service.admits(1e9)
    for part in ("/d/slab-0.dat", "EIO", f"{ERRORS_IN_A_ROW} write errors", "restart"):
        assert part in service.reason


def test_a_success_does_not_bring_a_failing_disk_back() -> None:
    service = Service("/d")
    _fail(service, errno.EIO, ERRORS_IN_A_ROW)
    service.note_success()
    assert service.reason


def test_a_full_disk_is_tried_once_a_period_and_comes_back_with_the_first_success() -> None:
    service = Service("/d")
    _fail(service, errno.ENOSPC, ERRORS_IN_A_ROW, now=100.0)
    assert not service.admits(100.0 + TRY_AGAIN_S - 1)
    assert service.admits(100.0 + TRY_AGAIN_S)
    assert not service.admits(100.0 + TRY_AGAIN_S)  # one at a time
    _fail(service, errno.ENOSPC, 1, now=100.0 + TRY_AGAIN_S)
    assert service.reason
    assert service.admits(100.0 + 2 * TRY_AGAIN_S)
    service.note_success()
    assert service.reason == ""
    assert service.admits(100.0 + 2 * TRY_AGAIN_S)


@pytest.mark.parametrize(("number", "spoils"), [(errno.EIO, True), (errno.ENOSPC, False), (errno.EROFS, False)])
def test_only_an_error_of_the_slot_spoils_the_slot(number: int, spoils: bool) -> None:
    assert spoils_slot(_error(number)) is spoils


def test_an_error_is_named_by_its_symbol() -> None:
    assert errno_name(_error(errno.EROFS)) == f"EROFS ({os.strerror(errno.EROFS)})"
    assert errno_name(OSError("odd")) == "odd"

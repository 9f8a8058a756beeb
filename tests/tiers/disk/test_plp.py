"""What the latency of a small durable write says about a disk, with a clock of our own."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from benthic.common.errors import ConfigError
from benthic.tiers.disk.plp import PlpProbe, filesystem_type, probe_plp, require_plp
from tests.support.faulty_disk import FaultyDisk, fail, refuse_direct


def clock_of(step_s: float) -> Callable[[], float]:
    now = [0.0]

    def clock() -> float:
        now[0] += step_s
        return now[0]

    return clock


def test_latency_decides(tmp_path: Path) -> None:
    fast = probe_plp(tmp_path, FaultyDisk(), clock_of(50e-6))
    slow = probe_plp(tmp_path, FaultyDisk(), clock_of(3e-3))
    assert fast.median_us == pytest.approx(50)
    assert slow.median_us == pytest.approx(3000)
    assert not slow.protected
    assert "no power-loss protection (4 KiB write + fdatasync: 3000 us" in str(slow)
    assert list(tmp_path.iterdir()) == []


def test_a_real_disk_is_measured(tmp_path: Path) -> None:
    io = FaultyDisk()
    assert probe_plp(tmp_path, io).folder == tmp_path
    assert io.calls["fdatasync"] == io.calls["pwritev"] >= 10


@pytest.mark.parametrize("fault", [refuse_direct(True), refuse_direct(False), fail("pwritev", errno.ENOSPC)])
def test_what_cannot_be_measured_is_unknown(tmp_path: Path, fault: Callable[..., OSError | None]) -> None:
    probe = probe_plp(tmp_path, FaultyDisk(fault))
    assert probe.median_us is None
    assert not probe.protected
    assert "errno" in probe.error
    assert list(tmp_path.iterdir()) == []


def test_require_plp_refuses_what_is_not_known_to_be_protected(tmp_path: Path) -> None:
    require_plp(PlpProbe(tmp_path, "xfs", 40.0))
    for probe in (PlpProbe(tmp_path, "xfs", 900.0), PlpProbe(tmp_path, "tmpfs", 2.0), PlpProbe(tmp_path, "", None)):
        with pytest.raises(ConfigError, match=r"require_plp: the disk of .* leave require_plp out"):
            require_plp(probe)
    assert "lost at a reboot" in str(PlpProbe(tmp_path, "tmpfs", 2.0))
    assert "power-loss protected" in str(PlpProbe(tmp_path, "xfs", 40.0))


def test_filesystems_are_known_by_name() -> None:
    assert filesystem_type(Path("/proc")) == "proc"
    assert filesystem_type(Path("/missing")) == ""

"""Servers of 2 and 4 rank processes whose copy threads and disks sleep at random, each rank's at other times.

BENTHIC_PLACEMENT_ASSERT compares the ranks' states after every tick. They never part, every answer is right, and
nothing is held or left at the end; a rank that decides by what it alone has seen is found out at once.
"""

import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.test_floor_soak import assert_flat, measure, settled
from tests.support.floor_process import FloorServer, Prompt, Right, assert_whole, floor_flags
from tests.support.mixed_load import LONG, SHORT, MixedLoad
from tests.support.server_process import lanes_of
from tests.support.tiny_checkpoint import PAGE_TOKENS, SLOT_BYTES

HEADS, TAILS, HEAD_TOKENS, TOKENS = 3, 4, 16 * 5, 16 * 13 + 9
GROWING = 5
L1_PAGES, L2_FRAMES, L3_SLOTS = 48, 64, 100  # in all lanes; the prompts have 111 pages
RELOAD_TIMEOUT_S = 0.2  # some reads sleep longer
GONE_S = 20.0
SOAK_TICKS, SOAK_S = 200_000, 2400  # whichever comes first

Begin = Callable[..., FloorServer]


@pytest.fixture(scope="module")
def prompts(right: Right) -> list[Prompt]:
    """Some share their heads; their short answers are known."""
    found: list[Prompt] = []
    for number in range(HEADS):
        head = right.prompts(1, HEAD_TOKENS, seed=571 + number)[0]
        found += right.prompts(TAILS, TOKENS, seed=671 + number, head=head, max_tokens=SHORT)
    return found


@pytest.fixture(scope="module")
def growing(right: Right) -> list[Prompt]:
    """Short ones, whose long answers are known."""
    return right.prompts(GROWING, PAGE_TOKENS + 5, seed=771, max_tokens=LONG)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The servers' folder for temporary files, with a short name: sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def begin(start: Begin, temporary: Path, tmp_path: Path) -> Begin:
    """Starts a server of so many sleepy ranks, that is ready; `more` is for the engine."""

    def begin(size: int, *flags: str, more: str = "") -> FloorServer:
        env = {"BENTHIC_PLACEMENT_ASSERT": "1", "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
        all_flags = (*chaos_flags(tmp_path / "kv", size), "--cp", str(size), *flags)
        return start(*all_flags, env=env, first=("--sleepy", f"{size} {more}"))

    return begin


def chaos_flags(floor: Path, size: int) -> tuple[str, ...]:
    """Tiers that are too small for the prompts, and an impatient disk."""
    tiers = floor_flags(floor, l1_pages=L1_PAGES // size, l2_frames=L2_FRAMES)
    config = floor.with_name("chaos.toml")
    config.write_text(
        f'disks = [{{path = "{floor}", size = {L3_SLOTS * SLOT_BYTES * 5 // 4 + (1 << 20)}}}]\n'
        f"reload_timeout_s = {RELOAD_TIMEOUT_S}\nqueue_depth = 4\nspill_max_inflight = 8\n"
    )
    return (*tiers[: tiers.index("--l3-dir")], "--l1-free-pages", "1", "--l3-config", str(config))


class Remains:
    """What a server has that must not outlive it: processes, shared memory, temporary files."""

    def __init__(self, temporary: Path) -> None:
        self._temporary = temporary
        self._before = set(Path("/dev/shm").glob("benthic-l2-*"))
        self._family: list[psutil.Process] = []

    def note(self, server: FloorServer) -> None:
        """To be called while it runs."""
        self._family = server.family()

    def assert_gone(self) -> None:
        _, alive = psutil.wait_procs(self._family, timeout=GONE_S)
        assert not alive
        assert not list(self._temporary.glob("benthic-*"))
        segments = set(Path("/dev/shm").glob("benthic-l2-*")) - self._before
        end = time.monotonic() + GONE_S  # another server's is there for a moment while it starts
        while any(path.exists() for path in segments):
            assert time.monotonic() < end, segments
            time.sleep(0.1)


def assert_sound(server: FloorServer) -> None:
    """Quiet, with books that agree; nothing has failed on a disk but what its sleep has failed."""
    disks = server.wait_settled()["tiers"]["l3"]["disks"]
    for disk in disks:
        assert disk["out_of_service"] is None, disk
        assert disk["write_errors"] == 0, disk
        assert not any(disk["read_failures"][kind] for kind in ("io", "checksum", "torn")), disk
    assert "Traceback" not in server.output(), server.output()


def assert_empty_once_flushed(server: FloorServer) -> None:
    """Nobody holds a page, a frame or a slot: a flush leaves none, in no lane."""
    assert server.post("/cache/flush", {"tiers": ["l1", "l2", "l3"]}).json()["kept_pages"] == 0
    state = server.wait_settled()
    for lane in (*lanes_of(state), *state["tiers"]["l2"]["lanes"]):
        assert lane["free"] == lane["total"], state
    assert state["tiers"]["l3"]["used_slots"] == 0, state
    assert state["nodes"] <= 1, state


def run_load(load: MixedLoad, ticks: int, seconds: float) -> None:
    """Nothing goes wrong, and everything happens: requests cut off in every way, preemptions, hits in every tier."""
    try:
        load.run(ticks, seconds)
    except* httpx.HTTPError:
        raise AssertionError(f"a client was left alone:\n{load.server.output()}") from None
    assert not load.wrong, load.wrong[:3]
    assert not load.missing, (load.missing, load)


@pytest.mark.multirank
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("size", "ticks"), [(2, 500), (4, 250)])
def test_ranks_that_sleep_at_random_never_part(
    size: int,
    ticks: int,
    begin: Begin,
    right: Right,
    prompts: list[Prompt],
    growing: list[Prompt],
    temporary: Path,
    tmp_path: Path,
) -> None:
    remains = Remains(temporary)
    server = begin(size)
    remains.note(server)
    run_load(MixedLoad(server, right, prompts, growing, seed=size), ticks, seconds=150)
    assert_sound(server)
    assert_empty_once_flushed(server)
    assert server.stop() == 0, server.output()
    remains.assert_gone()
    assert_whole(tmp_path / "kv")


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(2 * SOAK_S)
@pytest.mark.parametrize(("size", "policy"), [(2, "write_back"), (4, "write_through")])
def test_ranks_that_sleep_for_an_hour_never_part(
    size: int,
    policy: str,
    begin: Begin,
    right: Right,
    prompts: list[Prompt],
    growing: list[Prompt],
    temporary: Path,
    tmp_path: Path,
) -> None:
    remains = Remains(temporary)
    server = begin(size, "--l2-policy", policy)
    remains.note(server)
    load = MixedLoad(server, right, prompts, growing, seed=100 + size)
    run_load(load, SOAK_TICKS // 4, SOAK_S / 4)
    settled(server)
    mark = measure(server)
    run_load(load, SOAK_TICKS * 3 // 4, SOAK_S * 3 / 4)
    assert_sound(server)
    settled(server)
    assert_flat(mark, measure(server))
    assert_empty_once_flushed(server)
    assert server.stop() == 0, server.output()
    remains.assert_gone()
    assert_whole(tmp_path / "kv")


@pytest.mark.multirank
@pytest.mark.timeout(120)
def test_a_rank_that_decides_by_what_it_alone_has_seen_ends_the_server(
    begin: Begin, prompts: list[Prompt], temporary: Path, tmp_path: Path
) -> None:
    """The planted fault. Without the comparison it would show later, where the sizes of an exchange differ."""
    remains = Remains(temporary)
    server = begin(2, more="--alone 1")
    remains.note(server)
    told: list[str] = []

    def client(number: int) -> None:
        try:
            while True:
                response = server.post("/v1/completions", server.body(prompts[number], LONG), timeout_s=60)
                if response.status_code != 200:
                    told.append(response.text)
                    return
        except httpx.HTTPError:
            return  # the port is closed

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    assert server.wait(60) == 1, server.output()
    assert "terminate called" not in server.output()
    for thread in threads:
        thread.join(60)
    parted = r"the ranks have parted in tick \d+: this rank's state is [0-9a-f]{64}"
    assert told, server.output()
    assert all(re.search(parted, text) for text in told), told
    assert re.search(rf"benthic: rank [01]: .*{parted}", server.output().splitlines()[-1]), server.output()
    remains.assert_gone()
    assert_whole(tmp_path / "kv")

"""What lies on the disk is damaged between two runs: the answers stay right, what was wrong is counted and named."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from benthic.tiers.disk.index import pack_value, read_entries
from tests.e2e.conftest import NUM_PROMPTS, PAGES
from tests.support.floor_process import FloorServer, Prompt, Right, assert_whole, floor_flags, verify, whole_pages
from tests.support.tiny_checkpoint import SLOT_BYTES, write_checkpoint

Start = Callable[..., FloorServer]
OTHER_DAMAGE = ("truncated", "gone", "noise")


def files(floor: Path) -> tuple[Path, Path]:
    """The one slab and its index."""
    (slab,) = floor.glob("*/slab-0.dat")
    return slab, slab.with_name("index-0.lmdb")


def slot_at(index: Path, position: int, number: int) -> int:
    """The slot of the `number`-th page, in order of slots, at this position in its prompt."""
    entries = [entry for _, entry in read_entries(index, live=False) if entry is not None]
    return sorted(entry.slot for entry in entries if entry.position == position)[number]


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def ask_all(server: FloorServer, right: Right, known: list[Prompt]) -> list[int]:
    """Every prompt once, answered right; the pages found of each."""
    found = []
    for prompt in known:
        answer = server.ask(prompt)
        assert answer.text == right(prompt)
        found.append(answer.cached // 16)
    return found


def test_flipped_bits_cost_the_pages_from_there_on(start: Start, right: Right, known: list[Prompt], floor: Path):
    """Payload, checksum and magic, each of another prompt; and files that are none of the cache's."""
    slab, index = files(floor)
    flip(slab, slot_at(index, 3, 0) * SLOT_BYTES + 4096 + 5000)
    flip(slab, slot_at(index, 5, 1) * SLOT_BYTES + 50)
    flip(slab, slot_at(index, 7, 2) * SLOT_BYTES + 1)
    (floor / "holiday.jpg").write_bytes(b"\xff\xd8" * 1000)
    (slab.parent / "slab-0.dat.bak").write_bytes(b"x" * 5000)
    (floor / "not-a-namespace").mkdir()
    code, output = verify(floor)
    assert code == 1
    assert output.count("slab-0.dat") >= 3

    server = start(*floor_flags(floor, l3_slots=400))
    found = ask_all(server, right, known)
    assert sorted(found) == sorted([3, 5, 7, *[PAGES] * (NUM_PROMPTS - 3)])
    failures = server.disk()["read_failures"]
    assert sum(failures.values()) >= 3
    assert failures["checksum"] >= 1
    server.wait_settled()  # what was computed again is written again
    assert server.stop() == 0
    assert_whole(floor)
    assert (floor / "holiday.jpg").exists()
    assert (slab.parent / "slab-0.dat.bak").exists()

    again = start(*floor_flags(floor, l3_slots=400))
    assert ask_all(again, right, known) == [PAGES] * NUM_PROMPTS
    assert again.stop() == 0


@pytest.mark.parametrize("damage", ["zeroed", *(pytest.param(d, marks=pytest.mark.slow) for d in OTHER_DAMAGE)])
def test_a_damaged_index_costs_pages_and_nothing_else(
    start: Start, right: Right, known: list[Prompt], floor: Path, damage: str
):
    _, index = files(floor)
    size = index.stat().st_size
    if damage == "zeroed":
        index.write_bytes(bytes(size))
    elif damage == "truncated":
        with index.open("r+b") as file:
            file.truncate(size // 2)
    elif damage == "noise":
        with index.open("r+b") as file:
            file.seek(2 * 4096)
            file.write(bytes(range(256)) * (max(0, size - 2 * 4096) // 256))
    else:
        index.unlink()
    server = start(*floor_flags(floor, l3_slots=400))
    ask_all(server, right, known)
    state = server.wait_settled()
    assert state["tiers"]["l3"]["disks"][0]["out_of_service"] is None
    assert "index" in server.output() or state["hit_tokens"]["l3"]
    assert server.stop() == 0, server.output()
    assert_whole(floor)
    again = start(*floor_flags(floor, l3_slots=400))
    assert ask_all(again, right, known) == [PAGES] * NUM_PROMPTS
    assert again.stop() == 0


def test_an_index_that_lies_serves_no_wrong_page(start: Start, right: Right, known: list[Prompt], floor: Path):
    """Two entries with each other's slots, one beyond the slab's end, two with the same slot."""
    _, index = files(floor)
    stored = [(key, entry) for key, entry in read_entries(index, live=False) if entry is not None]
    (a, at_a), (b, at_b), (c, at_c), (d, _), (_, at_e) = stored[:5]
    with lmdb.open(str(index), subdir=False) as env, env.begin(write=True) as txn:
        for key, entry in ((a, at_b), (b, at_a), (c, replace(at_c, slot=10**6)), (d, at_e)):
            txn.put(key, pack_value(key, entry))
    code, _ = verify(floor)
    assert code == 1
    server = start(*floor_flags(floor, l3_slots=400))
    ask_all(server, right, known)
    server.wait_settled()
    assert server.stop() == 0
    assert_whole(floor)


@pytest.mark.slow
def test_a_truncated_slab_keeps_what_is_left(start: Start, right: Right, known: list[Prompt], floor: Path):
    slab, index = files(floor)
    keep = slot_at(index, PAGES - 1, 2) + 1
    with slab.open("r+b") as file:
        file.truncate(keep * SLOT_BYTES + 100)
    server = start(*floor_flags(floor, l3_slots=400))
    found = ask_all(server, right, known)
    assert 0 < sum(found) < PAGES * NUM_PROMPTS
    server.wait_settled()
    assert slab.stat().st_size > keep * SLOT_BYTES + 100  # it has its full size again
    assert server.stop() == 0
    assert_whole(floor)


@pytest.mark.slow
def test_another_models_pages_are_left_alone(
    start: Start, right: Right, known: list[Prompt], floor: Path, tmp_path: Path
):
    """Weights of the same shape: another namespace, in the same folder, with room for both."""
    other = write_checkpoint(tmp_path / "other", seed=1)
    server = FloorServer(other, *floor_flags(floor, l3_slots=400))
    try:
        server.wait_ready()
        answer = server.ask(known[0])
        assert answer.cached == 0
        assert answer.text != right(known[0])
        assert "another model's" in server.output()
        assert server.stop() == 0
    finally:
        server.kill()
    first = start(*floor_flags(floor, l3_slots=400))
    assert first.ask(known[0]).l3 == whole_pages(known[0])
    assert first.ask(known[0]).text == right(known[0])
    assert first.stop() == 0
    assert_whole(floor)

"""Shared memory for L2: too little is told before anything is loaded, and several slabs are one tier (case G1)."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from benthic.common.units import GIB, format_size
from tests.support.floor_process import FloorServer, Right, benthic, floor_flags, refused, whole_pages
from tests.support.tiny_checkpoint import FRAME_BYTES

SMALL_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"', "sh")


def shm_bytes() -> int:
    stat = os.statvfs("/dev/shm")
    return stat.f_blocks * stat.f_frsize


def assert_told(model: Path, need_bytes: int, have: str, *before: str) -> None:
    """A server and the doctor say the same: need, have and what to do."""
    flags = ("--l2-size", str(need_bytes), "--l2-backing", "shm")
    said = " ".join(refused(model, *flags, before=before).split())
    assert "weights" not in said
    for words in (format_size(need_bytes), have, "/dev/shm", "--l2-size"):
        assert words in said, said
    code, output = benthic("doctor", *flags, "--json", before=before)
    assert code == 1
    (row,) = [row for row in json.loads(output)["rows"] if row["name"] == "host tier"]
    assert row["stops"]
    assert f"{row['found']}; {row['remedy']}" in said


def test_more_than_shared_memory_has_is_refused(tiny: Path):
    assert_told(tiny, 4 * shm_bytes() // GIB * GIB + GIB, "free")


def test_a_small_shared_memory_is_told_with_both_numbers(tiny: Path):
    if subprocess.run([*SMALL_SHM, "true"], check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    assert_told(tiny, GIB, "0.06 GiB free", *SMALL_SHM)


def test_several_slabs_are_one_tier(start: Callable[..., FloorServer], right: Right, tmp_path: Path):
    """A slab holds a quarter of L2; what is found lies in all of them, first in L2, then read there from disk."""
    frames = 240
    env = {"BENTHIC_MAX_SLAB_GIB": str(frames * FRAME_BYTES / 4 / 2**30)}
    flags = floor_flags(tmp_path / "kv", l1_pages=64, l2_frames=frames)
    prompts = right.prompts(5, 16 * 40 + 1, seed=61)
    first = start(*flags, env=env)
    assert "4 slabs" in first.output()
    for prompt in prompts:
        assert first.ask(prompt).text == right(prompt)
    first.wait_settled()
    found = 0
    for prompt in prompts:
        answer = first.ask(prompt)
        assert (answer.text, answer.cached, answer.l3) == (right(prompt), whole_pages(prompt), 0)
        found += answer.l2
    assert found > 120 * 16
    assert first.stop() == 0

    second = start(*flags, env=env)
    for prompt in prompts:
        answer = second.ask(prompt)
        assert (answer.text, answer.l3) == (right(prompt), whole_pages(prompt))
    assert second.stop() == 0

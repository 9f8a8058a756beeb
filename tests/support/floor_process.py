"""A `benthic serve` of the tiny checkpoint with all three tiers, what its clients see, and the right answers."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.support.faulty_engine import Rules
from tests.support.server_process import ROOT, ServerProcess, lanes_of
from tests.support.tiny_checkpoint import FRAME_BYTES, PAGE_TOKENS, SLOT_BYTES

COMMAND = (sys.executable, "-m", "tests.support.floor_server")
MODEL_FLAGS = ("--device", "cpu", "--dtype", "float32", "--page-size", str(PAGE_TOKENS), "--max-running", "16",
               "--chunk-tokens", "256", "--max-context", "3072", "--graph-batch-sizes", "1,2,4,8")  # fmt: skip
MAX_TOKENS = 8
FILLED_SLOTS = 400  # of the floor that several tests start from
LEAST_GAP = 1e-3  # between the two best tokens: far above what float32 rounding moves

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What a client got: its text, and how many tokens of the prompt came from which tier."""

    text: str
    l1: int
    l2: int
    l3: int
    seconds: float

    @property
    def cached(self) -> int:
        return self.l1 + self.l2 + self.l3


def floor_flags(
    floor: Path, *, l1_pages: int = 600, l2_frames: int = 600, l3_slots: int = 2000, extra: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Flags for tiers of these sizes; L3 gets a quarter more for its index."""
    l3_bytes = l3_slots * SLOT_BYTES * 5 // 4 + (1 << 20)
    return ("--l1-pages", str(l1_pages), "--l2-size", str(l2_frames * FRAME_BYTES), "--l3-dir", str(floor),
            "--l3-size", str(l3_bytes), *extra)  # fmt: skip


def config_flags(floor: Path, timeout_s: float) -> tuple[str, ...]:
    """As `floor_flags` for the filled floor, with another base for the deadlines."""
    flags = floor_flags(floor, l3_slots=FILLED_SLOTS)
    at = flags.index("--l3-dir")
    file = floor.with_name("floor.toml")
    file.write_text(
        f'disks = [{{path = "{floor}", size = {flags[at + 3]}}}]\nreload_timeout_s = {timeout_s}\nqueue_depth = 4\n'
    )
    return (*flags[:at], "--l3-config", str(file))


class FloorServer(ServerProcess):
    """A server of the checkpoint in `model`; with `rules` over a disk whose faults the test sets."""

    def __init__(
        self,
        model: Path,
        *flags: str,
        rules: Rules | None = None,
        env: dict[str, str] | None = None,
        port: int = 0,
        first: tuple[str, ...] = (),
    ) -> None:
        """`first`: arguments for `floor_server` itself."""
        between = first if rules is None else ("--rules", str(rules.path))
        super().__init__(*between, str(model), *MODEL_FLAGS, *flags, command=COMMAND, env=env, port=port)
        self.model_name = str(model)

    def ask(self, prompt: Prompt, max_tokens: int = MAX_TOKENS, **fields: Any) -> Answer:
        """A greedy completion, which must succeed."""
        started = time.monotonic()
        response = self.post("/v1/completions", self.body(prompt, max_tokens) | fields)
        assert response.status_code == 200, response.text
        return read_answer(response.json(), time.monotonic() - started)

    def body(self, prompt: Prompt, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
        """A completion's request."""
        return {"model": self.model_name, "prompt": list(prompt), "temperature": 0, "max_tokens": max_tokens,
                "ignore_eos": True}  # fmt: skip

    def l3(self) -> dict[str, Any]:
        """What /cache shows of L3."""
        found: dict[str, Any] = self.get("/cache")["tiers"]["l3"]
        return found

    def disk(self) -> dict[str, Any]:
        """What /cache shows of the one disk."""
        found: dict[str, Any] = self.l3()["disks"][0]
        return found

    def wait_settled(self, timeout_s: float = 60) -> dict[str, Any]:
        """/cache once nothing runs, is in flight or waits to be spilled, in every tier; the books must then agree."""
        state = self.wait_for(is_settled, timeout_s)
        for lane in (*lanes_of(state), *state["tiers"]["l2"]["lanes"]):
            assert lane["free"] + lane["cached"] == lane["total"], state
            assert lane["private"] == lane["locked"] == 0, state
        assert all(disk["staging_used"] == disk["write_queue"] == 0 for disk in state["tiers"]["l3"]["disks"]), state
        return state

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = 60) -> dict[str, Any]:
        """/cache as soon as the condition holds for it."""
        end = time.monotonic() + timeout_s
        while not condition(state := self.get("/cache")):
            assert time.monotonic() < end, f"never came true in {timeout_s} s: {state}\n{self.output()}"
            time.sleep(0.03)
        return state


def is_settled(state: dict[str, Any]) -> bool:
    """Whether nothing is going on: for `wait_for`."""
    l3 = state["tiers"]["l3"]
    pending = 0 if l3["spill_suspended"] else l3["spill_pending_pages"]  # what is suspended may wait for an hour
    busy = (*state["requests"].values(), *state["in_flight"].values(), pending)
    staged = sum(disk["staging_used"] + disk["write_queue"] for disk in l3["disks"])
    return not any(busy) and not staged and not state["tiers"]["l2"]["quarantined_frames"]


def is_reading(state: dict[str, Any]) -> bool:
    """Whether a request is held for a reload: for `wait_for`."""
    return bool(state["requests"]["held"] and state["in_flight"].get("reload"))


def read_answer(body: dict[str, Any], seconds: float = 0.0) -> Answer:
    """An `Answer` from a completion's response."""
    by_tier = body["usage"]["cached_tokens_by_tier"]
    return Answer(body["choices"][0]["text"], by_tier["l1"], by_tier["l2"], by_tier["l3"], seconds)


def whole_pages(prompt: Prompt) -> int:
    """Tokens of the prompt that the cache can have: all whole pages but one that would end with the prompt."""
    return (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS


class Right:
    """The right answers: a fresh server's with only L1, computed when they are first asked for."""

    def __init__(self, model: Path) -> None:
        self.server = FloorServer(model, "--l1-pages", "2000")
        self._known: dict[tuple[Prompt, int], tuple[str, float]] = {}

    def __call__(self, prompt: Prompt, max_tokens: int = MAX_TOKENS) -> str:
        return self._look(prompt, max_tokens)[0]

    def prompts(
        self, count: int, length: int, seed: int, head: Prompt = (), max_tokens: int = MAX_TOKENS
    ) -> list[Prompt]:
        """Random prompts, `head` included in their `length`, whose answers do not hang on a rounding."""
        dice = np.random.default_rng(seed)
        found: list[Prompt] = []
        while len(found) < count:
            prompt = (*head, *dice.integers(0, 256, length - len(head)).tolist())
            if self._look(prompt, max_tokens)[1] > LEAST_GAP:
                found.append(prompt)
        return found

    def _look(self, prompt: Prompt, max_tokens: int) -> tuple[str, float]:
        key = (prompt, max_tokens)
        if key not in self._known:
            body = self.server.body(prompt, max_tokens) | {"logprobs": 2}
            response = self.server.post("/v1/completions", body)
            assert response.status_code == 200, response.text
            choice = response.json()["choices"][0]
            best = [sorted(tops.values(), reverse=True) for tops in choice["logprobs"]["top_logprobs"]]
            self._known[key] = choice["text"], min(first - second for first, second in best)
        return self._known[key]


def benthic(*arguments: str, before: Sequence[str] = ()) -> tuple[int, str]:
    """Exit code and output of a command of ours; `before` is one that runs it."""
    command = [*before, sys.executable, "-m", "benthic", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def verify(floor: Path) -> tuple[int, str]:
    """Exit code and output of `benthic cache verify`."""
    return benthic("cache", "verify", str(floor))


def assert_whole(floor: Path) -> None:
    """Every page on the floor is what the index says, as far as `benthic cache verify` can tell."""
    code, output = verify(floor)
    assert code == 0, output


def kill_all(server: ServerProcess) -> None:
    """kill -9 of the server process; its engine ends with it."""
    family = server.family()
    server.process.kill()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive


def refused(model: Path, *flags: str, before: Sequence[str] = ()) -> str:
    """The output of a start that must be refused, in one paragraph; `before` is a command that runs it."""
    done = subprocess.run(
        [*before, *COMMAND, str(model), *MODEL_FLAGS, *flags, "--port", "0"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode not in (0, -signal.SIGKILL), output
    assert "Traceback" not in output, output
    assert "\n\n" not in output.strip(), output
    return output

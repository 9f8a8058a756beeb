"""Engines of 2 and 4 ranks answer as one does: every length, batch, tier and state. Ranks are threads here.

`tests/e2e/test_ranks_*.py` has them as processes of a server.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benthic.common.errors import ConfigError
from benthic.kvcache import page_hashes, root_hash
from benthic.messages import (
    Abort,
    Finished,
    FlushCache,
    FlushDone,
    HiddenStates,
    Logprobs,
    Outputs,
    SamplingParams,
    Submit,
)
from tests.support.rank_engines import RankEngines
from tests.support.real_engine import RealEngine
from tests.support.tiny_checkpoint import write_checkpoint
from tests.support.tiny_dsa import write_dsa_checkpoint

PAGE = 16
ENOUGH: dict[str, Any] = {"l1_pages": 120, "max_context": 512, "max_running": 8, "chunk_tokens": 64}
KINDS = ("llama", "dsa")
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"cp": 2}),
    ("llama", {"cp": 4}),
    ("llama", {"tp": 2}),
    ("dsa", {"cp": 2}),
    ("dsa", {"cp": 4, "ep": True}),
)
by_way = pytest.mark.parametrize(
    ("kind", "way"), WAYS, ids=lambda value: value if isinstance(value, str) else str(value)
)


def prompt_of(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 250, length)]


def edge_lengths(size: int) -> list[int]:
    """Where splits, pages and rounding have their bounds."""
    whole = 2 * size * PAGE
    return [1, PAGE - 1, PAGE, PAGE + 1, whole - 1, whole, whole + 1, 3 * whole // 2 + 5]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "llama": write_checkpoint(tmp_path_factory.mktemp("llama")),
        "dsa": write_dsa_checkpoint(tmp_path_factory.mktemp("dsa")),
    }


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> Iterator[dict[str, RealEngine]]:
    """One rank, without a tier below L1 and with room for everything."""
    engines = {kind: RealEngine(folders[kind], **ENOUGH) for kind in KINDS}
    yield engines
    for engine in engines.values():
        assert engine.engine.close()


def answers(engine: RealEngine, prompts: list[list[int]]) -> list[list[int]]:
    return [told.tokens for told in engine.ask(prompts)]


class Streams:
    """Requests with parameters of their own, told apart by id, and all that comes back."""

    def __init__(self, engine: RealEngine, first: int = 1000) -> None:
        self._engine = engine
        self._next = first
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Logprobs]] = {}
        self.prompt_logprobs: dict[int, list[Logprobs]] = {}
        self.hidden: dict[int, list[np.ndarray]] = {}
        self.finished: dict[int, Finished] = {}

    def submit(self, prompt: list[int], **params: Any) -> Submit:
        data = np.array(prompt, np.int32).tobytes()
        root = root_hash(self._engine.ready.namespace, None)
        hashes = b"".join(page_hashes(root, data, PAGE))
        self._next += 1
        given = SamplingParams(**{"max_tokens": 6, "temperature": 0.0, **params})
        return Submit(id=self._next, prompt=data, root=root, hashes=hashes, params=given)

    def tick(self, *messages: Any) -> None:
        for reply in self._engine.engine.tick(messages):
            if isinstance(reply, Outputs):
                self._take(reply)

    def run(self, *messages: Any) -> None:
        self.tick(*messages)
        while not self._engine.engine.idle:
            self.tick()

    def _take(self, reply: Outputs) -> None:
        tokens = np.frombuffer(reply.tokens, np.int32).tolist()
        for request, token in zip(np.frombuffer(reply.ids, np.int64).tolist(), tokens, strict=True):
            self.tokens.setdefault(request, []).append(token)
        for told in reply.logprobs:
            where = self.prompt_logprobs if told.is_prompt else self.logprobs
            where.setdefault(told.id, []).extend(told.positions)
        for rows in reply.hidden:
            assert isinstance(rows, HiddenStates)
            self.hidden.setdefault(rows.id, []).append(np.frombuffer(rows.rows, np.float32))
        self.finished.update((done.id, done) for done in reply.finished)


def assert_same_everywhere(engines: RankEngines) -> None:
    """Idle: the ranks are alike, and nobody holds anything but the tree."""
    engines.settle()
    digests = {engine.scheduler.core.digest() for engine in engines.engines}
    assert len(digests) == 1
    for engine in engines.engines:
        core = engine.scheduler.core
        core.check()
        assert all(lane.private == 0 and lane.locked == 0 for lane in [*core.lanes(), *core.l2_lanes()])
        assert engine.scheduler.rows.num_used == 0


@by_way
def test_every_length_and_batch_gives_one_ranks_answer(
    kind: str, way: dict[str, Any], folders: dict[str, Path], alone: dict[str, RealEngine], monkeypatch: Any
) -> None:
    monkeypatch.setenv("BENTHIC_PLACEMENT_ASSERT", "1")
    size = next(iter(way.values()))
    prompts = [prompt_of(length, seed) for seed, length in enumerate(edge_lengths(size))]
    longest = prompt_of(480, 99)
    with RankEngines(folders[kind], **ENOUGH, **way) as engine:
        for prompt in prompts:
            assert answers(engine, [prompt]) == answers(alone[kind], [prompt])
        fresh = [prompt_of(length, 100 + length) for length in edge_lengths(size)]
        assert answers(engine, fresh) == answers(alone[kind], fresh)
        # one token beside a prompt of many chunks, and whole-prompt hits that leave one token to compute
        assert answers(engine, [longest, [7]]) == answers(alone[kind], [longest, [7]])
        told = engine.ask([prompts[2] + prompts[2], prompts[2] + prompts[2], longest])
        assert [t.tokens for t in told] == answers(alone[kind], [prompts[2] + prompts[2]] * 2 + [longest])
        assert told[2].cached == (480 - PAGE, 0, 0)
        assert_same_everywhere(engine)


def test_a_prompt_of_8k_beside_one_token(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "long", context=9000)
    sizes: dict[str, Any] = {"l1_pages": 600, "max_context": 9000, "max_running": 4, "chunk_tokens": 2048}
    prompts = [prompt_of(8192, 1), [5], prompt_of(2 * 4 * PAGE + 1, 2)]
    with RealEngine(folder, **sizes) as one:
        right = answers(one, prompts)
    with RankEngines(folder, **{**sizes, "l1_pages": 160}, cp=4) as engine:  # a quarter of it a rank
        assert answers(engine, prompts) == right
        assert answers(engine, prompts) == right  # from the cache
        assert_same_everywhere(engine)


@by_way
def test_log_probabilities_samples_and_hidden_states_are_one_ranks(
    kind: str, way: dict[str, Any], folders: dict[str, Path], alone: dict[str, RealEngine]
) -> None:
    prompts = [prompt_of(length, 40 + length) for length in (1, 3, 70, 133)]

    def run(engine: RealEngine) -> tuple[list[Any], ...]:
        streams = Streams(engine)
        submits = [
            streams.submit(prompts[0], logprobs=3),
            streams.submit(prompts[1], temperature=1.0, seed=5, top_p=0.9, presence_penalty=0.5),
            streams.submit(prompts[2], logprobs=2, prompt_logprobs=2, max_tokens=4),
            streams.submit(prompts[3], return_hidden_states=True, logit_bias={9: 4.0}, min_tokens=4),
        ]
        streams.run(*submits)
        ids = [submit.id for submit in submits]
        scores = [p.logprob for i in ids for p in streams.logprobs.get(i, [])]
        prompt_scores = [p.logprob for p in streams.prompt_logprobs[ids[2]]]
        hidden = np.concatenate(streams.hidden[ids[3]])
        return [streams.tokens[i] for i in ids], scores, prompt_scores, hidden.tolist()

    right = run(alone[kind])
    assert len(right[2]) == 69
    with RankEngines(folders[kind], **ENOUGH, **way) as engine:
        found = run(engine)
        assert found[0] == right[0]
        for got, expected in zip(found[1:], right[1:], strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)
        assert_same_everywhere(engine)


@by_way
def test_hits_from_l1_l2_and_l3_and_after_a_restart(
    kind: str, way: dict[str, Any], folders: dict[str, Path], alone: dict[str, RealEngine], tmp_path: Path
) -> None:
    prompts = [prompt_of(length, 70 + length) for length in (5 * PAGE + 3, 20 * PAGE + 7, PAGE, 8 * PAGE)]
    right = [answers(alone[kind], [prompt])[0] for prompt in prompts]
    whole = [(len(prompt) - 1) // PAGE * PAGE for prompt in prompts]
    options = {**ENOUGH, **way, "l2_size": "16MiB", "l3_dir": str(tmp_path), "l3_size": "64MiB"}

    def ask(engine: RealEngine, tier: int | None) -> None:
        for prompt, expected, pages in zip(prompts, right, whole, strict=True):
            told = engine.ask([prompt])[0]
            assert told.tokens == expected
            assert told.cached == tuple(pages if i == tier else 0 for i in range(3)), (len(prompt), tier)

    with RankEngines(folders[kind], **options) as engine:
        ask(engine, None)
        ask(engine, 0)
        engine.flush("l1")
        ask(engine, 1)
        engine.flush("l1", "l2")
        ask(engine, 2)
        assert_same_everywhere(engine)
    with RankEngines(folders[kind], **options) as engine:
        ask(engine, 2)
        assert_same_everywhere(engine)


@pytest.mark.parametrize("way", [{"cp": 2}, {"tp": 2}], ids=str)
def test_a_flush_of_the_floor_counts_each_page_once(
    way: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    options = {**ENOUGH, **way, "l2_size": "16MiB", "l3_dir": str(tmp_path), "l3_size": "64MiB"}
    with RankEngines(folders["llama"], **options) as engine:
        # with tensor parallelism each rank has a floor of its own, which is no other model's
        assert not [row for row in engine.ready.table if "another model" in row.name]
        engine.ask([prompt_of(5 * PAGE + 3, 12)])
        done: list[FlushDone] = []
        messages = [FlushCache(3, ("l1", "l2", "l3"))]
        while not done:
            done = [reply for reply in engine.engine.tick(messages) if isinstance(reply, FlushDone)]
            messages = []
        assert done[0].dropped == {"l1": 5, "l2": 5, "l3": 5}
        assert done[0].kept == {"l1": 0, "l2": 0, "l3": 0}
        assert done[0].message == ""
        assert_same_everywhere(engine)


@by_way
def test_aborts_in_every_state_and_preemption_leave_the_ranks_alike(
    kind: str, way: dict[str, Any], folders: dict[str, Path], alone: dict[str, RealEngine], tmp_path: Path
) -> None:
    """L1 holds fewer pages than the requests want, so that some wait, some are preempted and some read lower tiers."""
    size = way.get("cp", 1)
    tight = {**ENOUGH, "l1_pages": 48 // size, "l1_free_pages": 1, "max_context": 400, **way}
    options = {**tight, "l2_size": "16MiB", "l3_dir": str(tmp_path), "l3_size": "64MiB"}
    prompts = [prompt_of(length, 80 + length) for length in (150, 171, 192, 213, 40, 1)]
    wanted = {"max_tokens": 80}
    reference = Streams(alone[kind], 5000)
    submits = [reference.submit(prompt, **wanted) for prompt in prompts]
    for submit in submits:
        reference.run(submit)
    right = [reference.tokens[submit.id] for submit in submits]
    with RankEngines(folders[kind], **options) as engine:
        streams = Streams(engine)
        for after in (0, 1, 3, 8):
            doomed = [streams.submit(prompt, **wanted) for prompt in prompts]
            streams.tick(*doomed)
            for _ in range(after):
                streams.tick()
            gone = {submit.id for submit in doomed} - streams.finished.keys()
            streams.run(Abort(tuple(submit.id for submit in doomed)))
            assert all(streams.finished[request].reason == "abort" for request in gone)
            assert_same_everywhere(engine)
            if after % 2:
                engine.flush("l1")
            if after == 3:
                engine.flush("l1", "l2")
        kept = [streams.submit(prompt, **wanted) for prompt in prompts]
        streams.run(*kept)
        assert [streams.tokens[submit.id] for submit in kept] == right
        assert engine.engine.scheduler.totals.preemptions > 0
        assert_same_everywhere(engine)


def test_capacity_grows_with_the_ranks(folders: dict[str, Path]) -> None:
    """The same pages a rank hold 2 and 4 times as many tokens."""
    prompts = [prompt_of(4 * PAGE * 4, 200 + i) for i in range(8)]
    found = []
    for size in (1, 2, 4):
        make = RealEngine if size == 1 else RankEngines
        options = {**ENOUGH, "l1_pages": 34, "l1_free_pages": 1, **({} if size == 1 else {"cp": size})}
        with make(folders["llama"], **options) as engine:
            for prompt in prompts:
                engine.ask([prompt], max_tokens=1)
            cached = sum(lane.cached for lane in engine.engine.scheduler.core.lanes())
            found.append(cached)
            assert engine.ready.max_request_tokens == min(512, 34 * PAGE * size)
    assert found[1] >= 1.8 * found[0]
    assert found[2] >= 3.5 * found[0]


def test_sizes_that_do_not_divide_stop_the_start_with_both_numbers(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"--tp 4: .* 2 kv heads"):
        RankEngines(folders["llama"], **ENOUGH, tp=4)
    with pytest.raises(ConfigError, match=r"take --cp 2"):
        RankEngines(folders["dsa"], **ENOUGH, tp=2)
    with pytest.raises(ConfigError, match="experts"):
        RankEngines(folders["llama"], **ENOUGH, cp=2, ep=True)

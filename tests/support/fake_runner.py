"""A runner without a model: its KV pool holds the token ids, and the next token is a function of the whole context
as read back through the page table. A wrong page, a page written twice or read too early gives a wrong token.
"""

import random
from collections import deque
from collections.abc import Callable

import numpy as np

from benthic.forward import Int32, LayerHooks, LogprobRows, StepInput, StepOutput
from benthic.runner.interface import RunnerInfo

VOCAB = 97
POISON = -7
EOS = 96


def next_token(context: list[int] | Int32) -> int:
    """What the fake model says after `context`; depends on every token and its place."""
    c = np.asarray(context, np.int64)
    return int((c * (np.arange(len(c)) % 13 + 1)).sum() * 31 + len(c) * 7) % VOCAB


def greedy(prompt: list[int], max_tokens: int, stop: tuple[int, ...] = ()) -> list[int]:
    """The answer that one request alone must get."""
    context = list(prompt)
    out: list[int] = []
    while len(out) < max_tokens:
        out.append(next_token(context))
        context.append(out[-1])
        if out[-1] in stop:
            break
    return out


def scores(tokens: Int32, top: int) -> LogprobRows:
    """Minus the token, for each of the `top` most likely tokens too."""
    return LogprobRows(
        chosen=-tokens.astype(np.float32),
        top_ids=np.repeat(tokens[:, None], top, 1),
        top=np.repeat(-tokens[:, None], top, 1).astype(np.float32),
    )


def hidden_states(tokens: Int32) -> np.ndarray:
    """float32 [n, 4]: the token that each state led to."""
    return np.repeat(tokens[:, None], 4, 1).astype(np.float32)


class Launch:
    """One step on the device, which every rank has to launch before it can run."""

    def __init__(self, step: StepInput) -> None:
        self.step = step
        self.hooks: list[LayerHooks | None] = []  # of the ranks that have launched it
        self.output: StepOutput | None = None
        self.behind: list[Callable[[], None]] = []  # what the stream does right behind it


class FakeDevice:
    """The KV pools of all ranks, one lane each, and one stream that their steps run on.

    Without `deferred` a step runs when it is launched, otherwise when somebody lets it.
    """

    def __init__(
        self, num_pages: int, page_size: int, max_running: int, *, num_ranks: int = 1, deferred: bool = False
    ) -> None:
        self.kv = np.full((num_ranks, num_pages * page_size), POISON, np.int64)
        self.page_size = page_size
        self.num_ranks = num_ranks
        self.deferred = deferred
        self.last_tokens = np.full(max_running, POISON, np.int64)
        self.computed_tokens = 0
        self.stream: deque[Launch] = deque()  # launched, not run
        self._steps: dict[int, Launch] = {}  # by tick, until every rank has launched it

    def launch(self, step: StepInput, hooks: LayerHooks | None) -> Launch:
        """The step of one rank's tick; the ranks' steps must be equal."""
        launch = self._steps.get(step.tick)
        if launch is None:
            launch = self._steps[step.tick] = Launch(step)
            self.stream.append(launch)
        first = launch.step
        assert np.array_equal(first.token_ids, step.token_ids)
        assert np.array_equal(first.positions, step.positions)
        assert np.array_equal(first.page_table, step.page_table)
        assert np.array_equal(first.sample_slots, step.sample_slots)
        launch.hooks.append(hooks)
        if len(launch.hooks) == self.num_ranks:
            del self._steps[step.tick]
            if not self.deferred:
                self.run_until(launch)
        return launch

    def behind(self, launch: Launch | None, action: Callable[[], None]) -> None:
        """In the stream's order behind this step; None: no step was launched."""
        if launch is None or launch.output is not None:
            action()
        else:
            launch.behind.append(action)

    def run_until(self, launch: Launch) -> None:
        """Run the stream's steps up to this one."""
        while launch.output is None:
            self.run_next()

    def run_next(self) -> None:
        """Run the oldest step that has not run."""
        launch = self.stream.popleft()
        assert len(launch.hooks) == self.num_ranks, "a step runs that a rank has not launched"
        hooks = [h for h in launch.hooks if h is not None]
        failed = True
        try:
            for h in hooks:
                h.begin()
            for h in hooks:
                h.before_all()
            launch.output = self._compute(launch.step)
            for h in hooks:
                h.after_all()
            for action in launch.behind:
                action()
            failed = False
        finally:
            for h in hooks:
                h.end(failed)

    def _compute(self, step: StepInput) -> StepOutput:
        self.computed_tokens += step.num_tokens
        ids = step.token_ids.astype(np.int64)
        ids[: step.num_decode] = self.last_tokens[step.state_slots[: step.num_decode]]
        lanes = step.positions // self.page_size % self.num_ranks
        places = lanes * self.kv.shape[1] + step.kv_slots
        assert len(set(places.tolist())) == len(places), "two tokens write one place"
        self.kv.reshape(-1)[places] = ids
        firsts = np.concatenate([np.arange(step.num_decode), step.num_decode + np.cumsum(step.query_lens)])
        sampled = set(step.sample_rows.tolist())
        for i, last in enumerate(firsts[step.num_decode :] - 1):
            if int(last) not in sampled:
                assert step.seq_lens[step.num_decode + i] % self.page_size == 0, "a chunk ends inside a page"
        row_of = {int(r): i for i, r in enumerate(firsts[: step.num_decode])}
        for i, last in enumerate(firsts[step.num_decode :] - 1):
            row_of[int(last)] = step.num_decode + i
        tokens = np.zeros(len(step.sample_rows), np.int32)
        for i, token_row in enumerate(step.sample_rows.tolist()):
            context = self.context(step, row_of[token_row])
            assert len(context) == step.positions[token_row] + 1
            assert step.sampling.position[i] == len(context)
            tokens[i] = next_token(context)
        self.last_tokens[step.sample_slots] = tokens
        return StepOutput(
            tokens=tokens,
            logprobs=None if step.sampling.logprobs is None else scores(tokens, int(step.sampling.logprobs.max())),
            prompt_logprobs=tuple(self.prompt_scores(step, ids, *wanted) for wanted in step.prompt_logprobs),
            hidden=None if step.sampling.hidden is None else hidden_states(tokens[step.sampling.hidden]),
        )

    def context(self, step: StepInput, row: int) -> Int32:
        """The row's tokens as its pages hold them."""
        positions = np.arange(step.seq_lens[row])
        pages = step.page_table[row, positions // self.page_size].astype(np.int64)
        lanes = positions // self.page_size % self.num_ranks
        found: Int32 = self.kv[lanes, pages * self.page_size + positions % self.page_size]
        return found

    def prompt_scores(
        self, step: StepInput, ids: np.ndarray, first: int, count: int, top: int, tokens: Int32
    ) -> LogprobRows:
        """Minus the position of each token that is scored; the rows must be the tokens' predecessors."""
        assert len(tokens) == count
        assert ids[first + 1 : first + count].tolist() == tokens[: count - 1].tolist()
        at = step.positions[first : first + count] + 1
        return LogprobRows(
            chosen=-at.astype(np.float32),
            top_ids=np.repeat(tokens[:, None], top, 1).astype(np.int32),
            top=np.repeat(-at[:, None], top, 1).astype(np.float32),
        )


class FakePending:
    """Done when the test's dice say so, or when it is waited for."""

    def __init__(self, launch: Launch, runner: "FakeRunner") -> None:
        self._launch, self._runner = launch, runner

    def done(self) -> bool:
        return self._runner.queue[0] is self and self._runner.dice.random() < 0.5

    def result(self) -> StepOutput:
        assert self._runner.queue.popleft() is self, "steps must be collected in order"
        self._runner.device.run_until(self._launch)
        assert self._launch.output is not None
        return self._launch.output


class FakeRunner:
    """Puts each step on the device (submission order is the stream's order) and hides the result for a while."""

    def __init__(
        self, num_pages: int, page_size: int, max_running: int, seed: int = 0, device: FakeDevice | None = None
    ) -> None:
        self.info = RunnerInfo(
            vocab_size=VOCAB, hidden_size=4, max_position=1 << 20, eos_token_ids=(EOS,), namespace=bytes(32)
        )
        self.device = device or FakeDevice(num_pages, page_size, max_running)
        self.steps: list[StepInput] = []
        self.queue: deque[FakePending] = deque()
        self.last_launch: Launch | None = None
        self.dice = random.Random(seed)

    @property
    def computed_tokens(self) -> int:
        """Tokens that the device has computed so far."""
        return self.device.computed_tokens

    def submit(self, step: StepInput, hooks: LayerHooks | None = None) -> FakePending:
        assert len(self.queue) < 2, "at most two steps may be outstanding"
        self.steps.append(step)
        self.last_launch = self.device.launch(step, hooks)
        pending = FakePending(self.last_launch, self)
        self.queue.append(pending)
        return pending

    def close(self) -> None:
        assert not self.queue

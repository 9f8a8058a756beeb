"""A runner without a model: its KV pool holds the token ids, and the next token is a function of the whole context
as read back through the page table. A wrong page, a page written twice or read too early gives a wrong token.
"""

import random
from collections import deque

import numpy as np

from benthic.forward import Int32, LogprobRows, StepInput, StepOutput
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


class FakePending:
    """Done when the test's dice say so, or when it is waited for."""

    def __init__(self, output: StepOutput, queue: deque["FakePending"], dice: random.Random) -> None:
        self._output, self._queue, self._dice = output, queue, dice

    def done(self) -> bool:
        return self._queue[0] is self and self._dice.random() < 0.5

    def result(self) -> StepOutput:
        assert self._queue.popleft() is self, "steps must be collected in order"
        return self._output


class FakeRunner:
    """Executes each step at once (submission order is the stream's order) and hides the result for a while."""

    def __init__(self, num_pages: int, page_size: int, max_running: int, seed: int = 0) -> None:
        self.info = RunnerInfo(
            vocab_size=VOCAB, hidden_size=4, max_position=1 << 20, eos_token_ids=(EOS,), namespace=bytes(32)
        )
        self.kv = np.full(num_pages * page_size, POISON, np.int64)
        self.page_size = page_size
        self.last_tokens = np.full(max_running, POISON, np.int64)
        self.steps: list[StepInput] = []
        self.computed_tokens = 0
        self._queue: deque[FakePending] = deque()
        self._dice = random.Random(seed)

    def submit(self, step: StepInput) -> FakePending:
        assert len(self._queue) < 2, "at most two steps may be outstanding"
        self.steps.append(step)
        self.computed_tokens += step.num_tokens
        ids = step.token_ids.astype(np.int64)
        ids[: step.num_decode] = self.last_tokens[step.state_slots[: step.num_decode]]
        assert len(set(step.kv_slots.tolist())) == len(step.kv_slots), "two tokens write one place"
        self.kv[step.kv_slots] = ids
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
        output = StepOutput(
            tokens=tokens,
            logprobs=None if step.sampling.logprobs is None else scores(tokens, int(step.sampling.logprobs.max())),
            prompt_logprobs=tuple(self.prompt_scores(step, ids, *wanted) for wanted in step.prompt_logprobs),
            hidden=None if step.sampling.hidden is None else hidden_states(tokens[step.sampling.hidden]),
        )
        pending = FakePending(output, self._queue, self._dice)
        self._queue.append(pending)
        return pending

    def context(self, step: StepInput, row: int) -> Int32:
        """The row's tokens as its pages hold them."""
        positions = np.arange(step.seq_lens[row])
        pages = step.page_table[row, positions // self.page_size].astype(np.int64)
        return self.kv[pages * self.page_size + positions % self.page_size]

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

    def close(self) -> None:
        assert not self._queue

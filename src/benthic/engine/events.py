"""What a tick tells the server: gathered while the scheduler decides, sent as one message."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from benthic.engine.plan import StepPlan
from benthic.engine.request import Request
from benthic.engine.rows import Rows
from benthic.forward import Int32, Int64, LogprobRows, StepOutput
from benthic.messages import Finished, FlushDone, HiddenStates, Logprobs, Outputs, Prefilled, TokenLogprobs


@dataclass(slots=True)
class Events:
    """Everything of one tick that clients wait for."""

    ids: list[Int64] = field(default_factory=list)
    tokens: list[Int32] = field(default_factory=list)
    prefilled: list[Prefilled] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    hidden: list[HiddenStates] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    flushed: list[FlushDone] = field(default_factory=list)  # messages of their own

    def add_tokens(self, ids: Int64, tokens: Int32) -> None:
        """Request ids[i] got tokens[i]."""
        self.ids.append(ids)
        self.tokens.append(tokens)

    def add_extras(self, plan: StepPlan, output: StepOutput, alive: Int64, rows: Rows) -> None:
        """Log-probabilities and hidden states of the sampled rows `alive` that asked for them."""
        slots = plan.sample_slots[alive]
        if output.logprobs is not None:
            for i in np.flatnonzero(rows.logprobs[slots] >= 0).tolist():
                row, slot = int(alive[i]), int(slots[i])
                positions = _positions(
                    output.logprobs, row, row + 1, output.tokens[row : row + 1], int(rows.logprobs[slot])
                )
                self.logprobs.append(TokenLogprobs(int(rows.ids[slot]), False, positions))
        if output.hidden is not None:
            # the runner returns hidden rows for the sampled rows that wanted them, in their order
            order = np.flatnonzero(plan.sample_hidden).tolist()
            at = {row: n for n, row in enumerate(order)}
            for i in alive.tolist():
                if i in at:
                    state = np.ascontiguousarray(output.hidden[at[i]], np.float32)
                    self.hidden.append(HiddenStates(int(rows.ids[plan.sample_slots[i]]), state.tobytes()))

    def add_prompt_logprobs(self, plan: StepPlan, output: StepOutput, requests: Mapping[int, Request]) -> None:
        """Log-probabilities of prompt tokens, of the chunks that wanted them; only the rank that samples has any."""
        if not output.prompt_logprobs:
            return
        chunks = [c for c in plan.chunks if c.logprob_rows]
        for chunk, got in zip(chunks, output.prompt_logprobs, strict=True):
            request = chunk.request
            if request.id not in requests:
                continue
            tokens = request.tokens[chunk.logprob_start + 1 : chunk.logprob_start + 1 + chunk.logprob_rows]
            top_k = request.params.prompt_logprobs or 0
            positions = _positions(got, 0, chunk.logprob_rows, tokens, top_k)
            self.logprobs.append(TokenLogprobs(request.id, True, positions))

    def message(self) -> Outputs | None:
        """The message for the server, or None if there is nothing to say."""
        if not (self.ids or self.prefilled or self.logprobs or self.finished):
            return None
        return Outputs(
            ids=np.concatenate(self.ids).tobytes() if self.ids else b"",
            tokens=np.concatenate(self.tokens).tobytes() if self.tokens else b"",
            prefilled=tuple(self.prefilled),
            logprobs=tuple(self.logprobs),
            hidden=tuple(self.hidden),
            finished=tuple(self.finished),
        )


def _positions(rows: LogprobRows, start: int, end: int, tokens: Int32, top_k: int) -> tuple[Logprobs, ...]:
    return tuple(
        Logprobs(
            int(tokens[i - start]),
            float(rows.chosen[i]),
            tuple(rows.top_ids[i, :top_k].tolist()),
            tuple(rows.top[i, :top_k].tolist()),
        )
        for i in range(start, end)
    )

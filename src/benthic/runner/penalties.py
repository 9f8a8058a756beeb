"""Which tokens stand in each request's prompt and output, on the device, for the penalties over them.

They live there because the step that needs a token's count is built before the host knows the token. Rows are given to
request slots as they first ask, and the tensors grow by doubling: without penalties they take no memory.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benthic.forward import Int64, PenaltyInit

_FIRST_ROWS = 4


class PenaltyState:
    """Owns the counts. A row is one slot's for good; `PenaltyInit` starts it afresh for the slot's next request."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._row_of = np.full(num_slots, -1, dtype=np.int64)
        self._num_rows = 0
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)  # generated tokens
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def plan_starts(self, inits: Sequence[PenaltyInit]) -> dict[str, NDArray[Any]]:
        """Give rows to the slots; the arrays for `start`. Host only."""
        if not inits:
            return {}
        for init in inits:
            if self._row_of[init.slot] < 0:
                self._row_of[init.slot] = self._num_rows
                self._num_rows += 1
        rows = self._row_of[[init.slot for init in inits]]
        return {
            "penalty_start_rows": rows,
            "penalty_prompt": np.concatenate(
                [r * self._vocab_size + i.prompt for r, i in zip(rows, inits, strict=True)]
            ),
            "penalty_output": np.concatenate(
                [r * self._vocab_size + i.output for r, i in zip(rows, inits, strict=True)]
            ),
        }

    def rows_of(self, slots: NDArray[np.int32]) -> Int64:
        """The rows of slots that have been started."""
        rows: Int64 = self._row_of[slots]
        assert (rows >= 0).all(), "a slot is penalized that no PenaltyInit has started"
        return rows

    def start(self, tensors: dict[str, torch.Tensor]) -> None:
        """Carry out `plan_starts` on the device."""
        if "penalty_start_rows" not in tensors:
            return
        self._grow()
        rows, output = tensors["penalty_start_rows"], tensors["penalty_output"]
        self._counts.index_fill_(0, rows, 0)
        self._in_prompt.index_fill_(0, rows, False)
        self._in_prompt.view(-1).index_fill_(0, tensors["penalty_prompt"], True)
        self._counts.view(-1).index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def count(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """One more of tokens[i] in rows[i]."""
        flat = rows * self._vocab_size + tokens
        self._counts.view(-1).index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))

    def apply(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        repetition: torch.Tensor | None,
        frequency: torch.Tensor | None,
        presence: torch.Tensor | None,
    ) -> None:
        """Change logits [n, V] of state rows [n] in place; each strength is float32 [n].

        Repetition (CTRL, arXiv:1909.05858, section 4.1) divides a positive and multiplies a negative logit of any token
        of prompt or output. Frequency and presence (OpenAI) subtract strength × count, and strength once, of output.
        """
        counts = self._counts.index_select(0, rows)
        generated = counts > 0
        if repetition is not None:
            seen = generated | self._in_prompt.index_select(0, rows)
            by = repetition[:, None]
            logits.copy_(torch.where(seen, torch.where(logits > 0, logits / by, logits * by), logits))
        if frequency is not None:
            logits.sub_(frequency[:, None] * counts)
        if presence is not None:
            logits.sub_(presence[:, None] * generated)

    def _grow(self) -> None:
        have = len(self._counts)
        if self._num_rows <= have:
            return
        extra = max(_FIRST_ROWS, self._num_rows, 2 * have) - have
        shape = (min(extra, len(self._row_of) - have), self._vocab_size)
        self._counts = torch.cat([self._counts, torch.zeros(shape, dtype=torch.int32, device=self._device)])
        self._in_prompt = torch.cat([self._in_prompt, torch.zeros(shape, dtype=torch.bool, device=self._device)])

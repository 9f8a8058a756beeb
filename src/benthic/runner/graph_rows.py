"""A step as rows of a decode graph: its decode rows, and each prompt token as a row of its own.

The tokens of a short prefill share their sequence's pages and see one token more each. Within a layer all rows write
their KV before any of them attends, so a token sees those before it in the same step. That way a prompt whose prefix
was in the cache costs one replay instead of hundreds of launches, and so does a step that decodes beside it.
"""

from dataclasses import dataclass

import numpy as np

from benthic.forward import Int32, Int64, StepInput

CUDA_TOKENS = 256  # of a step that runs so unless the user says otherwise: beyond, launches cost less than the rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRows:
    """T rows, in the order of the step's tokens."""

    slots: Int64  # [T] where in `last_tokens` the row's input stands, and where its argmax goes
    positions: Int64  # [T]
    kv_slots: Int64  # [T]
    seq_lens: Int32  # [T]
    page_table: Int32  # [T, M]
    prompt_tokens: Int32  # [T - D] what the prompt rows read: at `first_prompt_slot` … of last_tokens

    def __len__(self) -> int:
        return len(self.slots)


def graph_rows(step: StepInput, first_prompt_slot: int) -> GraphRows:
    """Rows of `step`; its prompt tokens stand at `first_prompt_slot` … of last_tokens, which no request owns."""
    decode = step.num_decode
    prompts = step.num_tokens - decode
    if not prompts:
        return GraphRows(
            slots=step.state_slots, positions=step.positions, kv_slots=step.kv_slots, seq_lens=step.seq_lens,
            page_table=step.page_table, prompt_tokens=step.token_ids[:0],
        )  # fmt: skip
    row_of_token = np.concatenate(
        [np.arange(decode), decode + np.repeat(np.arange(len(step.query_lens)), step.query_lens)]
    )
    own = np.arange(first_prompt_slot, first_prompt_slot + prompts, dtype=np.int64)
    return GraphRows(
        slots=np.concatenate([step.state_slots[:decode], own]),
        positions=step.positions,
        kv_slots=step.kv_slots,
        seq_lens=(step.positions + 1).astype(np.int32),
        page_table=step.page_table[row_of_token],
        prompt_tokens=step.token_ids[decode:],
    )


def prompt_keys(step: StepInput) -> int:
    """Sum over the step's prompt tokens of the positions that each sees."""
    return int((step.positions[step.num_decode :] + 1).sum())

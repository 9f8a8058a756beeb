"""The running requests as arrays over their slots: a tick of 256 costs a few numpy calls and no loop over requests.

A slot is a row here, a row of the device-resident state (last token, penalty counts) and a row of the page table.
Lengths, in tokens of the sequence:

    prompt_len <= known <= length <= limit      computed <= length

`known` tokens are on the host; `length` counts the sampled ones still on their way too; the KV of `computed` tokens is
launched. A decode step computes position `computed` (= length - 1) and makes one token more.
"""

import numpy as np

from benthic.engine.request import Request
from benthic.forward import Int32, Int64

NO_STOP = -1


class Rows:
    """Structure of arrays over `max_running` slots. Owned by the scheduler."""

    def __init__(self, max_running: int, max_tokens: int, page_size: int) -> None:
        max_pages = -(-max_tokens // page_size)
        self.page_size = page_size
        self.requests: list[Request | None] = [None] * max_running
        self.free: list[int] = list(range(max_running - 1, -1, -1))
        self.epoch = np.zeros(
            max_running, np.int64
        )  # counts the slot's tenants; a late result of an earlier one is dropped
        self.decoding = np.zeros(max_running, np.bool_)
        self.ids = np.zeros(max_running, np.int64)
        self.prompt_len = np.zeros(max_running, np.int64)
        self.known = np.zeros(max_running, np.int64)
        self.length = np.zeros(max_running, np.int64)
        self.computed = np.zeros(max_running, np.int64)
        self.limit = np.zeros(max_running, np.int64)
        self.num_pages = np.zeros(max_running, np.int64)  # allocated
        self.committed = np.zeros(max_running, np.int64)  # pages in the tree
        # calloc: a row costs memory once it is written
        self.table = np.zeros((max_running, max_pages), np.int32)
        self.history = np.zeros((max_running, max_tokens), np.int32)
        self.stop_ids = np.full((max_running, 4), NO_STOP, np.int32)
        self.temperature = np.zeros(max_running, np.float32)
        self.seed = np.zeros(max_running, np.int64)
        self.choice = np.zeros(max_running, np.int64)
        self.top_k = np.zeros(max_running, np.int32)
        self.top_p = np.ones(max_running, np.float32)
        self.min_p = np.zeros(max_running, np.float32)
        self.presence = np.zeros(max_running, np.float32)
        self.frequency = np.zeros(max_running, np.float32)
        self.repetition = np.ones(max_running, np.float32)
        self.penalised = np.zeros(max_running, np.bool_)
        self.biased = np.zeros(max_running, np.bool_)  # logit_bias, or min_tokens not reached yet
        self.min_length = np.zeros(max_running, np.int64)
        self.logprobs = np.full(max_running, -1, np.int32)
        self.hidden = np.zeros(max_running, np.bool_)

    @property
    def num_used(self) -> int:
        return len(self.requests) - len(self.free)

    def take(self, request: Request) -> int:
        """Give `request` a slot and fill its row. There must be a free one."""
        slot = self.free.pop()
        p = request.params
        n = len(request.tokens)
        self.requests[slot] = request
        request.slot = slot
        self.epoch[slot] += 1
        self.decoding[slot] = False
        self.ids[slot] = request.id
        self.prompt_len[slot] = request.prompt_len
        self.known[slot] = self.length[slot] = n
        self.computed[slot] = self.num_pages[slot] = self.committed[slot] = 0
        self.limit[slot] = request.limit
        self.history[slot, :n] = request.tokens
        if len(request.stop_ids) > self.stop_ids.shape[1]:
            wider = np.full((len(self.requests), 2 * len(request.stop_ids)), NO_STOP, np.int32)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slot] = NO_STOP
        self.stop_ids[slot, : len(request.stop_ids)] = request.stop_ids
        self.temperature[slot] = p.temperature
        self.seed[slot] = p.seed
        self.choice[slot] = request.choice
        self.top_k[slot], self.top_p[slot], self.min_p[slot] = p.top_k, p.top_p, p.min_p
        self.presence[slot], self.frequency[slot] = p.presence_penalty, p.frequency_penalty
        self.repetition[slot] = p.repetition_penalty
        self.penalised[slot] = p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1
        self.min_length[slot] = request.prompt_len + p.min_tokens
        self.biased[slot] = request.bias_tokens is not None or p.min_tokens > 0
        self.logprobs[slot] = -1 if p.logprobs is None else p.logprobs
        self.hidden[slot] = p.return_hidden_states
        return slot

    def give_back(self, slot: int) -> None:
        """Free the slot; results on their way for its tenant are dropped."""
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is free already"
        request.slot = -1
        self.requests[slot] = None
        self.epoch[slot] += 1
        self.decoding[slot] = False
        self.free.append(slot)

    def set_pages(self, slot: int, pages: list[int], start: int) -> None:
        """Copy pages[start:] of the run into the page table."""
        self.table[slot, start : len(pages)] = pages[start:]
        self.num_pages[slot] = len(pages)

    def append_tokens(self, slots: Int64, tokens: Int32) -> tuple[np.ndarray, np.ndarray]:
        """Take one arrived token a slot. Returns two masks: ended by an end token, and ended by length."""
        self.history[slots, self.known[slots]] = tokens
        self.known[slots] += 1
        stopped = (self.stop_ids[slots] == tokens[:, None]).any(axis=1) & (self.known[slots] > self.min_length[slots])
        return stopped, (self.known[slots] >= self.limit[slots]) & ~stopped

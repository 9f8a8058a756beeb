"""Builds a runner over the tiny model, and StepInputs the way a scheduler would."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benthic.attention.interface import AttentionBackend
from benthic.attention.triton_backend import TritonBackend
from benthic.config import RunnerConfig
from benthic.forward import PenaltyInit, StepInput
from benthic.runner.interface import RunnerInfo
from benthic.runner.model_runner import ModelRunner
from tests.support.sampling_cases import sampling_input
from tests.support.tiny_model import HIDDEN, MAX_POSITION, VOCAB, TinyModel, make_pool, make_spec

PAGE_SIZE, NUM_PAGES, SLOTS = 16, 400, 40


@dataclass(frozen=True)
class Bench:
    """A runner and what it was made of."""

    runner: ModelRunner
    model: TinyModel
    attention: AttentionBackend
    kv: torch.Tensor


def make_bench(
    device: torch.device,
    *,
    sizes: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    model: TinyModel | None = None,
    **config: Any,
) -> Bench:
    """On a CPU the backend's operations take their reference paths."""
    model = model or TinyModel(device, dtype)
    kv = make_pool(NUM_PAGES, PAGE_SIZE, device, dtype)
    attention = TritonBackend(make_spec(PAGE_SIZE, device, dtype), kv)
    runner = ModelRunner(
        model=model,
        attention=attention,
        num_pages=NUM_PAGES,
        config=RunnerConfig(graph_batch_sizes=sizes, **config),
        max_running=SLOTS,
        max_seq_len=256,
        page_size=PAGE_SIZE,
        chunk_tokens=64,
        device=device,
        info=RunnerInfo(
            vocab_size=VOCAB, hidden_size=HIDDEN, max_position=MAX_POSITION, eos_token_ids=(0,), namespace=bytes(32)
        ),
    )
    return Bench(runner, model, attention, kv)


class Script:
    """Sequences by slot, with pages of their own, and the steps that advance them."""

    def __init__(self) -> None:
        self._free = list(np.random.default_rng(1).permutation(NUM_PAGES))
        self._prompts: dict[int, list[int]] = {}
        self._pages: dict[int, list[int]] = {}
        self._computed: dict[int, int] = {}
        self._tick = 0

    def add(self, slot: int, prompt: Sequence[int]) -> None:
        """A new sequence in the slot, in place of the one there."""
        self._prompts[slot], self._pages[slot], self._computed[slot] = list(prompt), [], 0

    def step(
        self,
        decode: Sequence[int] = (),
        prefill: Sequence[tuple[int, int]] = (),
        *,
        inits: tuple[PenaltyInit, ...] = (),
        prompt_logprobs: tuple[tuple[int, int, int, np.ndarray], ...] = (),
        **sampling: Any,
    ) -> StepInput:
        """One token for each decode slot, and (slot, tokens) of prefill; those that end their prompt are sampled."""
        self._tick += 1
        counts = [(slot, 1) for slot in decode] + list(prefill)
        starts = [self._computed[slot] for slot, _ in counts]
        tokens: list[int] = [0] * len(decode)
        for slot, count in prefill:
            tokens += self._prompts[slot][self._computed[slot] : self._computed[slot] + count]
        positions = np.concatenate([np.arange(s, s + n) for (_, n), s in zip(counts, starts, strict=True)])
        for slot, count in counts:
            self._computed[slot] += count
            while len(self._pages[slot]) * PAGE_SIZE < self._computed[slot]:
                self._pages[slot].append(int(self._free.pop()))
        owner = np.concatenate([[slot] * n for slot, n in counts]).astype(int)
        pages = [self._pages[s][p // PAGE_SIZE] for s, p in zip(owner, positions, strict=True)]
        table = np.zeros((len(counts), max(len(self._pages[s]) for s, _ in counts)), np.int32)
        for row, (slot, _) in enumerate(counts):
            table[row, : len(self._pages[slot])] = self._pages[slot]
        ends = np.cumsum([n for _, n in counts]) - 1
        sampled = [
            i for i, (s, _) in enumerate(counts) if i < len(decode) or self._computed[s] == len(self._prompts[s])
        ]
        slots = np.array([s for s, _ in counts], np.int64)
        values = {"temperature": 0.0, "position": [self._computed[counts[i][0]] for i in sampled], **sampling}
        return StepInput(
            tick=self._tick,
            num_decode=len(decode),
            query_lens=np.array([n for _, n in prefill], np.int32),
            token_ids=np.array(tokens, np.int32),
            positions=positions.astype(np.int64),
            kv_slots=np.array(pages, np.int64) * PAGE_SIZE + positions % PAGE_SIZE,
            seq_lens=np.array([self._computed[s] for s, _ in counts], np.int32),
            page_table=table,
            state_slots=slots,
            sample_rows=ends[sampled].astype(np.int64),
            sample_slots=slots[sampled],
            sampling=sampling_input(len(sampled), **values),
            penalty_inits=inits,
            prompt_logprobs=prompt_logprobs,
        )


def prompt_of(slot: int, length: int) -> list[int]:
    """Some token ids."""
    return [int(t) for t in np.random.default_rng(slot).integers(0, VOCAB, length)]

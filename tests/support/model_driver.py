"""Runs a model over a paged pool as an engine would, a few rows at a time.

Whole, chunked and cached, pages shuffled.
"""

from collections.abc import Sequence
from typing import Any

import torch

from benthic.attention.choice import choose, make
from benthic.common.layout import ceil_div
from benthic.forward import ForwardBatch
from benthic.models.kv_layout import KVFormats, attention_spec, kv_payloads
from benthic.tiers.device.pool import allocate_pools


class ModelDriver:
    """Owns the pools and each row's context length. Rows have fixed, shuffled pages."""

    def __init__(
        self,
        model: Any,
        *,
        rows: int = 1,
        max_tokens: int = 256,
        page_size: int = 16,
        backend: str = "torch",
        formats: KVFormats | None = None,
    ) -> None:
        config, device = model.config, model.device
        self.model, self.page_size = model, page_size
        pages = ceil_div(max_tokens, page_size)
        formats = formats or KVFormats(dtype=model.dtype)
        self.pools = allocate_pools(kv_payloads(config, page_size, formats), rows * pages, device)
        self.spec = attention_spec(config, page_size=page_size, formats=formats, device=device, max_seq_len=max_tokens)
        self.attention: Any = make(choose(backend, self.spec), self.spec, self.pools)
        shuffled = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(7))
        self.table = shuffled.view(rows, pages).to(torch.int32)
        self.lens = [0] * rows

    def step(self, decode: dict[int, int], prefill: dict[int, Sequence[int]]) -> torch.Tensor:
        """One mixed step: a token for each decode row, tokens for each prefill row -> logits [T, vocabulary]."""
        rows = [*decode, *prefill]
        new = [[token] for token in decode.values()] + [list(tokens) for tokens in prefill.values()]
        batch = self._batch(rows, new, len(decode))
        for row, tokens in zip(rows, new, strict=True):
            self.lens[row] += len(tokens)
        metadata = self.attention.begin(batch)
        return self.model.logits(self.model(batch, self.attention, metadata))

    def prefill(self, tokens: Sequence[int], chunk: int | None = None, row: int = 0) -> torch.Tensor:
        """Logits [n, vocabulary] of a row's next tokens, in chunks."""
        size = chunk or len(tokens)
        return torch.cat([self.step({}, {row: tokens[i : i + size]}) for i in range(0, len(tokens), size)])

    def greedy(self, prompt: Sequence[int], count: int, row: int = 0) -> tuple[list[int], torch.Tensor]:
        """`count` greedy tokens after `prompt`, and the logits [count, vocabulary] that chose them."""
        logits = [self.prefill(prompt, row=row)[-1:]]
        tokens = [int(logits[0].argmax())]
        while len(tokens) < count:
            logits.append(self.step({row: tokens[-1]}, {}))
            tokens.append(int(logits[-1].argmax()))
        return tokens, torch.cat(logits)

    def _batch(self, rows: list[int], new: list[list[int]], num_decode: int) -> ForwardBatch:
        device, size = self.model.device, self.page_size
        positions = [torch.arange(self.lens[r], self.lens[r] + len(t)) for r, t in zip(rows, new, strict=True)]
        slots = [self.table[r, p // size].long() * size + p % size for r, p in zip(rows, positions, strict=True)]
        seq_lens = [self.lens[r] + len(t) for r, t in zip(rows, new, strict=True)]
        query_lens = [len(t) for t in new[num_decode:]]
        return ForwardBatch(
            num_tokens=sum(map(len, new)),
            num_decode=num_decode,
            max_seq_len=max(seq_lens),
            max_query_len=max(query_lens, default=0),
            input_ids=torch.tensor([t for tokens in new for t in tokens], device=device),
            positions=torch.cat(positions).to(device),
            kv_slots=torch.cat(slots).to(device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            page_table=self.table[rows].to(device),
            cu_query_lens=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(device),
            query_lens_host=tuple(query_lens),
            seq_lens_host=tuple(seq_lens),
        )

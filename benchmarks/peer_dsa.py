"""Transformers' GlmMoeDsaForCausalLM with random weights: a check that the card is in its usual state.

Eager, its default attention and experts, the prompt in chunks of 2,048 tokens, TF32 allowed.
"""

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

CHUNK = 2048


class TransformersDsa:
    """Weights drawn on `device`. Raises ImportError where transformers has no such model."""

    def __init__(self, raw: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

        config = GlmMoeDsaConfig(**raw)
        with torch.device("meta"):
            model: Any = GlmMoeDsaForCausalLM(config)
        model = model.to(dtype).to_empty(device=device)
        for name, weight in model.named_parameters():
            weight.data.normal_(0.0, 0.02).add_(1.0 if name.endswith("norm.weight") else 0.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.zero_()
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
        self._model: Any = model.eval()
        self._device = device

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> tuple[float, Any]:
        """Seconds to the logits after the last token, and the cache."""
        tokens = torch.tensor([ids], device=self._device)
        start = time.perf_counter()
        cache = None
        with _quiet(), _tf32():
            for start_at in range(0, len(ids), CHUNK):
                part = tokens[:, start_at : start_at + CHUNK]
                out = self._model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = out.past_key_values
        out.logits[0, -1].argmax().item()  # waits for it
        return time.perf_counter() - start, cache

    @torch.inference_mode()
    def decode(self, cache: Any, steps: int) -> float:
        """Seconds a greedy token takes after what is in the cache."""
        token = torch.zeros((1, 1), dtype=torch.int64, device=self._device)
        start = 0.0
        with _quiet():
            for step in range(steps + 1):
                if step == 1:  # the first one warms up
                    token.tolist()
                    start = time.perf_counter()
                out = self._model(token, past_key_values=cache, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
        token.tolist()
        return (time.perf_counter() - start) / steps


@contextmanager
def _quiet() -> Iterator[None]:
    """Newer versions rename an argument and say so at every call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

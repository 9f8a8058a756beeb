"""A two-layer decoder with random weights, over an attention backend; and the same without a cache, for comparison."""

from typing import Any

import torch

from benthic.attention.interface import AttentionBackend, AttentionSpec
from benthic.forward import ForwardBatch
from benthic.kernels.rms_norm import rms_norm
from benthic.kernels.rope import rope

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB, MAX_POSITION = 2, 6, 2, 16, 48, 101, 512
EPS = 1e-5


class TinyModel:
    """Implements runner.graphs.Model. `calls` counts forwards, `batch_sizes` their tokens."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=rng) * shape[-1] ** -0.5).to(device, dtype)

        self.embedding = draw(VOCAB, HIDDEN) * HIDDEN**0.5
        self.head = draw(VOCAB, HIDDEN)  # not the embedding, which would repeat the last token for ever
        self.qkv = [draw((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN) for _ in range(LAYERS)]
        self.output = [2 * draw(HIDDEN, HEADS * HEAD_DIM) for _ in range(LAYERS)]  # so that the context counts
        self.weight = torch.ones(HIDDEN, device=device, dtype=dtype)
        angles = torch.arange(MAX_POSITION)[:, None] * 50.0 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(device)
        self.batch_sizes: list[int] = []

    def __call__(self, batch: ForwardBatch, attention: AttentionBackend, metadata: Any) -> torch.Tensor:
        self.batch_sizes.append(batch.num_tokens)
        residual = self.embedding[batch.input_ids]
        for layer in range(LAYERS):
            q, k, v = self._project(layer, residual, batch.positions)
            if batch.hooks is not None:
                batch.hooks.before_layer(layer)
            attended = attention.attend(layer, q, k, v, batch, metadata)
            if batch.hooks is not None:
                batch.hooks.after_layer(layer)
            residual = residual + attended.reshape(len(residual), -1) @ self.output[layer].T
        return rms_norm(residual, self.weight, EPS)

    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        return (hidden_rows @ self.head.T).float()

    def dense(self, tokens: list[int]) -> torch.Tensor:
        """Logits [T, V] of every position, by plain causal attention."""
        device = self.embedding.device
        positions = torch.arange(len(tokens), device=device)
        residual = self.embedding[torch.tensor(tokens, device=device)]
        for layer in range(LAYERS):
            q, k, v = (x.transpose(0, 1) for x in self._project(layer, residual, positions))
            k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=HEAD_DIM**-0.5)
            residual = residual + attended.transpose(0, 1).reshape(len(tokens), -1) @ self.output[layer].T
        return self.logits(rms_norm(residual, self.weight, EPS))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """What follows the prompt, recomputed from the start for every token."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.dense(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def _project(
        self, layer: int, residual: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = rms_norm(residual, self.weight, EPS) @ self.qkv[layer].T
        q, k, v = x.view(len(x), -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        rope(q, k, self.cos_sin, positions)
        return q, k, v


def make_pool(num_pages: int, page_size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A zeroed pool with its scratch page."""
    return torch.zeros(LAYERS, num_pages + 1, 2, page_size, KV_HEADS, HEAD_DIM, device=device, dtype=dtype)


def make_spec(page_size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> AttentionSpec:
    """The tiny model's attention."""
    return AttentionSpec(
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        scale=HEAD_DIM**-0.5,
        page_size=page_size,
        dtype=dtype,
        device=device,
        max_seq_len=MAX_POSITION,
    )

"""The peer of the offline benchmark.

Transformers' LlamaForCausalLM with the very same tensors, greedy through its own cache.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch

from benthic.models.registry import Checkpoint
from benthic.weights.model_config import LlamaConfig as LlamaShape


@dataclass(frozen=True, slots=True)
class PeerRan:
    """One batch, with the gap between the two best logits at each token: how close each choice was."""

    tokens: list[list[int]]
    gaps: list[list[float]]
    first_s: float
    total_s: float

    @property
    def decode_per_s(self) -> float:
        """Tokens a second after the first ones."""
        return sum(len(t) - 1 for t in self.tokens) / (self.total_s - self.first_s)


class Transformers:
    """The model on `device` in `dtype`, eager, with its default attention."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        c = checkpoint.config
        assert isinstance(c, LlamaShape)
        config = LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps, max_position_embeddings=c.max_position,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta}, tie_word_embeddings=c.tie_embeddings,
        )  # fmt: skip
        with torch.device("meta"):
            model: Any = LlamaForCausalLM(config)
            model = model.to(dtype)
        state = {n: checkpoint.reader.load(n).to(device=device, dtype=dtype) for n in checkpoint.reader.names()}
        if c.tie_embeddings:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        missing = model.load_state_dict(state, strict=False, assign=True)
        assert not missing.missing_keys, missing
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
        self._model: Any = model.eval()
        self._device = device

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], max_tokens: int) -> PeerRan:
        """All prompts (of one length) as one batch."""
        ids = torch.tensor(prompts, device=self._device)
        start = time.perf_counter()
        out = self._model(ids, use_cache=True, logits_to_keep=1)
        logits = [out.logits[:, -1]]
        chosen = [logits[0].argmax(-1)]
        chosen[0].tolist()
        first = time.perf_counter() - start
        for _ in range(max_tokens - 1):
            out = self._model(chosen[-1][:, None], past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits[:, -1])
            chosen.append(logits[-1].argmax(-1))
        tokens = torch.stack(chosen, 1).tolist()
        total = time.perf_counter() - start
        top = torch.stack(logits, 1).float().topk(2, -1).values
        return PeerRan(tokens, (top[..., 0] - top[..., 1]).tolist(), first, total)


def assert_same_tokens(ours: list[list[int]], peer: PeerRan, tolerance: float) -> int:
    """How many tokens agreed. A row's comparison ends at the first choice closer than `tolerance`.

    Any other difference raises.
    """
    agreed = 0
    for row, (mine, theirs, gaps) in enumerate(zip(ours, peer.tokens, peer.gaps, strict=True)):
        for i, (a, b, gap) in enumerate(zip(mine, theirs, gaps, strict=True)):
            if gap < tolerance:
                break
            assert a == b, f"row {row}, token {i}: {a} where transformers says {b}, with a gap of {gap:.4f}"
            agreed += 1
    return agreed

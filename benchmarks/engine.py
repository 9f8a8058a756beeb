"""An engine in this process for benchmarks, and how fast it computes.

Prompts as token ids, greedy, no cache hits wanted.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benthic.common.errors import ModelError
from benthic.config import options_from_mapping, resolve
from benthic.engine.build import assemble
from benthic.engine.frames import hear
from benthic.kvcache import page_hashes, root_hash
from benthic.messages import FlushCache, Outputs, SamplingParams, Submit
from benthic.models.registry import Checkpoint
from benthic.parallel.launch import ALONE, Ranks
from benthic.weights.model_config import LlamaConfig, RopeConfig
from benthic.weights.tensor_info import TensorInfo

_FLOAT32 = "e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class Ran:
    """One batch: what came out, and when."""

    tokens: list[list[int]]
    first_s: float  # until every request had its first token
    total_s: float
    cached: tuple[int, int, int] = (0, 0, 0)  # prompt tokens found in L1, L2, L3
    early: int = 0  # tokens that had come when every request had its first

    @property
    def decode_per_s(self) -> float:
        """Tokens a second from the moment that every request had its first one."""
        return (sum(map(len, self.tokens)) - self.early) / (self.total_s - self.first_s)


class BenchEngine:
    """Built from an open checkpoint and the engine's options.

    Of several `ranks` each builds one at the same time; rank 0's is used, the others `follow`.
    """

    def __init__(self, checkpoint: Checkpoint, ranks: Ranks = ALONE, /, **options: object) -> None:
        place = ranks.layout
        if place.world_size > 1:
            options = {"cp": place.cp_size, "ep": place.expert_parallel, **options}
        config = resolve(options_from_mapping(options, "benchmark")).engine
        self.engine, self.ready = assemble(config, checkpoint, lambda what, done, total: None, ranks=ranks)
        self._ranks = ranks
        self._next_id = 0

    def run(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        salt: str | None = None,
        on_first: Callable[[], object] = lambda: None,
    ) -> Ran:
        """Answer all prompts at once with `max_tokens` tokens each; runs with one salt find each other's pages.

        `on_first` is called once every request has its first token.
        """
        root = root_hash(self.ready.namespace, str(self._next_id) if salt is None else salt)
        ids = range(self._next_id, self._next_id + len(prompts))
        self._next_id += len(prompts)
        out: dict[int, list[int]] = {i: [] for i in ids}
        messages = []
        for i, prompt in zip(ids, prompts, strict=True):
            data = np.array(prompt, np.int32).tobytes()
            hashes = b"".join(page_hashes(root, data, self.ready.page_size))
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
            messages.append(Submit(id=i, prompt=data, root=root, hashes=hashes, params=params))
        start = time.perf_counter()
        first, early = 0.0, 0
        cached = (0, 0, 0)
        replies = self.engine.tick(list(messages))
        while True:
            for reply in replies:
                if isinstance(reply, Outputs):
                    for p in reply.prefilled:
                        found = (p.cached_l1, p.cached_l2, p.cached_l3)
                        cached = (cached[0] + found[0], cached[1] + found[1], cached[2] + found[2])
                    tokens = np.frombuffer(reply.tokens, np.int32).tolist()
                    for i, token in zip(np.frombuffer(reply.ids, np.int64).tolist(), tokens, strict=True):
                        out[i].append(token)
            if not first and all(out.values()):
                first = time.perf_counter() - start
                early = sum(map(len, out.values()))
                on_first()
            if not self.engine.computing:
                break
            time.sleep(self.engine.pause_s)  # as the engine's own loop: spinning takes the disk readers' turns
            replies = self.engine.tick([])
        return Ran(list(out.values()), first, time.perf_counter() - start, cached, early)

    def settle(self) -> None:
        """Until every copy and spill is over."""
        while not self.engine.idle:
            time.sleep(self.engine.pause_s)
            self.engine.tick([])

    def flush(self, *tiers: str) -> None:
        """Drop what these tiers hold."""
        self.engine.tick([FlushCache(0, tiers)])

    def follow(self) -> None:
        """On every rank but 0: make rank 0's turns until it closes, then free the model."""
        while not (frame := hear(self._ranks.control)).ends:
            self.engine.follow(frame)
        self.engine.close()

    def close(self) -> None:
        """Free the model, on rank 0 those of all ranks."""
        self.engine.end()
        self.engine.close()


class RandomReader:
    """Tensors of these shapes drawn from N(0, 0.02) on `device`, by name: weights without a file.

    Norms are around 1, the experts' correction bias (float32, as in files) is 0.
    """

    files = ()

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        self._shapes = shapes
        self._seeds = {name: seed for seed, name in enumerate(shapes)}
        self._device = device

    def names(self) -> list[str]:
        return list(self._shapes)

    def stored_names(self) -> list[str]:
        return self.names()

    def info(self, name: str) -> TensorInfo:
        if name not in self._shapes:
            raise ModelError(f"random weights have no tensor {name!r}")
        shape = self._shapes[name]
        stored, size = ("F32", 4) if name.endswith(_FLOAT32) else ("BF16", 2)
        return TensorInfo(name, stored, shape, size * int(np.prod(shape)))

    def raw(self, name: str) -> memoryview:
        return memoryview(name.encode())  # the name is all that the numbers depend on

    def load(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if name.endswith(_FLOAT32):
            return torch.zeros(shape, device=self._device)
        generator = torch.Generator(self._device).manual_seed(self._seeds[name])
        values = torch.empty(shape, device=self._device, dtype=torch.bfloat16)
        values.normal_(0.0, 0.02, generator=generator)
        return values.add_(1.0) if name.endswith("norm.weight") else values


def llama_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama checkpoint."""
    c = config
    wide, rows, shared = c.intermediate_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
        "lm_head.weight": (c.vocab_size, c.hidden_size),
    }
    for i in range(c.num_layers):
        p = f"model.layers.{i}."
        shapes |= {
            p + "input_layernorm.weight": (c.hidden_size,),
            p + "post_attention_layernorm.weight": (c.hidden_size,),
            p + "self_attn.q_proj.weight": (rows, c.hidden_size),
            p + "self_attn.k_proj.weight": (shared, c.hidden_size),
            p + "self_attn.v_proj.weight": (shared, c.hidden_size),
            p + "self_attn.o_proj.weight": (c.hidden_size, rows),
            p + "mlp.gate_proj.weight": (wide, c.hidden_size),
            p + "mlp.up_proj.weight": (wide, c.hidden_size),
            p + "mlp.down_proj.weight": (c.hidden_size, wide),
        }
    return shapes


def random_llama(size: str, device: torch.device) -> Checkpoint:
    """A random Llama in the shape of a known one: `1b` (Llama 3.2 1B, head untied) or `8b` (Llama 3.1 8B).

    `small` is for CPUs, `tiny` for tests.
    """
    layers, hidden, wide, heads, shared = {
        "1b": (16, 2048, 8192, 32, 8),
        "8b": (32, 4096, 14336, 32, 8),
        "small": (6, 384, 1024, 6, 2),
        "tiny": (2, 64, 128, 4, 2),
    }[size]
    config = LlamaConfig(
        architecture="llama",
        vocab_size=128_256 if size.endswith("b") else 500,
        hidden_size=hidden,
        intermediate_size=wide,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=shared,
        head_dim=hidden // heads,
        rms_norm_eps=1e-5,
        max_position=16_384,
        rope=RopeConfig(theta=500_000.0),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_embeddings=False,
        bos_token_id=None,
        eos_token_ids=(),
    )
    return Checkpoint(config, RandomReader(llama_shapes(config), device))

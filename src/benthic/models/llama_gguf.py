"""Shows a GGUF file of a Llama-style model under the names, and in the row order, of a Hugging Face checkpoint."""

import re
from pathlib import Path

import torch

from benthic.weights.dequantise import GGUFReader
from benthic.weights.model_config import LlamaConfig
from benthic.weights.tensor_info import TensorInfo

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_GGUF_LAYER_NAME = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"  # float32 [head_dim / 2]: frequencies are divided by these; has no Hugging Face name


class LlamaGGUFReader:
    """A TensorReader over a GGUF file, by Hugging Face names.

    Llama's q and k rows, stored for interleaved rope, come back in half-split order; Qwen's are stored that way.
    """

    def __init__(self, file: GGUFReader, config: LlamaConfig) -> None:
        self._file = file
        self._config = config

    @property
    def files(self) -> tuple[Path, ...]:
        return self._file.files

    def names(self) -> tuple[str, ...]:
        """All tensors, by Hugging Face name where they have one."""
        return tuple(_hugging_face_name(name) for name in self._file.names())

    def stored_names(self) -> tuple[str, ...]:
        """The same."""
        return self.names()

    def info(self, name: str) -> TensorInfo:
        """Under the file's own name. Raises ModelError."""
        return self._file.info(gguf_name(name))

    def raw(self, name: str) -> memoryview:
        """The stored bytes, rows as stored. Raises ModelError."""
        return self._file.raw(gguf_name(name))

    def load(self, name: str) -> torch.Tensor:
        """As GGUFReader.load, rows in half-split order."""
        tensor = self._file.load(gguf_name(name))
        if self._config.architecture != "llama":
            return tensor
        if ".q_proj." in name:
            return half_split(tensor, self._config.num_heads)
        return half_split(tensor, self._config.num_kv_heads) if ".k_proj." in name else tensor


def half_split(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [heads * d, ...] from interleaved order (0, d/2, 1, d/2 + 1, …) to half-split order."""
    pairs = tensor.shape[0] // heads // 2
    return tensor.reshape(heads, pairs, 2, -1).transpose(1, 2).reshape(tensor.shape)


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face name; a name without a counterpart comes back as it is."""
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _IN_LAYER:
        return f"blk.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TOP[stem]}.{kind}" if stem in _TOP else name


def _hugging_face_name(name: str) -> str:
    match = _GGUF_LAYER_NAME.fullmatch(name)
    if match and match[2] in _FROM_LAYER:
        return f"model.layers.{match[1]}.{_FROM_LAYER[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_FROM_TOP[stem]}.{kind}" if stem in _FROM_TOP else name


_FROM_LAYER = {ours: theirs for theirs, ours in _IN_LAYER.items()}
_FROM_TOP = {ours: theirs for theirs, ours in _TOP.items()}

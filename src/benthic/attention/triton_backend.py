"""The GPU's attention backend: decode rows through `paged_decode`, prefill rows through `paged_prefill`."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from benthic.attention.interface import AttentionBackend
from benthic.forward import ForwardBatch
from benthic.kernels.choice import has_triton
from benthic.kernels.paged_decode import paged_decode
from benthic.kernels.paged_prefill import paged_prefill
from benthic.kernels.paged_write import paged_write

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    """The batch's rows, cut into decode and prefill once a forward. Views only: nothing to replay in a graph."""

    decode_tables: torch.Tensor  # int32 [D, M]
    decode_lens: torch.Tensor  # int32 [D]
    prefill_tables: torch.Tensor  # int32 [P, M]
    prefill_lens: torch.Tensor  # int32 [P]


class TritonBackend(AttentionBackend):
    """Paged attention in Triton; usable inside CUDA graphs: launches depend on shapes and static bounds alone."""

    name: ClassVar[str] = "triton"

    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why this backend can't run there, in words, or None."""
        if device.type != "cuda":
            return f"the triton attention backend needs a CUDA device, not {device.type}"
        if not has_triton():
            return "the triton package is not installed; install benthic[gpu]"
        if dtype not in _DTYPES:
            return f"the triton attention backend computes in float32, bfloat16 or float16, not {dtype}"
        if head_dim & (head_dim - 1) or not 16 <= head_dim <= 256:
            return f"head_dim {head_dim} is not a power of two from 16 to 256"
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return (
                f"the triton attention backend needs compute capability 8.0 or newer, this device has {major}.{minor}"
            )
        return None

    def begin(self, batch: ForwardBatch) -> TritonMetadata:
        """See AttentionBackend.begin."""
        decode = batch.num_decode
        return TritonMetadata(
            decode_tables=batch.page_table[:decode],
            decode_lens=batch.seq_lens[:decode],
            prefill_tables=batch.page_table[decode:],
            prefill_lens=batch.seq_lens[decode:],
        )

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch, metadata: Any
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        kv = self.kv[layer]
        paged_write(kv, k, v, batch.kv_slots)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decode, scale = batch.num_decode, self.spec.scale
        if decode:
            paged_decode(
                q[:decode],
                kv,
                metadata.decode_tables,
                metadata.decode_lens,
                scale,
                self.spec.max_seq_len,  # not the batch's: the parts, and so the kernels, follow from its rows alone
                out[:decode],
            )
        if batch.num_tokens > decode:
            paged_prefill(
                q[decode:],
                kv,
                metadata.prefill_tables,
                metadata.prefill_lens,
                batch.cu_query_lens,
                scale,
                batch.max_query_len,
                out[decode:],
            )
        return out

"""TritonBackend: writes, then decode and prefill rows of one batch. Without a GPU it takes the references."""

from collections.abc import Sequence

import pytest
import torch

from benthic.attention.interface import AttentionSpec
from benthic.attention.triton_backend import TritonBackend
from benthic.forward import ForwardBatch
from tests.support.attention_cases import Case, assert_close, make_case
from tests.support.triton_interpreter import DEVICE


def attend(case: Case, num_decode: int, query_lens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The backend's output for the case, from a pool in which the new tokens are still missing; and that pool."""
    pool = torch.stack([torch.zeros_like(case.kv), case.kv])  # two layers, so that the index counts
    page, offset = case.slots // case.kv.shape[2], case.slots % case.kv.shape[2]
    pool[1][page, :, offset] = float("nan")
    spec = AttentionSpec(
        num_layers=2,
        num_heads=case.q.shape[1],
        num_kv_heads=case.k.shape[1],
        head_dim=case.q.shape[2],
        scale=case.scale,
        page_size=case.kv.shape[2],
        dtype=case.q.dtype,
        device=case.q.device,
        max_seq_len=case.max_seq_len,
    )
    backend = TritonBackend(spec, pool)
    batch = ForwardBatch(
        num_tokens=len(case.q),
        num_decode=num_decode,
        max_seq_len=case.max_seq_len,
        max_query_len=max(query_lens[num_decode:], default=0),
        input_ids=torch.zeros(len(case.q), dtype=torch.int64, device=DEVICE),
        positions=torch.zeros(len(case.q), dtype=torch.int64, device=DEVICE),
        kv_slots=case.slots,
        seq_lens=case.seq_lens,
        page_table=case.page_table,
        cu_query_lens=(case.cu_query_lens[num_decode:] - num_decode).to(torch.int32),
    )
    return backend.attend(1, case.q, case.k, case.v, batch, backend.begin(batch)), pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_decode", "seq_lens", "query_lens"),
    [
        (3, [1, 64, 70], [1, 1, 1]),
        (0, [17, 64], [17, 3]),
        (2, [33, 16, 40, 9, 130], [1, 1, 40, 1, 30]),
    ],
)
def test_any_mixture_of_rows_agrees(
    num_decode: int, seq_lens: list[int], query_lens: list[int], dtype: torch.dtype
) -> None:
    case = make_case(seq_lens, query_lens, heads=6, kv_heads=2, head_dim=32, page_size=16, dtype=dtype, device=DEVICE)
    out, pool = attend(case, num_decode, query_lens)
    assert_close(out, case.expected, dtype)
    torch.testing.assert_close(pool[1], case.kv, rtol=0, atol=0, equal_nan=True)
    assert not pool[0].any()


def test_it_says_why_it_cannot_run() -> None:
    cpu = torch.device("cpu")
    assert (
        TritonBackend.unsupported(cpu, torch.float32, 64) == "the triton attention backend needs a CUDA device, not cpu"
    )
    assert TritonBackend.name == "triton"


def test_it_names_what_it_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "head_dim 96 is not a power of two" in str(TritonBackend.unsupported(cuda, torch.float16, 96))
    assert "head_dim 512" in str(TritonBackend.unsupported(cuda, torch.float16, 512))
    assert "float64" in str(TritonBackend.unsupported(cuda, torch.float64, 64))
    assert "this device has 7.5" in str(TritonBackend.unsupported(cuda, torch.float16, 64))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert TritonBackend.unsupported(cuda, torch.bfloat16, 128) is None

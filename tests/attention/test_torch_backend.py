"""The torch backend against attention spelt out in float64, over random batches and page tables."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.attention.interface import AttentionSpec
from benthic.attention.torch_backend import TorchBackend, group_by_length
from benthic.forward import ForwardBatch
from tests.support.attention_cases import TOLERANCE

HEADS, SHARED, DIM, PAGE = 6, 2, 16, 8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_backend(num_pages: int, dtype: torch.dtype, device: str) -> TorchBackend:
    spec = AttentionSpec(
        num_layers=2,
        num_heads=HEADS,
        num_kv_heads=SHARED,
        head_dim=DIM,
        scale=DIM**-0.5,
        page_size=PAGE,
        dtype=dtype,
        device=torch.device(device),
        max_seq_len=4096,
    )
    return TorchBackend(spec, torch.zeros(2, num_pages + 1, 2, PAGE, SHARED, DIM, dtype=dtype, device=device))


def run(
    backend: TorchBackend,
    contexts: Sequence[torch.Tensor],
    query_lens: Sequence[int],
    num_decode: int,
    tables: Sequence[Sequence[int]],
    *,
    in_graph: bool = False,
    padded: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend each row's last `query_lens` tokens; `contexts` [2, length, G, d]: all its keys and values."""
    kv, device = backend.kv, backend.kv.device
    slots, new_k, new_v = [], [], []
    width = max(map(len, tables)) + 1
    for context, new, table in zip(contexts, query_lens, tables, strict=True):
        length = context.shape[1]
        where = torch.tensor(table).repeat_interleave(PAGE)[:length] * PAGE + torch.arange(length) % PAGE
        old = where[: length - new]
        kv[1, old // PAGE, 0, old % PAGE] = context[0, : length - new].to(kv)
        kv[1, old // PAGE, 1, old % PAGE] = context[1, : length - new].to(kv)
        slots.append(where[length - new :])
        new_k.append(context[0, length - new :])
        new_v.append(context[1, length - new :])
    scratch = kv.shape[1] - 1
    rows = [[*table, *[0] * (width - len(table))] for table in tables] + [[scratch] + [0] * (width - 1)] * padded
    lens = [context.shape[1] for context in contexts] + [1] * padded
    total = sum(query_lens) + padded
    q = torch.randn(total, HEADS + 1, DIM, generator=torch.Generator().manual_seed(1)).to(kv)[:, :HEADS]
    filler = torch.ones(padded, SHARED, DIM)
    batch = ForwardBatch(
        num_tokens=total,
        num_decode=num_decode + padded,
        max_seq_len=width * PAGE if in_graph else max(lens),
        max_query_len=max(query_lens[num_decode:], default=0),
        input_ids=torch.zeros(total, dtype=torch.int64, device=device),
        positions=torch.zeros(total, dtype=torch.int64, device=device),
        kv_slots=torch.cat([*slots, torch.full((padded,), scratch * PAGE)]).to(device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        page_table=torch.tensor(rows, dtype=torch.int32, device=device),
        cu_query_lens=torch.tensor([0, *query_lens[num_decode:]], device=device).cumsum(0).to(torch.int32),
        query_lens_host=tuple(query_lens[num_decode:]),
        seq_lens_host=() if in_graph else tuple(lens),
        in_graph=in_graph,
    )
    k, v = torch.cat([*new_k, filler]).to(kv), torch.cat([*new_v, filler]).to(kv)
    return q, backend.attend(1, q, k, v, batch, backend.begin(batch))


def spelt_out(q: torch.Tensor, context: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """q [T, H, d] are the last tokens of context [2, length, G, d] -> float64 [T, H, d]."""
    k, v = context.to(dtype).double()
    out = torch.empty(q.shape, dtype=torch.float64)
    first = len(k) - len(q)
    for token in range(len(q)):
        for head in range(HEADS):
            seen_k, seen_v = k[: first + token + 1, head // 3], v[: first + token + 1, head // 3]
            out[token, head] = (seen_k @ q[token, head].double().cpu() * DIM**-0.5).softmax(0) @ seen_v
    return out


def check(
    lens: Sequence[int], query_lens: Sequence[int], num_decode: int, dtype: torch.dtype, device: str, **how: object
) -> None:
    rng = torch.Generator().manual_seed(sum(lens))
    contexts = [torch.randn(2, length, SHARED, DIM, generator=rng) for length in lens]
    pages = [-(-length // PAGE) for length in lens]
    order = torch.randperm(sum(pages), generator=rng).tolist()
    tables = [[order.pop() for _ in range(count)] for count in pages]
    backend = make_backend(sum(pages), dtype, device)
    q, out = run(backend, contexts, query_lens, num_decode, tables, **how)  # type: ignore[arg-type]  # passed on
    assert out.isfinite().all()
    start = 0
    for context, new in zip(contexts, query_lens, strict=True):
        wanted = spelt_out(q[start : start + new], context, dtype)
        torch.testing.assert_close(
            out[start : start + new].double().cpu(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )
        start += new
    assert not backend.kv[0].any()  # the other layer is left alone


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lens", "query_lens", "num_decode"),
    [
        ([1], [1], 1),
        ([17], [1], 1),
        ([5, 8, 33, 100], [1, 1, 1, 1], 4),  # several groups
        ([20, 20], [1, 1], 2),  # no mask
        ([13], [13], 0),
        ([1], [1], 0),
        ([40], [7], 0),
        ([40], [1], 0),
        ([9, 30, 12, 64], [1, 1, 12, 31], 2),
    ],
)
def test_rows_of_every_kind(
    lens: list[int], query_lens: list[int], num_decode: int, dtype: torch.dtype, device: str
) -> None:
    check(lens, query_lens, num_decode, dtype, device)


@settings(max_examples=40, deadline=None)
@given(
    decode=st.lists(st.integers(1, 70), max_size=5),
    prefill=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=3),
)
def test_random_mixed_batches(decode: list[int], prefill: list[tuple[int, int]]) -> None:
    if decode or prefill:
        lens = decode + [new + cached for new, cached in prefill]
        check(lens, [1] * len(decode) + [new for new, _ in prefill], len(decode), torch.float32, "cpu")


def test_long_chunks_are_attended_in_blocks() -> None:
    check([700], [600], 0, torch.float32, "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padded", [0, 1, 5])
def test_padded_graph_rows_change_nothing(padded: int, device: str) -> None:
    check([5, 30, 31], [1, 1, 1], 3, torch.float32, device, in_graph=True, padded=padded)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.sampled_from([1, 16, 64]))
def test_groups_hold_each_row_once_with_little_padding(lens: list[int], page_size: int) -> None:
    groups = group_by_length(lens, page_size)
    assert sorted(row for group in groups for row in group) == list(range(len(lens)))
    for group in groups:
        real, longest = sum(lens[row] for row in group), max(lens[row] for row in group)
        assert longest * len(group) <= 1.25 * real + len(group) * page_size
    if len(groups) == 1:
        assert groups[0] == sorted(groups[0])  # a single group means all rows in order

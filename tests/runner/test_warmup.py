"""Which steps a warm-up runs; none of them touches a page, a slot or a position that is somebody's."""

import numpy as np
import pytest
import torch

from benthic.forward import StepInput
from benthic.runner.graphs import RunnerShape
from benthic.runner.warmup import warmup_steps


def shape(device: str, max_seq_len: int = 4096) -> RunnerShape:
    return RunnerShape(max_running=8, max_seq_len=max_seq_len, page_size=16, num_pages=20, device=torch.device(device))


def kinds(steps: tuple[StepInput, ...]) -> list[tuple[int, int, int]]:
    """(decode rows, prefill tokens, context of the prefill) of each step."""
    return [(s.num_decode, int(s.query_lens.sum()), int(s.seq_lens[-1]) if len(s.query_lens) else 0) for s in steps]


def test_a_cpu_compiles_nothing() -> None:
    assert kinds(warmup_steps(shape("cpu"), 512, (2048,))) == [(0, 512, 512), (1, 0, 0)]


@pytest.mark.parametrize(
    ("chunk", "longest", "expected"),
    [
        # a chunk that passes the limit, one that does not, and a model whose contexts never do
        (2560, 4096, [(0, 2048, 2048), (0, 2560, 4096)]),
        (512, 4096, [(0, 512, 512), (0, 512, 2560)]),
        (512, 2048, [(0, 512, 512)]),
    ],
)
def test_a_gpu_meets_both_sides_of_a_limit(chunk: int, longest: int, expected: list[tuple[int, int, int]]) -> None:
    steps = warmup_steps(shape("cuda", longest), chunk, (2048,))
    plain, rest = kinds(steps[:5]), kinds(steps[5:])
    assert plain == [(0, chunk, chunk), (1, 0, 0), (2, 0, 0), (4, 0, 0), (8, 0, 0)]
    assert [step for step in rest if not step[0]] == expected
    mixed = [(rows, 16, 16) for rows in (1, 2, 4, 8)]
    if longest > 2048:
        mixed += [(rows, 16, 2064) for rows in (1, 2, 4, 8)]
    assert [step for step in rest if step[0]] == mixed


def test_everything_is_scratch() -> None:
    for step in warmup_steps(shape("cuda"), 512, (2048,)):
        assert set(step.page_table.ravel()) == {20}
        assert set(step.kv_slots // 16) == {20}
        assert set(step.state_slots) == set(step.sample_slots) == {8}
        assert len(step.state_slots) == step.num_rows == step.num_decode + len(step.query_lens)
        assert step.num_tokens == step.num_decode + step.query_lens.sum() == len(step.positions)
        assert step.positions.max() < step.seq_lens.max() <= step.page_table.shape[1] * 16
        last = np.cumsum([*[1] * step.num_decode, *step.query_lens]) - 1
        assert step.sample_rows.tolist() == last.tolist()

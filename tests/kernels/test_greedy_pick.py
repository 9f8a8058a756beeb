"""greedy_pick: Triton and the reference against a plain search."""

import pytest
import torch

from benthic.kernels.greedy_pick import greedy_pick, greedy_pick_reference
from benthic.kernels.greedy_pick.kernel import BLOCK, greedy_pick_triton
from tests.support.triton_interpreter import DEVICE

RUNS = (greedy_pick_triton, greedy_pick_reference, greedy_pick)


def best_of(row: list[float]) -> int:
    return row.index(max(row))


@pytest.mark.parametrize(("rows", "vocabulary"), [(0, 5), (1, 1), (3, 100), (2, BLOCK), (5, 3 * BLOCK + 7)])
@pytest.mark.parametrize("run", RUNS)
def test_the_lowest_of_the_largest_goes_to_both_places(run: object, rows: int, vocabulary: int) -> None:
    wide = torch.randint(-9, 9, (rows, vocabulary + 3), device=DEVICE).float()  # ties everywhere
    logits = wide[:, :vocabulary]
    slots = torch.randperm(rows + 4, device=DEVICE)[:rows]
    tokens = torch.full((rows + 1,), -1, dtype=torch.int64, device=DEVICE)
    last = torch.full((rows + 4,), -1, dtype=torch.int64, device=DEVICE)
    run(logits, slots, tokens[:rows], last)
    expected = [best_of(row) for row in logits.tolist()]
    assert tokens.tolist() == [*expected, -1]
    assert last[slots].tolist() == expected
    assert (last == -1).sum() == 4


@pytest.mark.parametrize("run", RUNS)
def test_a_row_of_forbidden_tokens_alone_still_gives_one(run: object) -> None:
    tokens, last = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    run(torch.full((1, 2 * BLOCK), float("-inf"), device=DEVICE), torch.ones_like(tokens), tokens, last)
    assert tokens.tolist() == [0]


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="greedy_pick"):
        greedy_pick(torch.zeros(2, 3), torch.zeros(1).long(), torch.zeros(2).long(), torch.zeros(4).long())

"""What ranks compare before they trust each other."""

import pytest

from benthic.common.errors import ConfigError
from benthic.parallel.launch import Ranks, compare, versions
from benthic.parallel.layout import ParallelLayout
from tests.support.thread_ranks import ThreadCollectives, run_ranks


def compared(group: ThreadCollectives, facts: dict[str, str]) -> str:
    """What a rank that states these facts is told: nothing, or why it can't start."""
    layout = ParallelLayout(rank=group.rank, cp_size=group.size)
    try:
        compare(Ranks(layout, group, group, group), facts)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_that_state_the_same_go_on() -> None:
    assert run_ranks(3, lambda group: compared(group, versions() | {"page size": "16"})) == [""] * 3


@pytest.mark.parametrize("facts", [{"page size": "64"}, {}, {"page size": "16", "weights": "other"}])
def test_a_rank_that_differs_names_itself_and_both_values(facts: dict[str, str]) -> None:
    stated = [{"page size": "16"}, {"page size": "16"}, facts]
    told = run_ranks(3, lambda group: compared(group, stated[group.rank]))
    assert told[:2] == ["", ""]
    assert told[2].startswith("rank 2 differs from rank 0 in ")
    name = "weights" if "weights" in facts else "page size"
    here, there = facts.get(name, "none"), stated[0].get(name, "none")
    assert f"{name}: {here} here, {there} there" in told[2]

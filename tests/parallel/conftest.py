"""Processes that are ranks, shared by all tests of a run: starting them takes longer than most tests."""

from collections.abc import Iterator

import pytest

from tests.support.gloo_ranks import GlooRanks


@pytest.fixture(scope="session", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooRanks]:
    with GlooRanks(request.param, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks

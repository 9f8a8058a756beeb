"""Sizes left out: derived with a reason, refused with both numbers."""

import pytest

from benthic.common.errors import CapacityError, ConfigError
from benthic.config import EngineConfig, options_from_mapping, resolve
from benthic.engine.derive import Machine, derive

GIB = 1 << 30


def config(**options: object) -> EngineConfig:
    return resolve(options_from_mapping(options, "test"), {}).engine


def machine(*, gpu: bool = False, available: int = 16 * GIB, page: int = 1 << 20, positions: int = 8192) -> Machine:
    return Machine(on_gpu=gpu, available_bytes=available, bytes_per_page=page, model_max_position=positions)


def test_a_cpu_takes_a_quarter_of_memory_and_no_more_than_all_contexts_need() -> None:
    assert derive(config(), machine(available=8 * GIB)).l1_pages == 2 * 1024 - 1
    small = derive(config(max_context=128, max_running=2), machine())
    assert small.l1_pages == 4
    assert small.limit_reason == "--max-context"


def test_a_gpu_takes_most_of_what_is_left() -> None:
    sizes = derive(config(), machine(gpu=True, available=100 * GIB))
    assert sizes.l1_pages == 85 * 1024 - 1
    assert sizes.chunk_tokens == 8192
    assert sizes.l1_free_pages == 128


def test_the_request_limit_is_what_l1_holds() -> None:
    sizes = derive(config(l1_pages=10, page_size=16), machine())
    assert sizes.max_request_tokens == 160
    assert "10 pages" in sizes.limit_reason
    assert sizes.l1_free_pages == 2  # a quarter of a tiny L1, not a whole chunk


def test_every_derived_value_has_a_row_with_a_reason() -> None:
    table = derive(config(), machine()).table
    names = [row.name for row in table]
    assert {"--max-context", "--max-running", "--chunk-tokens", "L1", "--l1-free-pages", "request limit"} <= set(names)
    assert all(row.value and row.reason for row in table)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"max_context": 9000}, ConfigError, "9000.*8192"),
        ({"l1_size": "2MiB"}, CapacityError, "2.00 MiB holds 1 pages"),
        ({"l1_pages": 8, "l1_free_pages": 8}, ConfigError, "L1 has 8 pages"),
    ],
)
def test_sizes_that_cannot_be_are_refused(options, kind, words) -> None:
    with pytest.raises(kind, match=words):
        derive(config(**options), machine())


def test_too_little_memory_names_what_a_page_takes() -> None:
    with pytest.raises(CapacityError, match="not enough memory for L1"):
        derive(config(), machine(available=8 << 20))

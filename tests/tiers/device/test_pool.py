"""The L1 pool's shape, and that it is refused before memory runs out."""

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benthic.common.errors import CapacityError
from benthic.tiers.device.pool import allocate_pool, available_memory, bytes_per_page

SHAPE: dict[str, Any] = {"num_layers": 2, "page_size": 16, "num_kv_heads": 3, "head_dim": 8, "dtype": torch.float32}
CPU = torch.device("cpu")


def test_the_pool_is_zeroed_and_has_a_scratch_page() -> None:
    pool = allocate_pool(**SHAPE, num_pages=5, device=CPU)
    assert pool.shape == (2, 6, 2, 16, 3, 8)
    assert not pool.any()
    assert pool.nbytes == 6 * bytes_per_page(**SHAPE) == 6 * 2 * 2 * 16 * 3 * 8 * 4


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers() -> None:
    page = bytes_per_page(**SHAPE)
    with pytest.raises(CapacityError) as caught:
        allocate_pool(**SHAPE, num_pages=10, device=CPU, available=8 * page)
    assert str(caught.value) == (
        "L1 does not fit on cpu: 10 pages and a scratch page of 6.00 KiB need 66.00 KiB, 48.00 KiB free; "
        "at most 7 would fit; lower --l1-pages or --l1-size"
    )
    with pytest.raises(CapacityError, match="free memory for at least two pages"):
        allocate_pool(**SHAPE, num_pages=10, device=CPU, available=page)
    with pytest.raises(CapacityError, match="lower --l1-pages or --l1-size"):
        allocate_pool(**SHAPE, num_pages=1 << 40, device=CPU)
    assert allocate_pool(**SHAPE, num_pages=7, device=CPU, available=8 * page).shape[1] == 8


@pytest.mark.parametrize(
    ("limit", "usage", "statistics", "cache"),
    [
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ],
)
def test_a_container_limit_counts(tmp_path: Path, limit: str, usage: str, statistics: str, cache: str) -> None:
    for name, text in ((limit, "5000000\n"), (usage, "2000000\n")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory(CPU, tmp_path) == 3_000_000
    # file cache is given up when memory is wanted
    (tmp_path / statistics).write_text(f"anon 900000\n{cache} 700000\nactive_file 5\n")
    assert available_memory(CPU, tmp_path) == 3_700_000
    (tmp_path / limit).write_text("max\n")
    assert 3_000_000 < available_memory(CPU, tmp_path) <= psutil.virtual_memory().total

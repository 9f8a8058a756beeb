"""The L1 pool's shape, and that it is refused before memory runs out."""

from pathlib import Path

import psutil
import pytest
import torch

from benthic.attention.payload import Payload
from benthic.common.errors import CapacityError
from benthic.tiers.device.pool import allocate_pools, available_memory, bytes_per_page

KV = Payload("target_kv", (0, 1), (2, 16, 3, 8), torch.float32)
KEYS = Payload("index_k", (1,), (16 * 12,), torch.uint8)
CPU = torch.device("cpu")


def test_pools_are_zeroed_and_have_a_scratch_page() -> None:
    pools = allocate_pools((KV, KEYS), 5, CPU)
    assert {name: (tuple(pool.shape), pool.dtype) for name, pool in pools.items()} == {
        "target_kv": ((2, 6, 2, 16, 3, 8), torch.float32),
        "index_k": ((1, 6, 192), torch.uint8),
    }
    assert not any(pool.any() for pool in pools.values())
    assert sum(pool.nbytes for pool in pools.values()) == 6 * bytes_per_page((KV, KEYS))
    assert bytes_per_page((KV, KEYS)) == 2 * 2 * 16 * 3 * 8 * 4 + 192


def test_pools_that_do_not_fit_together_are_refused_with_the_numbers() -> None:
    page = bytes_per_page([KV])
    with pytest.raises(CapacityError) as caught:
        allocate_pools([KV], 10, CPU, available=8 * page)
    assert str(caught.value) == (
        "L1 does not fit on cpu: 10 pages and a scratch page of 6.00 KiB need 66.00 KiB, 48.00 KiB free; "
        "at most 7 would fit; lower --l1-pages or --l1-size"
    )
    with pytest.raises(CapacityError, match="free memory for at least two pages"):
        allocate_pools([KV], 10, CPU, available=page)
    with pytest.raises(CapacityError, match="lower --l1-pages or --l1-size"):
        allocate_pools([KV], 1 << 40, CPU)
    assert allocate_pools([KV], 7, CPU, available=8 * page)["target_kv"].shape[1] == 8
    with pytest.raises(CapacityError, match="at most 6 would fit"):
        allocate_pools([KV, KEYS], 7, CPU, available=8 * page)  # one check for all


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

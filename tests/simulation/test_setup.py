"""What a replay refuses to assume, and what it derives."""

from typing import Any

import pytest

from benthic.common.errors import ConfigError
from benthic.simulation import Setup


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"l1_pages": 0}, "--l1-pages 0: must be at least 1; leave it out"),
        ({"l2_pages": -1}, "--l2-pages -1: must be at least 0"),
        ({"l3_pages": -5}, "--l3-pages -5"),
        ({"owners": 0}, "--owners 0"),
        ({"page_tokens": 0}, "--page-tokens 0"),
        ({"page_bytes": 0}, "--page-bytes 0"),
        ({"max_running": 0}, "--max-running 0"),
        ({"speed": 0.0}, "--speed 0: must be a number above 0"),
        ({"disk_gb_per_s": float("nan")}, "--disk-gb-per-s nan"),
        ({"prefill_tokens_per_s": float("inf")}, "--prefill-tokens-per-s inf"),
        ({"l2_policy": "lru"}, "--l2-policy lru: must be one of write_through,"),
        ({"l2_pages": 0, "l3_pages": 9}, "--l3-pages 9 needs a host tier"),
        ({"l1_pages": 8, "l1_free_pages": 8}, "--l1-free-pages 8: L1 has 8 pages"),
    ],
)
def test_what_can_not_be_names_its_flag(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        Setup(**given)
    assert words in str(error.value)


def test_left_out_has_no_limit_and_0_is_off() -> None:
    assert (Setup().has_l2, Setup().has_l3) == (True, True)
    assert (Setup(l2_pages=0).has_l2, Setup(l2_pages=0).has_l3) == (False, False)
    assert (Setup(l3_pages=0).has_l2, Setup(l3_pages=0).has_l3) == (True, False)


def test_l1_keeps_room_for_a_chunk_as_the_engine_does() -> None:
    assert Setup(l1_pages=1000).watermark == 16
    assert Setup(l1_pages=1000, owners=4).watermark == 4
    assert Setup(l1_pages=20).watermark == 5
    assert Setup(l1_pages=20, l1_free_pages=1).watermark == 1
    assert Setup().watermark == 0


def test_rates_become_times() -> None:
    setup = Setup(page_bytes=10_000_000, copy_gb_per_s=10, disk_gb_per_s=1, prefill_tokens_per_s=512)
    assert (setup.copy_us_per_page, setup.disk_us_per_page, setup.compute_us_per_page) == (1000, 10_000, 1_000_000)
    assert setup.service_us(1024, 60) == 4_000_000

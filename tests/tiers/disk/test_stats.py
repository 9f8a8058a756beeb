"""The measured time of a page, which decides whether a reload is worth while."""

from benthic.tiers.disk.stats import RATE_HOLDS_S, Counts


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def read(counts: Counts, clock: Clock, seconds: float) -> None:
    began = clock.now
    clock.now += seconds
    counts.page_read(4096, began)


def test_nothing_read_is_no_rate():
    assert Counts(Clock()).us_per_page_read == 0


def test_pages_that_overlap_share_the_time():
    clock = Clock()
    counts = Counts(clock)
    began = clock.now
    for _ in range(200):
        clock.now += 0.002
        counts.page_read(4096, began)
    assert 1900 < counts.us_per_page_read < 2100


def test_a_disk_that_hung_is_tried_again():
    """Its pages cost more than to compute them, so that none is read: the rate would never change again."""
    clock = Clock()
    counts = Counts(clock)
    read(counts, clock, 8.0)
    assert counts.us_per_page_read == 8_000_000
    clock.now += RATE_HOLDS_S
    assert counts.us_per_page_read == 0
    read(counts, clock, 0.001)
    assert counts.us_per_page_read == 1000

"""The prefill rate that a reload is weighed against is that of whole chunks."""

from benthic.engine.rates import WINDOW, PrefillRate


def test_nothing_is_known_before_a_long_step() -> None:
    rate = PrefillRate()
    assert rate.us_per_page(64) == 0
    rate.measured(63, 1.0)
    assert rate.us_per_page(64) == 0
    rate.measured(64, 0.064)
    assert rate.us_per_page(64) == 64_000


def test_what_hits_leave_to_compute_does_not_count_beside_chunks() -> None:
    rate = PrefillRate()
    rate.measured(100, 0.040)  # before any chunk it is all there is
    assert rate.us_per_page(10) == 4000
    for _ in range(3):
        rate.measured(8192, 0.8192)
    for _ in range(10 * WINDOW):
        rate.measured(64, 0.040)
        rate.measured(4095, 1.0)
    assert rate.us_per_page(64) == 6400
    rate.measured(4096, 0.4096 * 3)
    assert len(rate.recent) == 4


def test_the_median_forgets_steps_that_compiled() -> None:
    rate = PrefillRate()
    for seconds in (30.0, 9.0, *[1.0] * WINDOW):
        rate.measured(1000, seconds)
    assert rate.us_per_page(1) == 1000

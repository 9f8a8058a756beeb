"""Which of a payload's own layers belong to which layers of the model, and where payloads lie in a frame."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benthic.tiers.host.layout import FrameLayout, PayloadLayout

LAYERS = st.sets(st.integers(0, 40), min_size=1).map(lambda layers: tuple(sorted(layers)))


@given(layers=LAYERS, first=st.integers(0, 45), count=st.integers(0, 45))
def test_a_range_of_the_model_s_layers_holds_just_the_own_layers_that_it_computes(
    layers: tuple[int, ...], first: int, count: int
) -> None:
    start, stop = PayloadLayout("index_k", layers, 8).own_layers(range(first, first + count))
    expected = [own for own, layer in enumerate(layers) if first <= layer < first + count]
    assert list(range(start, stop)) == expected


@given(layers=LAYERS, size=st.integers(1, 41))
def test_groups_of_layers_hold_each_own_layer_once(layers: tuple[int, ...], size: int) -> None:
    payload = PayloadLayout("index_k", layers, 8)
    spans = [payload.own_layers(range(first, first + size)) for first in range(0, layers[-1] + 1, size)]
    assert [own for start, stop in spans for own in range(start, stop)] == list(range(payload.num_layers))


def test_a_frame_holds_the_payloads_in_order_and_ends_at_4_kib() -> None:
    kv = PayloadLayout("target_kv", tuple(range(78)), 36864)
    keys = PayloadLayout("index_k", (0, 1, 2, *range(6, 75, 4)), 8448)  # as GLM-5.2 has them
    layout = FrameLayout((kv, keys))
    assert (layout.offset(kv), layout.offset(keys)) == (0, 78 * 36864)
    assert layout.payload_bytes == 78 * 36864 + 21 * 8448
    assert layout.frame_bytes % 4096 == 0
    assert 0 <= layout.frame_bytes - layout.payload_bytes < 4096
    assert layout.num_layers == 78
    assert [keys.own_layers(range(first, first + 20)) for first in range(0, 80, 20)] == [
        (0, 7),
        (7, 12),
        (12, 17),
        (17, 21),
    ]


@pytest.mark.parametrize("layers", [(), (1, 1), (2, 1), (-1, 0)])
def test_layers_must_rise(layers: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        PayloadLayout("target_kv", layers, 8)

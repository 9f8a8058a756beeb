"""How a page lies in a host frame: page-first, so that one frame is also exactly what a disk slot holds.

frame = payload 0 | payload 1 | … | padding to 4 KiB
payload = layer 0's slice | layer 1's slice | …        a slice is one page of one layer

A payload need not come from every layer of the model: index keys exist only where a selection is computed.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from benthic.common.layout import ceil_div

FRAME_ALIGNMENT = 4096  # bytes; what O_DIRECT wants of address and length


@dataclass(frozen=True, slots=True)
class PayloadLayout:
    """One kind of per-page state. `layers`: the layers of the model that compute the payload's own layers, rising."""

    name: str  # target_kv, index_k or draft_kv
    layers: tuple[int, ...]
    slice_bytes: int

    def __post_init__(self) -> None:
        assert self.layers
        assert self.layers[0] >= 0
        assert all(below < above for below, above in pairwise(self.layers))
        assert self.slice_bytes > 0

    @property
    def num_layers(self) -> int:
        """Its own layers."""
        return len(self.layers)

    @property
    def num_bytes(self) -> int:
        """Of a page, in all layers."""
        return self.num_layers * self.slice_bytes

    def own_layers(self, layers: range) -> tuple[int, int]:
        """Which of the payload's own layers, as [first, stop), come from these layers of the model."""
        return bisect_left(self.layers, layers.start), bisect_left(self.layers, layers.stop)


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """The payloads of a page, in their order in the frame."""

    payloads: tuple[PayloadLayout, ...]

    def __post_init__(self) -> None:
        assert self.payloads
        assert len({payload.name for payload in self.payloads}) == len(self.payloads)

    @property
    def payload_bytes(self) -> int:
        """What the payloads take together."""
        return sum(payload.num_bytes for payload in self.payloads)

    @property
    def frame_bytes(self) -> int:
        """`payload_bytes`, rounded up to whole 4 KiB."""
        return ceil_div(self.payload_bytes, FRAME_ALIGNMENT) * FRAME_ALIGNMENT

    @property
    def num_layers(self) -> int:
        """Layers of the model, up to the last one that a payload comes from."""
        return max(payload.layers[-1] + 1 for payload in self.payloads)

    def offset(self, payload: PayloadLayout) -> int:
        """Where the payload begins in the frame, in bytes."""
        return sum(before.num_bytes for before in self.payloads[: self.payloads.index(payload)])

"""How a page lies in a host frame: page-first, so that one frame is also exactly what a disk slot holds.

frame = payload 0 | payload 1 | … | padding to 4 KiB
payload = layer 0's slice | layer 1's slice | …        a slice is one page of one layer
"""

from dataclasses import dataclass

from benthic.common.layout import ceil_div

FRAME_ALIGNMENT = 4096  # bytes; what O_DIRECT wants of address and length


@dataclass(frozen=True, slots=True)
class PayloadLayout:
    """One kind of per-page state. `first_layer`: the layer of the model that computes the payload's layer 0."""

    name: str  # target_kv, index_k or draft_kv
    num_layers: int
    slice_bytes: int
    first_layer: int = 0

    def __post_init__(self) -> None:
        assert self.num_layers > 0
        assert self.slice_bytes > 0
        assert self.first_layer >= 0

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.slice_bytes


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
        """Layers of the model that the payloads come from."""
        return max(payload.first_layer + payload.num_layers for payload in self.payloads)

    def offset(self, payload: PayloadLayout) -> int:
        """Where the payload begins in the frame, in bytes."""
        return sum(before.num_bytes for before in self.payloads[: self.payloads.index(payload)])

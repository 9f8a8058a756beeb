"""Typed doors to torch's CUDA streams and events, whose constructors have no annotations."""

import torch


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of its own on the device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it unannotated


def record_event() -> torch.cuda.Event:
    """An event behind everything that the current stream has queued."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    event.record()
    return event

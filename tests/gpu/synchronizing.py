"""A stretch of a test in which any call that makes the host wait for the device raises."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def forbidden() -> Iterator[None]:
    """Inside it a synchronizing call raises, on every thread."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")

"""Everything here needs a CUDA device; `python -m pytest tests/gpu -m gpu -q` runs it all."""

import pytest
import torch


@pytest.fixture(autouse=True)
def cuda() -> torch.device:
    """The device; skips where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())

"""`python -m tests.support.rank_fault RANK`: the real engine process, which as rank RANK can't read the weights."""

import sys
from typing import Any

from benthic.common.errors import ModelError
from benthic.engine import build
from benthic.engine.process import run_rank
from benthic.messages.start import decode_start


def unreadable(*_: Any) -> Any:
    """In place of reading the weights."""
    raise ModelError("model.safetensors: can't be read: Input/output error; copy the checkpoint again")


if __name__ == "__main__":
    order = decode_start(sys.stdin.buffer.readline())
    if order.rank == int(sys.argv[1]):
        build.load_model = unreadable
    sys.exit(run_rank(order, lifeline=True))

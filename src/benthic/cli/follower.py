"""`benthic serve` where torchrun started it as a rank other than the first: no HTTP, no child, an engine rank in this
process. The first rank's process is the server; it says where to send to when the ranks have met."""

from collections.abc import Callable

from benthic.config import EngineConfig, Launch
from benthic.messages.start import EngineStart, ModelSource


def run_engine_rank(order: EngineStart) -> int:
    """Run the rank until the first one ends it. Returns the exit code."""
    from benthic.engine.process import run_rank  # loads the engine

    return run_rank(order, lifeline=False)  # standard input is the launcher's, and says nothing of the server


def follow(
    config: EngineConfig,
    launch: Launch,
    find_model: Callable[[str], ModelSource],
    run: Callable[[EngineStart], int] = run_engine_rank,
) -> int:
    """Find the model on this host and run the rank. Returns the exit code. Raises ModelError."""
    return run(
        EngineStart(
            config=config,
            source=find_model(config.model.model),
            recv_addr="",
            send_addr="",
            rank=launch.rank,
            local_rank=launch.local_rank,
            local_size=launch.local_size,
            rendezvous="env://",
        )
    )

"""`benthic serve`: check the flags, take the port, lock the disk floor, then hand over to the server's lifecycle."""

import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from benthic.cli.follower import follow, run_engine_rank
from benthic.cli.options import with_options
from benthic.config import read_launch, resolve
from benthic.observability.logs import setup_logging
from benthic.server.floor_lock import floor_locked
from benthic.server.listen import listen, raise_file_limit

if TYPE_CHECKING:
    from benthic.messages.start import EngineStart
    from benthic.server.lifecycle import Parts


def register(app: typer.Typer) -> None:
    """Add `serve` to `app`."""

    @app.command()
    @with_options(server=True)
    def serve(options: Any) -> None:
        """Serve MODEL over an OpenAI-compatible HTTP API.

        Without MODEL a small chat model is served, which runs on any CPU. What you leave out is derived from the
        machine, and the start-up table says from what. With --l2-size, --l3-dir and --l3-size the cache outlives
        restarts. Ctrl-C or SIGTERM lets running requests and writes to disk finish (--grace-s); a second one ends at
        once.

        With --cp N or --tp N the engine runs in N processes of this host (ranks), a GPU each where there are GPUs. For
        several hosts start the same command on each of them under torchrun.

        Example: benthic serve smollm2-135m --port 8080 --max-context 4096

        Example: benthic serve /models/long-context --cp 4 --l2-size 256GiB

        Example: torchrun --nproc-per-node 4 -m benthic serve /models/long-context --cp 4
        """
        start(options)


def start(
    options: Any, parts: "Parts | None" = None, run_follower: "Callable[[EngineStart], int]" = run_engine_rank
) -> None:
    """Serve until a signal, or run one rank where torchrun started us as another than the first. `parts` and
    `run_follower` are what a test replaces. Raises BenthicError."""
    # Until the server has its own handlers there is nothing to finish; a signal just ends the start, in order.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: sys.exit(0))
    config = resolve(options)
    launch = read_launch(config.engine, os.environ)
    setup_logging(config.server.log_level)
    if launch is not None and launch.rank > 0:
        from benthic.server.loading import find_model

        sys.exit(follow(config.engine, launch, parts.find_model if parts else find_model, run_follower))
    raise_file_limit()
    sock = listen(config.server.host, config.server.port)
    with floor_locked(config.engine.cache.disk) as lock_fds:
        # imported here: neither `benthic --help` nor a port in use should wait for a web server's libraries
        from benthic.server.lifecycle import run_server
        from benthic.server.terminal import Terminal

        run_server(config, sock, Terminal(), parts, lock_fds, launch)

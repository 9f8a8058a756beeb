"""`benthic serve`: check the flags, take the port, lock the disk floor, then hand over to the server's lifecycle."""

import signal
import sys
from typing import TYPE_CHECKING, Any

import typer

from benthic.cli.options import with_options
from benthic.config import resolve
from benthic.observability.logs import setup_logging
from benthic.server.floor_lock import floor_locked
from benthic.server.listen import listen, raise_file_limit

if TYPE_CHECKING:
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

        Example: benthic serve smollm2-135m --port 8080 --max-context 4096
        """
        start(options)


def start(options: Any, parts: "Parts | None" = None) -> None:
    """Serve until a signal; `parts` are what a test replaces. Raises BenthicError."""
    # Until the server has its own handlers there is nothing to finish; a signal just ends the start, in order.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: sys.exit(0))
    config = resolve(options)
    setup_logging(config.server.log_level)
    raise_file_limit()
    sock = listen(config.server.host, config.server.port)
    with floor_locked(config.engine.cache.disk) as lock_fds:
        # imported here: neither `benthic --help` nor a port in use should wait for a web server's libraries
        from benthic.server.lifecycle import run_server
        from benthic.server.terminal import Terminal

        run_server(config, sock, Terminal(), parts, lock_fds)

"""Log set-up of a process: one line an event on standard error, level and part first."""

import logging
import sys


def setup_logging(level: str) -> None:
    """Send the package's records to standard error from `level` (debug, info, warning or error) on; others from
    warning on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("benthic").setLevel(level.upper())

"""Whether Triton interprets is settled here, before anything can import it; tests/kernels does the rest."""

import os
from pathlib import Path

_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # asking torch would cost every test session its import

if not any(path.exists() for path in _DRIVERS):
    os.environ.setdefault("TRITON_INTERPRET", "1")

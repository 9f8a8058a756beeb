"""Run Python code as an ordinary user, which is what permissions are about; a test that runs as root changes over."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

_NOBODY = 65534


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that any user can reach and that the ordinary user owns; pytest's own are root's alone."""
    folder = Path(mkdtemp(prefix="benthic-test-"))
    try:
        folder.chmod(0o755)
        if os.geteuid() == 0:
            os.chown(folder, _NOBODY, _NOBODY)
        yield folder
    finally:
        rmtree(folder, ignore_errors=True)


def run_as_user(imports: str, code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run `code` with `args`; its output is captured. `imports` come before: root's files may be closed then."""
    drop = f"import os\nif os.geteuid() == 0: os.setgroups([]); os.setgid({_NOBODY}); os.setuid({_NOBODY})"
    command = [sys.executable, "-c", "\n".join((imports, drop, code)), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

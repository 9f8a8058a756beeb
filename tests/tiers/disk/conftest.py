"""Fixtures of the disk floor's tests."""

from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import pytest

_MEMORY = Path("/dev/shm")


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one, for tests that make hundreds of floors and not one that must last."""
    if not _MEMORY.is_dir():
        yield tmp_path
        return
    folder = Path(mkdtemp(prefix="benthic-test-", dir=_MEMORY))
    yield folder
    rmtree(folder, ignore_errors=True)

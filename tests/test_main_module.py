"""`python -m benthic` is the command line."""

import subprocess
import sys


def test_python_m_benthic_prints_the_version() -> None:
    done = subprocess.run([sys.executable, "-m", "benthic", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("benthic 0.")

"""`python -m tests.support.faulty_engine RULES`: the real engine process over a disk whose faults a file describes.

The file is read again before every call of the I/O seam, so a test switches faults on and off while the engine runs.
"""

import errno
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benthic.engine.process import main
from tests.support.faulty_disk import Call, FaultyDisk, error

LOOK_EVERY_S = 0.02  # a delay ends early when its rule goes


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Calls of the method `name` whose path contains `path` wait `delay_s` and then fail with `errno`, if one is
    named. `direct`: only those with O_DIRECT."""

    name: str
    path: str = ""
    errno: str = ""  # e.g. "EIO"
    delay_s: float = 0.0
    direct: bool = False

    def fits(self, call: Call) -> bool:
        return call.name == self.name and self.path in str(call.path) and (call.direct or not self.direct)


class Rules:
    """The file of rules, as the test writes it and the engine reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            self.set()

    def set(self, *rules: Rule) -> None:
        """From now on these, and no others."""
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps([asdict(rule) for rule in rules]))
        os.replace(new, self.path)

    def read(self) -> list[Rule]:
        """What holds now."""
        return [Rule(**fields) for fields in json.loads(self.path.read_text())]

    def fault(self, call: Call) -> OSError | None:
        """What happens to a call: see `FaultyDisk`."""
        rule = next((rule for rule in self.read() if rule.fits(call)), None)
        if rule is None:
            return None
        end = time.monotonic() + rule.delay_s
        while time.monotonic() < end and rule in self.read():
            time.sleep(LOOK_EVERY_S)
        return error(getattr(errno, rule.errno)) if rule.errno else None


if __name__ == "__main__":
    sys.exit(main(FaultyDisk(Rules(Path(sys.argv[1])).fault)))

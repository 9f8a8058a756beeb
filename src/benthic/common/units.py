"""Sizes as people write them (`64GiB`, `512MiB`, `1.5g`) and as we print them."""

import re

from benthic.common.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 10**3,
    "m": MIB, "mib": MIB, "mb": 10**6,
    "g": GIB, "gib": GIB, "gb": 10**9,
    "t": 1 << 40, "tib": 1 << 40, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str | int, name: str = "size") -> int:
    """Bytes in `text`; an integer is taken as bytes. Raises ConfigError that names `name` and shows an example."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{name}: {text!r} is not a size; write a number and a unit, e.g. 64GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_size(num_bytes: int) -> str:
    """`num_bytes` with the largest binary unit that leaves at least 1, e.g. `2.74 MiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} B"

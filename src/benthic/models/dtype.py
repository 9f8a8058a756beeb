"""Which arithmetic `--dtype auto` means on a device."""

from pathlib import Path

import torch

from benthic.common.errors import ConfigError

_BF16_FLAGS = ("avx512_bf16", "amx_bf16")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(name: str, device: torch.device, cpu_flags: frozenset[str] | None = None) -> tuple[torch.dtype, str]:
    """The dtype for `--dtype NAME` and the reason in words. `cpu_flags` replaces /proc/cpuinfo. Raises ConfigError."""
    if name != "auto":
        if name not in _DTYPES:
            raise ConfigError(f"--dtype {name}: must be auto or one of {', '.join(_DTYPES)}")
        if name == "float16" and device.type == "cpu":
            raise ConfigError("--dtype float16: CPUs have no fast float16 products; take float32, bfloat16 or auto")
        return _DTYPES[name], "as given by --dtype"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return torch.bfloat16, f"compute capability {major}.{minor} has bfloat16 tensor cores"
        return torch.float16, f"compute capability {major}.{minor} has no bfloat16 tensor cores"
    flags = read_cpu_flags() if cpu_flags is None else cpu_flags
    found = [flag for flag in _BF16_FLAGS if flag in flags]
    if found:
        return torch.bfloat16, f"this CPU has bfloat16 products ({', '.join(found)})"
    return (
        torch.float32,
        "this CPU has no bfloat16 products (avx512_bf16 or amx_bf16), where bfloat16 is slower than float32",
    )


def read_cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The first processor's feature flags; empty where the file can't be read."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return frozenset(value.split())
    return frozenset()

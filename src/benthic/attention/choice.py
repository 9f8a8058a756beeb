"""Attention backends by name, and which one to take."""

import importlib

import torch

from benthic.attention.interface import AttentionBackend
from benthic.common.errors import ConfigError

# imported only when chosen: a machine without the package that one needs can still use the others
_BACKENDS: dict[str, tuple[str, str]] = {
    "torch": ("benthic.attention.torch_backend", "TorchBackend"),
    "triton": ("benthic.attention.triton_backend", "TritonBackend"),
}
_PREFERRED = {"cpu": ("torch",), "cuda": ("triton", "torch")}


def choose(name: str | None, device: torch.device, dtype: torch.dtype, head_dim: int) -> type[AttentionBackend]:
    """The backend `name`, or the best that device, dtype and head size allow. Raises ConfigError that says why not."""
    if name is not None:
        if name not in _BACKENDS:
            raise ConfigError(f"--attention-backend {name}: must be one of {', '.join(_BACKENDS)}")
        found = _load(name, device, dtype, head_dim)
        if isinstance(found, str):
            raise ConfigError(
                f"--attention-backend {name} can't be used: {found}; leave the flag out to have one chosen"
            )
        return found
    refusals = []
    for candidate in _PREFERRED.get(device.type, tuple(_BACKENDS)):
        found = _load(candidate, device, dtype, head_dim)
        if not isinstance(found, str):
            return found
        refusals.append(f"{candidate}: {found}")
    raise ConfigError(f"no attention backend for {device} with {dtype} and head size {head_dim}: {'; '.join(refusals)}")


def _load(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> type[AttentionBackend] | str:
    """The class, or in words why it can't be used."""
    module, attribute = _BACKENDS[name]
    try:
        backend: type[AttentionBackend] = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        return f"it can't be imported ({error})"
    return backend.unsupported(device, dtype, head_dim) or backend

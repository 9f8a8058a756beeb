"""Attention backends by name, for each kind of attention, and which one to take."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from benthic.attention.interface import Attention, AttentionBackend, AttentionSpec
from benthic.attention.latent import LatentBackend, LatentSpec
from benthic.attention.paired import PairedBackend, PairedLatentBackend
from benthic.attention.sharded import ShardedBackend
from benthic.attention.sharded_latent import ShardedLatentBackend
from benthic.common.errors import ConfigError
from benthic.parallel.collectives import Collectives

Spec = AttentionSpec | LatentSpec
Backend = type[AttentionBackend] | type[LatentBackend]

# imported only when chosen: a machine without the package that one needs can still use the others
_GROUPED: dict[str, tuple[str, str]] = {
    "torch": ("benthic.attention.torch_backend", "TorchBackend"),
    "triton": ("benthic.attention.triton_backend", "TritonBackend"),
}
_LATENT: dict[str, tuple[str, str]] = {
    "torch": ("benthic.attention.latent_torch", "TorchLatentBackend"),
    "triton": ("benthic.attention.latent_triton", "TritonLatentBackend"),
}
_PREFERRED = {"cpu": ("torch",), "cuda": ("triton", "torch")}


@dataclass(frozen=True, slots=True)
class Pair:
    """What steps with prefill rows take, and what steps that only decode do; two classes of one family."""

    prefill: Backend
    decode: Backend

    @property
    def name(self) -> str:
        """As the flag is written."""
        if self.prefill is self.decode:
            return self.prefill.name
        return f"prefill={self.prefill.name},decode={self.decode.name}"


def choose(name: str | None, spec: Spec) -> Backend:
    """The backend `name`, or the best that the spec allows. Raises ConfigError that says why not."""
    known = _GROUPED if isinstance(spec, AttentionSpec) else _LATENT
    if name is not None:
        if name not in known:
            raise ConfigError(f"--attention-backend {name}: must be one of {', '.join(known)}")
        found = _load(known[name], spec)
        if isinstance(found, str):
            raise ConfigError(
                f"--attention-backend {name} can't be used: {found}; leave the flag out to have one chosen"
            )
        return found
    refusals = []
    for candidate in _PREFERRED.get(spec.device.type, tuple(known)):
        found = _load(known[candidate], spec)
        if not isinstance(found, str):
            return found
        refusals.append(f"{candidate}: {found}")
    raise ConfigError(f"no attention backend for {_words(spec)}: {'; '.join(refusals)}")


def choose_pair(prefill: str | None, decode: str | None, spec: Spec) -> Pair:
    """A backend for each use, by name or the best; see `choose`."""
    return Pair(choose(prefill, spec), choose(decode, spec))


def make(backend: Backend, spec: Spec, pools: Mapping[str, torch.Tensor]) -> AttentionBackend | LatentBackend:
    """The backend over the pools by payload name. `backend` comes from `choose` with such a spec."""
    if issubclass(backend, AttentionBackend):
        assert isinstance(spec, AttentionSpec)
        return backend(spec, pools["target_kv"])
    assert isinstance(spec, LatentSpec)
    return backend(spec, pools["target_kv"], pools.get("index_k"))


def make_pair(pair: Pair, spec: Spec, pools: Mapping[str, torch.Tensor], group: Collectives | None = None) -> Attention:
    """One backend where the two are the same, else both over the same pools.

    With a `group` of several context-parallel ranks, one over this rank's pools that works with the others': prefill
    rows by `pair.prefill`, decode rows by the kernels of `pair.decode` where it has some, else in plain torch.
    """
    if group is not None and group.size > 1:
        return _sharded(pair, spec, pools, group)
    prefill = make(pair.prefill, spec, pools)
    if pair.decode is pair.prefill:
        return prefill
    decode = make(pair.decode, spec, pools)
    if isinstance(prefill, AttentionBackend):
        assert isinstance(decode, AttentionBackend)
        return PairedBackend(prefill, decode)
    assert isinstance(decode, LatentBackend)
    return PairedLatentBackend(prefill, decode)


def _sharded(pair: Pair, spec: Spec, pools: Mapping[str, torch.Tensor], group: Collectives) -> Attention:
    prefill, decode = pair.prefill, pair.decode
    if issubclass(prefill, AttentionBackend):
        assert issubclass(decode, AttentionBackend)
        assert isinstance(spec, AttentionSpec)
        return ShardedBackend(spec, pools["target_kv"], group, prefill, decode)
    assert issubclass(decode, LatentBackend)
    assert isinstance(spec, LatentSpec)
    return ShardedLatentBackend(spec, pools["target_kv"], pools.get("index_k"), group, prefill, decode)


def _load(place: tuple[str, str], spec: Spec) -> Backend | str:
    """The class, or in words why it can't be used."""
    module, attribute = place
    try:
        backend: Backend = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        return f"it can't be imported ({error})"
    if issubclass(backend, AttentionBackend):
        assert isinstance(spec, AttentionSpec)
        return backend.unsupported(spec.device, spec.dtype, spec.head_dim) or backend
    assert isinstance(spec, LatentSpec)
    return backend.unsupported(spec) or backend


def _words(spec: Spec) -> str:
    if isinstance(spec, AttentionSpec):
        return f"{spec.device} with {spec.dtype} and head size {spec.head_dim}"
    return f"{spec.device} with {spec.dtype} and latents of {spec.rank} + {spec.rope_dim}"

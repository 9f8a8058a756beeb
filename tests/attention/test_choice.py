"""Which attention backend is taken, and what is said where one can't be."""

import dataclasses

import pytest
import torch

from benthic.attention import choice
from benthic.attention.choice import choose, make
from benthic.attention.interface import AttentionSpec
from benthic.attention.latent import IndexSpec, LatentSpec
from benthic.attention.latent_torch import TorchLatentBackend
from benthic.attention.torch_backend import TorchBackend
from benthic.common.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GROUPED = AttentionSpec(
    num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125, page_size=16, dtype=torch.float32, device=CPU,
    max_seq_len=64,
)  # fmt: skip
INDEX = IndexSpec(num_layers=1, num_heads=4, head_dim=32, topk=8, fp8=False)
LATENT = LatentSpec(
    num_layers=2, num_heads=4, rank=32, rope_dim=16, scale=0.125, page_size=16, dtype=torch.float32, device=CPU,
    max_seq_len=64, fp8=False, index=INDEX,
)  # fmt: skip


def test_the_cpu_takes_torch() -> None:
    assert choose(None, GROUPED) is TorchBackend
    assert choose("torch", dataclasses.replace(GROUPED, dtype=torch.bfloat16)) is TorchBackend
    assert choose(None, LATENT) is TorchLatentBackend
    assert choose("torch", LATENT) is TorchLatentBackend


def test_a_backend_is_made_over_the_pools_of_its_family() -> None:
    kv, latents, keys = torch.zeros(2, 3, 2, 16, 2, 64), torch.zeros(2, 3, 16, 48), torch.zeros(1, 3, 16, 32)
    grouped = make(TorchBackend, GROUPED, {"target_kv": kv})
    assert isinstance(grouped, TorchBackend)
    assert grouped.kv is kv
    latent = make(TorchLatentBackend, LATENT, {"target_kv": latents, "index_k": keys})
    assert isinstance(latent, TorchLatentBackend)
    assert latent.latents is latents
    assert latent.index_keys is keys
    dense = make(TorchLatentBackend, dataclasses.replace(LATENT, index=None), {"target_kv": latents})
    assert isinstance(dense, TorchLatentBackend)
    assert dense.index_keys is None


@pytest.mark.parametrize("spec", [GROUPED, LATENT])
def test_an_unknown_name_lists_the_known_ones(spec: AttentionSpec | LatentSpec) -> None:
    with pytest.raises(ConfigError, match="--attention-backend flash: must be one of torch, triton"):
        choose("flash", spec)


@pytest.mark.parametrize(
    ("spec", "names", "other"), [(GROUPED, "_GROUPED", TorchBackend), (LATENT, "_LATENT", TorchLatentBackend)]
)
def test_a_backend_that_can_not_be_imported_says_so(
    spec: AttentionSpec | LatentSpec, names: str, other: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(getattr(choice, names), "triton", ("benthic.attention.not_there", "Backend"))
    with pytest.raises(
        ConfigError, match=r"--attention-backend triton can't be used: it can't be imported \(No module"
    ):
        choose("triton", spec)
    assert choose(None, dataclasses.replace(spec, device=CUDA)) is other  # the next best


class Refusing(TorchBackend):
    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return f"it wants head size 64, not {head_dim}"


class RefusingLatent(TorchLatentBackend):
    @classmethod
    def unsupported(cls, spec: LatentSpec) -> str | None:
        return f"it wants rank 512, not {spec.rank}"


def test_refusals_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benthic.attention.torch_backend.TorchBackend", Refusing)
    monkeypatch.setattr("benthic.attention.latent_torch.TorchLatentBackend", RefusingLatent)
    odd = dataclasses.replace(GROUPED, head_dim=80)
    with pytest.raises(ConfigError, match="torch can't be used: it wants head size 64, not 80; leave the flag out"):
        choose("torch", odd)
    with pytest.raises(
        ConfigError, match=r"no attention backend for cpu with torch\.float32 and head size 80: torch: it wants"
    ):
        choose(None, odd)
    with pytest.raises(
        ConfigError, match=r"no attention backend for cpu with torch\.float32 and latents of 32 \+ 16: torch: it wants"
    ):
        choose(None, LATENT)

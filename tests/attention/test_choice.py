"""Which attention backend is taken, and what is said where one can't be."""

import pytest
import torch

from benthic.attention import choice
from benthic.attention.choice import choose
from benthic.attention.torch_backend import TorchBackend
from benthic.common.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_cpu_takes_torch() -> None:
    assert choose(None, CPU, torch.float32, 64) is TorchBackend
    assert choose("torch", CPU, torch.bfloat16, 64) is TorchBackend


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="--attention-backend flash: must be one of torch, triton"):
        choose("flash", CPU, torch.float32, 64)


def test_a_backend_that_can_not_be_imported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(choice._BACKENDS, "triton", ("benthic.attention.not_there", "Backend"))
    with pytest.raises(
        ConfigError, match=r"--attention-backend triton can't be used: it can't be imported \(No module"
    ):
        choose("triton", CPU, torch.float32, 64)
    assert choose(None, CUDA, torch.float32, 64) is TorchBackend  # the next best


class Refusing(TorchBackend):
    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return f"it wants head size 64, not {head_dim}"


def test_refusals_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benthic.attention.torch_backend.TorchBackend", Refusing)
    with pytest.raises(ConfigError, match="torch can't be used: it wants head size 64, not 80; leave the flag out"):
        choose("torch", CPU, torch.float32, 80)
    with pytest.raises(
        ConfigError, match=r"no attention backend for cpu with torch\.float32 and head size 80: torch: it wants"
    ):
        choose(None, CPU, torch.float32, 80)

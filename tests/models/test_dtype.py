"""Which arithmetic is taken, and why."""

from pathlib import Path

import pytest
import torch

from benthic.common.errors import ConfigError
from benthic.models.dtype import choose_dtype, read_cpu_flags

CPU = torch.device("cpu")


def test_auto_on_a_cpu_depends_on_its_flags() -> None:
    for flags, dtype, reason in (
        ({"avx512f", "avx512_bf16"}, torch.bfloat16, "has bfloat16 products (avx512_bf16)"),
        ({"amx_bf16", "amx_tile"}, torch.bfloat16, "has bfloat16 products (amx_bf16)"),
        ({"avx2", "avx512f"}, torch.float32, "has no bfloat16 products"),
        (set(), torch.float32, "has no bfloat16 products"),
    ):
        chosen, why = choose_dtype("auto", CPU, frozenset(flags))
        assert chosen == dtype
        assert reason in why


def test_a_named_type_is_taken() -> None:
    assert choose_dtype("bfloat16", CPU, frozenset()) == (torch.bfloat16, "as given by --dtype")
    assert choose_dtype("float16", torch.device("cuda"))[0] == torch.float16


def test_types_that_can_not_be_had_are_refused() -> None:
    with pytest.raises(ConfigError, match="--dtype float16: CPUs have no fast float16"):
        choose_dtype("float16", CPU)
    with pytest.raises(ConfigError, match="--dtype int8: must be auto or one of float32"):
        choose_dtype("int8", CPU)


def test_flags_come_from_cpuinfo(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nflags\t\t: fpu sse avx512_bf16\nprocessor\t: 1\nflags\t\t: other\n")
    assert read_cpu_flags(path) == {"fpu", "sse", "avx512_bf16"}
    assert read_cpu_flags(tmp_path / "absent") == frozenset()


@pytest.mark.gpu
def test_auto_on_a_gpu() -> None:
    dtype, why = choose_dtype("auto", torch.device("cuda"))
    assert dtype == torch.bfloat16
    assert "compute capability" in why

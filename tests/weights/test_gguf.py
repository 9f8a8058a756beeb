"""Reading GGUF files, whole and damaged."""

import random
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.common.errors import ModelError
from benthic.weights.dequantise import GGUFReader
from benthic.weights.gguf import GGUFFile, is_gguf
from benthic.weights.locate import BUILT_IN, locate
from benthic.weights.model_config import config_from_gguf
from tests.support.gguf_files import write_tensors


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with every kind of part: scalars, text, arrays, tensors."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    rng = np.random.default_rng(0)
    metadata = {
        "a.text": "some text",
        "a.number": 7,
        "a.float": 0.5,
        "a.flag": True,
        "a.list": [1, 2, 3],
        "a.texts": ["x", "yz"],
    }
    tensors = {
        f"t{i}": (rng.standard_normal((4, 64), dtype=np.float32), kind) for i, kind in enumerate(("F32", "Q4_1"))
    }
    return write_tensors(path, tensors, metadata).read_bytes()


def read_everything(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    file = GGUFReader(path)
    for key in file.keys():  # noqa: SIM118 - a method
        file.get(key)
    for name in file.names():
        file.load(name)


def test_metadata_and_tensors_are_read(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(small)
    assert is_gguf(path)
    file = GGUFFile(path)
    assert [file.get(f"a.{k}") for k in ("text", "number", "float", "flag", "list", "texts")] == [
        "some text", 7, 0.5, True, [1, 2, 3], ["x", "yz"],
    ]  # fmt: skip
    assert file.get("absent", "default") == "default"
    assert file.names() == ("t0", "t1")
    assert (file.info("t1").dtype, file.info("t1").shape, file.info("t1").num_bytes) == ("Q4_1", (4, 64), 4 * 2 * 20)
    with pytest.raises(ModelError, match="no tensor 'nope' among its 2 tensors"):
        file.raw("nope")


def test_every_cut_is_a_model_error_with_both_sizes(small: bytes, tmp_path: Path) -> None:
    for length in range(len(small) - 1):
        with pytest.raises(ModelError) as caught:
            read_everything(tmp_path / "cut.gguf", small[:length])
        message = str(caught.value)
        assert "\n" not in message
        assert "cut.gguf" in message
        assert str(length) in message or length < 24


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, 2**31), value=st.binary(min_size=1, max_size=9))
def test_damage_anywhere_is_a_model_error_or_harmless(
    small: bytes, tmp_path_factory: pytest.TempPathFactory, at: int, value: bytes
) -> None:
    position = at % len(small)
    damaged = small[:position] + value + small[position + len(value) :]
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    message = ""
    try:
        read_everything(path, damaged)
    except ModelError as error:
        message = str(error)
    assert "\n" not in message


def test_absurd_counts_are_refused_at_once(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for offset in (8, 16):
        data = bytearray(small)
        struct.pack_into("<Q", data, offset, 2**62)
        with pytest.raises(ModelError, match="header promises 4611686018427387904"):
            read_everything(path, bytes(data))


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04 something")
    assert not is_gguf(path)
    with pytest.raises(ModelError, match=r"not a GGUF file: it begins with b'PK.*expected b'GGUF'"):
        GGUFFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    with pytest.raises(ModelError, match="GGUF version 9; supported: 2, 3"):
        GGUFFile(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="found 0 bytes"):
        GGUFFile(path)
    with pytest.raises(ModelError, match="can't be read: No such file"):
        GGUFFile(tmp_path / "absent.gguf")
    assert not is_gguf(tmp_path / "absent.gguf")


def test_an_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "x.gguf", {"odd": (np.zeros((1, 84), dtype=np.uint8), "Q2_K")})
    with pytest.raises(ModelError, match=r"tensor 'odd' is stored as Q2_K.*supported: BF16, F16"):
        GGUFFile(path)


def test_random_cuts_of_the_built_in_model_are_model_errors(tmp_path: Path) -> None:
    whole = locate(BUILT_IN).path
    size = whole.stat().st_size
    rng = random.Random(1)
    head = 3_000_000  # metadata and the list of tensors lie in here
    with whole.open("rb") as file:
        start = file.read(head)
    path = tmp_path / "cut.gguf"
    for length in [rng.randrange(4, head) for _ in range(25)] + [size - 1, size - 10_000_000]:
        with path.open("wb") as file:
            file.write(start[:length])
            file.truncate(length)  # the rest of a long cut is a hole
        with pytest.raises(ModelError, match=f"{length}|past the end of the file"):
            config_from_gguf(GGUFReader(path))

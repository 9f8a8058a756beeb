"""From what a user gives to a validated Config: flags, files, environment."""

import json
from pathlib import Path

import pytest

from benthic.common.errors import ConfigError
from benthic.common.units import format_size, parse_size
from benthic.config import OPTIONS, options_from_mapping, read_config_file, resolve
from benthic.config.options import merge
from benthic.config.settings import BackendNames


def test_defaults_are_complete_and_derive_nothing() -> None:
    config = resolve(options_from_mapping({}, "test"), {})
    assert config.engine.model.model == "smollm2-135m"
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8000)
    assert config.engine.cache.page_size == 64
    assert config.engine.cache.l1_bytes is None
    assert config.engine.scheduler.chunk_tokens is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page_size": 48}, "--page-size 48.*power of two"),
        ({"page_size": 0}, "--page-size 0"),
        ({"chunk_tokens": 100}, "--chunk-tokens 100.*take 64"),
        ({"l1_size": "1GiB", "l1_pages": 4}, "--l1-size and --l1-pages"),
        ({"l1_size": "many"}, "--l1-size: 'many'"),
        ({"l1_size": "0GiB"}, "more than 0"),
        ({"dtype": "int8"}, "--dtype int8.*bfloat16"),
        ({"device": "tpu"}, "--device tpu.*cuda"),
        ({"port": 70000}, "--port 70000.*65535"),
        ({"graph_batch_sizes": "1,x"}, "--graph-batch-sizes 1,x"),
        ({"graph_batch_sizes": "0,2"}, "at least 1"),
        ({"grace_s": -1.0}, "--grace-s"),
        ({"max_queue": 0}, "--max-queue 0"),
        ({"attention_backend": "magic"}, "--attention-backend magic"),
        ({"attention_backend": "prefill=magic"}, "--attention-backend prefill= magic: must be one of torch, triton"),
        ({"attention_backend": "verify=torch"}, "verify=torch: write one name, or prefill=NAME,decode=NAME"),
        ({"attention_backend": "decode=torch,decode=torch"}, "at most once"),
    ],
)
def test_what_cannot_be_used_is_named_with_what_would_do(options, words) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(options_from_mapping(options, "test"), {})


@pytest.mark.parametrize(
    ("text", "prefill", "decode"),
    [
        (None, None, None),
        ("torch", "torch", "torch"),
        ("decode=triton", None, "triton"),
        ("decode = triton , prefill = torch", "torch", "triton"),
    ],
)
def test_a_backend_is_named_for_all_or_for_each_use(text: str | None, prefill: str | None, decode: str | None) -> None:
    config = resolve(options_from_mapping({"attention_backend": text}, "test"), {})
    assert config.engine.runner.attention_backend == BackendNames(prefill=prefill, decode=decode)


def test_graph_batch_sizes_are_sorted_and_may_be_none() -> None:
    assert resolve(options_from_mapping({"graph_batch_sizes": "8,1,8,2"}, "t"), {}).engine.runner.graph_batch_sizes == (
        1,
        2,
        8,
    )
    assert resolve(options_from_mapping({"graph_batch_sizes": "none"}, "t"), {}).engine.runner.graph_batch_sizes == ()


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_file_says_the_same_as_flags_and_flags_win(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"serve{suffix}"
    values = {"page-size": 32, "l1_size": "2GiB", "graph-batch-sizes": [1, 4]}
    toml = 'page-size = 32\nl1_size = "2GiB"\ngraph-batch-sizes = [1, 4]\n'
    path.write_text(json.dumps(values) if suffix == ".json" else toml)
    config = resolve(merge(options_from_mapping({"page_size": 16}, "flags"), read_config_file(path)), {}).engine
    assert config.cache.page_size == 16
    assert config.cache.l1_bytes == 2 << 30
    assert config.runner.graph_batch_sizes == (1, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [("page-size = ", "not valid TOML"), ("pagesize = 3", "unknown option 'pagesize'"), ('port = "x"', "integer"),
     ("max_queue = true", "number")],
)  # fmt: skip
def test_a_wrong_file_says_where_and_what(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_config_file(path)
    with pytest.raises(ConfigError, match="can't be read"):
        read_config_file(tmp_path / "none.toml")


def test_the_environment_gives_key_and_graph_log() -> None:
    environ = {"BENTHIC_API_KEY": "k", "BENTHIC_LOG_GRAPH_BUFFERS": "1"}
    config = resolve(options_from_mapping({}, "t"), environ)
    assert config.server.api_key == "k"
    assert config.engine.runner.log_graph_buffers
    assert resolve(options_from_mapping({"api_key": "flag"}, "t"), environ).server.api_key == "flag"


def test_every_option_explains_itself_with_an_example() -> None:
    assert all(o.help and o.example and o.flag.startswith("--") for o in OPTIONS)


@pytest.mark.parametrize(
    ("text", "size"), [("64GiB", 64 << 30), ("1.5g", 3 << 29), ("10 MB", 10**7), (7, 7), ("512", 512)]
)
def test_sizes(text, size) -> None:
    assert parse_size(text) == size


def test_sizes_are_printed_in_the_largest_unit() -> None:
    assert [format_size(n) for n in (5, 2048, 3 << 20, 5 << 30)] == ["5 B", "2.00 KiB", "3.00 MiB", "5.00 GiB"]

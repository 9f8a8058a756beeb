"""How many ranks, what they share, and who starts them."""

from dataclasses import replace
from pathlib import Path

import pytest

from benthic.common.errors import ConfigError
from benthic.config import (
    EngineConfig,
    Launch,
    ParallelConfig,
    demand_one_rank,
    options_from_mapping,
    read_config_file,
    read_launch,
    resolve,
)
from benthic.messages.start import EngineStart, ModelSource, decode_start, encode_start


def engine_of(**options: object) -> EngineConfig:
    return resolve(options_from_mapping(options, "test"), {}).engine


def test_one_rank_unless_asked_for_more() -> None:
    assert engine_of().parallel == ParallelConfig()
    assert engine_of(cp=4, ep=True).parallel == ParallelConfig(cp_size=4, expert_parallel=True)
    assert engine_of(tp=2, ep=False).parallel == ParallelConfig(tp_size=2)
    named = engine_of(cp=2, ep=True, expert_dispatch="allgather").parallel
    assert (named.expert_dispatch, named.world_size) == ("allgather", 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cp": 0}, "--cp 0: must be at least 1"),
        ({"tp": -2}, "--tp -2: must be at least 1"),
        ({"cp": 2, "tp": 4}, "--cp 2 with --tp 4.*give one of the two"),
        ({"ep": True}, "--ep spreads.*there is one; add --cp"),
        ({"cp": 2, "expert_dispatch": "allgather"}, "--expert-dispatch allgather.*add --ep"),
        ({"cp": 2, "ep": True, "expert_dispatch": "deepep"}, "deepep is not supported here; .*allgather .*works with"),
        ({"cp": 2, "ep": True, "expert_dispatch": "flashinfer"}, "flashinfer is not supported here; .*allgather"),
        ({"cp": 2, "ep": True, "expert_dispatch": "mpi"}, "--expert-dispatch mpi: must be one of allgather, deepep"),
        ({"cp": 2, "ep": 1}, "ep must be true or false, not 1"),
        ({"cp": True}, "cp must be a number"),
    ],
)
def test_what_cannot_be_used_names_the_flag_and_the_remedy(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_of(**options)


def test_a_file_says_it_with_a_bool(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("cp = 2\nep = true\n")
    assert resolve(read_config_file(file), {}).engine.parallel == ParallelConfig(cp_size=2, expert_parallel=True)


def test_one_process_is_one_rank() -> None:
    demand_one_rank(ParallelConfig())
    with pytest.raises(ConfigError, match=r"--tp 2: an engine of 2 ranks.*use `benthic serve MODEL --tp 2`"):
        demand_one_rank(ParallelConfig(tp_size=2))


def test_ranks_travel_in_the_start_order() -> None:
    order = EngineStart(
        config=engine_of(cp=4, ep=True),
        source=ModelSource("gguf", Path("/m.gguf"), "m"),
        recv_addr="",
        send_addr="ipc:///x/b",
        rank=3,
        local_rank=1,
        local_size=2,
        rendezvous="file:///x/rendezvous",
        peer_addr="tcp://10.0.0.1:4711",
    )
    assert decode_start(encode_start(order)) == order


ENVIRON = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0"}


def test_torchruns_variables() -> None:
    launch = read_launch(engine_of(cp=4), ENVIRON)
    assert launch == Launch(rank=3, world_size=4, local_rank=1, local_size=2, master_addr="node0")
    assert not launch.one_host
    one_host = read_launch(engine_of(tp=4), ENVIRON | {"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": ""})
    assert one_host is not None
    assert one_host.one_host


def test_without_them_or_with_one_rank_nobody_else_starts_ranks() -> None:
    assert read_launch(engine_of(cp=4), {}) is None
    assert read_launch(engine_of(cp=4), {"RANK": "1"}) is None
    assert read_launch(engine_of(), ENVIRON) is None


@pytest.mark.parametrize(
    ("cp", "changed", "words"),
    [
        (2, {}, "--cp 2 asks for 2 ranks and WORLD_SIZE=4"),
        (4, {"LOCAL_RANK": ""}, "LOCAL_RANK=: must be a number"),
        (4, {"RANK": "x"}, "RANK=x: must be a number.*Unset RANK"),
        (4, {"MASTER_ADDR": ""}, "MASTER_ADDR"),
    ],
)
def test_a_launch_that_does_not_fit_is_refused(cp: int, changed: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_launch(engine_of(cp=cp), ENVIRON | changed)


def test_a_disk_floor_over_several_hosts_is_refused_for_now(tmp_path: Path) -> None:
    engine = engine_of(cp=4, l2_size="1GiB", l3_dir=str(tmp_path), l3_size="1GiB")
    with pytest.raises(ConfigError, match="can't span hosts yet, and 2 of 4 ranks are on this one"):
        read_launch(engine, ENVIRON)
    assert read_launch(engine, ENVIRON | {"LOCAL_WORLD_SIZE": "4"}) is not None
    assert read_launch(replace(engine, cache=replace(engine.cache, disk=None)), ENVIRON) is not None

"""The start order survives its trip, paths included."""

from pathlib import Path

from benthic.config import options_from_mapping, resolve
from benthic.messages.start import EngineStart, ModelSource, decode_start, encode_start


def test_round_trip_in_one_line() -> None:
    given = {"model": "m\nx", "profile_graph_memory": "./graphs", "graph_batch_sizes": "1,2", "l1_size": "1GiB"}
    config = resolve(options_from_mapping(given, "test"), {}).engine
    order = EngineStart(
        config=config, source=ModelSource("gguf", Path("/a b/ü.gguf"), "m\nx"), recv_addr="ipc:///x/a", send_addr="ipc:///x/b"
    )  # fmt: skip
    line = encode_start(order)
    assert line.count(b"\n") == 1
    assert decode_start(line) == order

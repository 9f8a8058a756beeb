"""SIGTERM while pages are on their way to disk: the grace time bounds requests and spills together."""

import signal
from pathlib import Path

from tests.server.test_lifecycle import SLOW, Stream
from tests.support.fake_server_process import FakeServer, running, wait_for


def test_pages_are_written_within_the_grace_time(tmp_path: Path) -> None:
    engine = ["--disk", "--pending-pages", "20", "--page-write-s", "0.05"]
    with running(tmp_path, ["--grace-s", "30"], engine) as server:
        server.wait_ready()
        wait_for_pending(server)
        assert server.end() == 0
    assert "pages still being written to disk" in server.text
    assert "were not on disk" not in server.text


def test_what_the_grace_time_does_not_suffice_for_is_counted(tmp_path: Path) -> None:
    engine = ["--disk", "--pending-pages", "1000", "--page-write-s", "0.05"]
    with running(tmp_path, ["--grace-s", "0.5"], engine) as server:
        server.wait_ready()
        wait_for_pending(server)
        assert server.end(signal.SIGINT) == 0
        assert server.leftovers() == []
    assert "pages were not on disk when the grace time of 0.5 s was over" in server.text


def test_requests_take_their_share_of_the_grace_time_first(tmp_path: Path) -> None:
    engine = [*SLOW, "--disk", "--pending-pages", "1000", "--page-write-s", "0.05"]
    with running(tmp_path, ["--grace-s", "1"], engine) as server:
        server.wait_ready()
        stream = Stream(server)  # longer than the grace time
        assert server.end() == 0
        assert "shutting down" in stream.end()[-1]
    assert "1000 pages were not on disk" in server.text


def test_an_engine_that_dies_while_it_writes_is_no_clean_end(tmp_path: Path) -> None:
    with running(tmp_path, engine=["--disk", "--pending-pages", "9", "--die-at-stop"]) as server:
        server.wait_ready()
        assert server.end() == 1
        assert server.leftovers() == []
    assert "ended before it had closed the cache" in server.text


def wait_for_pending(server: FakeServer) -> None:
    with server.http() as http:
        wait_for(lambda: "benthic_l3_spill_pending_pages " in http.get("/metrics").text)

"""The address that clients use, and why a socket was refused."""

import os
import socket

import pytest

from benthic.common.errors import ConfigError
from benthic.server.listen import listen, url_of


def test_port_0_finds_one_and_the_wildcard_shows_as_loopback() -> None:
    with listen("0.0.0.0", 0) as sock:
        port = sock.getsockname()[1]
        assert url_of(sock) == f"http://127.0.0.1:{port}"
        with socket.create_connection(("127.0.0.1", port)):
            pass


def test_a_taken_port_is_refused_with_another_to_try() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: the port is in use.*--port 0"):
            listen("127.0.0.1", port)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may listen on any port")
def test_a_privileged_port_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="need privileges"):
        listen("127.0.0.1", 80)

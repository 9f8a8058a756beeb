"""The listening socket, bound and listening before anything is loaded, so that a port in use ends the command at
once."""

import contextlib
import errno
import resource
import socket

from benthic.common.errors import ConfigError

BACKLOG = 4096


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on host and port (0: a free one). Raises ConfigError, one paragraph with the remedy."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host {host}: this name has no address ({error}); take 127.0.0.1 or 0.0.0.0") from None
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(_why(error, host, port)) from None
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket) -> str:
    """The address to use in a client; a wildcard is shown as this machine's loopback."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows: each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _why(error: OSError, host: str, port: int) -> str:
    where = f"cannot listen on {host} port {port}"
    if error.errno == errno.EADDRINUSE:
        other = port + 1 if port < 65535 else 8000
        return (
            f"{where}: the port is in use; stop the other program, or take another port, e.g. --port {other} "
            f"(--port 0 finds a free one)"
        )
    if error.errno == errno.EACCES:
        return f"{where}: ports below 1024 need privileges; take a higher one, e.g. --port 8000"
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{where}: this machine does not have that address; take --host 127.0.0.1 (only this machine can connect) "
            f"or 0.0.0.0 (others can, too)"
        )
    return f"{where}: {error.strerror or error}"

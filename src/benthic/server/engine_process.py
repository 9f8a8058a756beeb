"""The engine as child processes, one a rank: their private folder of sockets, their start orders, and their end in
every case.

The children stay in our process group but don't die of a Ctrl-C or SIGTERM meant for us: both signals are blocked
while they start, and they ignore them later. The pipe on a child's standard input is its lifeline: when we are gone,
for whatever reason, it reads the end.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
import zmq.asyncio

from benthic.common.errors import ConfigError, EngineDead
from benthic.config import EngineConfig, Launch
from benthic.messages.start import EngineStart, ModelSource, encode_start

ENGINE_COMMAND = (sys.executable, "-m", "benthic.engine.process")
_CLOSE_S = 5.0  # for killed children to be gone

OnExit = Callable[[int, int], None]  # rank, exit status


class EngineProcess:
    """Owns the children, their sockets and the sockets' folder."""

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._command = list(command)
        self._folder = Path(tempfile.mkdtemp(prefix="benthic-"))  # mode 0700
        self._context = zmq.asyncio.Context()
        self.push: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PUSH)  # sends at once or not at all
        self.pull = self._context.socket(zmq.PULL)
        for sock, name in ((self.push, "to_engine"), (self.pull, "from_engine")):
            sock.setsockopt(zmq.LINGER, 0)
            sock.set_hwm(0)
            sock.bind(self._address(name))
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # by rank

    def _address(self, name: str) -> str:
        return f"ipc://{self._folder / name}"

    def start(
        self,
        config: EngineConfig,
        source: ModelSource,
        on_exit: OnExit,
        pass_fds: Sequence[int] = (),
        launch: Launch | None = None,
    ) -> None:
        """Start the children and give them their orders; `on_exit` gets each one's exit status, from another thread.

        `pass_fds` stay open in the children as long as they live: the locks of the disk folders, which so are free
        only when no process can write any more. With `launch` there is one child, the first rank; the others are
        processes that torchrun started.

        Raises EngineDead when one can't be started or ends before it has read its order, ConfigError when the other
        hosts' ranks can't reach us.
        """
        orders = self._own_ranks(config, source) if launch is None else [self._first_rank(config, source, launch)]
        for order in orders:
            self._children[order.rank] = self._spawn(order, pass_fds, on_exit)
        for order in orders:
            lifeline = self._children[order.rank].stdin
            assert lifeline is not None
            try:
                lifeline.write(encode_start(order))
                lifeline.flush()
            except BrokenPipeError:
                raise EngineDead(f"{_process_of(order)} ended before it had read its start order") from None

    def _own_ranks(self, config: EngineConfig, source: ModelSource) -> list[EngineStart]:
        """Orders for all ranks of one host."""
        size = config.parallel.world_size
        return [
            EngineStart(
                config=config,
                source=source,
                recv_addr=self._address("to_engine") if rank == 0 else "",
                send_addr=self._address("from_engine"),
                rank=rank,
                local_rank=rank,
                local_size=size,
                rendezvous=f"file://{self._folder / 'rendezvous'}" if size > 1 else "",
            )
            for rank in range(size)
        ]

    def _first_rank(self, config: EngineConfig, source: ModelSource, launch: Launch) -> EngineStart:
        """The order for rank 0 among processes that torchrun started."""
        return EngineStart(
            config=config,
            source=source,
            recv_addr=self._address("to_engine"),
            send_addr=self._address("from_engine"),
            rank=launch.rank,
            local_rank=launch.local_rank,
            local_size=launch.local_size,
            rendezvous="env://",
            # on one host the private folder does: no port for others to write to
            peer_addr=self._address("from_engine") if launch.one_host else self._listen_for_peers(launch.master_addr),
        )

    def _listen_for_peers(self, host: str) -> str:
        """Let ranks of other hosts send, too. Returns the address to send to. Raises ConfigError."""
        try:
            address = socket.gethostbyname(host)
            self.pull.bind(f"tcp://{address}:*")
        except (OSError, zmq.ZMQError) as error:
            raise ConfigError(
                f"the ranks of other hosts can't reach this one at MASTER_ADDR={host}: {error}; give torchrun an "
                f"address of rank 0's host that it listens on itself (--rdzv-endpoint, --master-addr)"
            ) from None
        endpoint = self.pull.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.rstrip(b"\0").decode()

    def _spawn(self, order: EngineStart, pass_fds: Sequence[int], on_exit: OnExit) -> "subprocess.Popen[bytes]":
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            child = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, pass_fds=pass_fds, env=_environment(order, os.environ)
            )
        except OSError as error:
            raise EngineDead(f"{_process_of(order)} can't be started: {error}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        rank = order.rank
        threading.Thread(target=lambda: on_exit(rank, child.wait()), name=f"exit-{rank}", daemon=True).start()
        return child

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that have been started here."""
        return frozenset(self._children)

    def hang_up(self) -> None:
        """Close the lifelines: the children end by themselves."""
        for child in self._children.values():
            if child.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    child.stdin.close()

    def kill(self) -> None:
        """End the children at once, stopped ones too."""
        for child in self._children.values():
            child.kill()  # does nothing once it has been waited for

    def close(self) -> None:
        """Kill what still lives, close the sockets, remove the folder."""
        self.hang_up()
        self.kill()
        end = time.monotonic() + _CLOSE_S
        for child in self._children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):  # a disk holds it: it ends, and unlocks, by itself
                child.wait(timeout=max(0.0, end - time.monotonic()))
        for sock in (self.push, self.pull):
            sock.close(linger=0)
        self._context.term()
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the sockets' folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _environment(order: EngineStart, environ: "os._Environ[str]") -> dict[str, str]:
    """What a child finds: ranks of one host meet over the loopback, unless the user says otherwise (a host's name need
    not lead anywhere)."""
    env = dict(environ)
    size = order.config.parallel.world_size
    if size > 1 and order.local_size == size:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


def _process_of(order: EngineStart) -> str:
    return name_of(order.rank, order.config.parallel.world_size)


def name_of(rank: int, num_ranks: int) -> str:
    """A rank's process as messages call it."""
    return "the engine process" if num_ranks == 1 else f"rank {rank}'s process"


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"
    return f"exit code {status}"

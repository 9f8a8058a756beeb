"""The engine as a child process: its private folder of sockets, its start order, and its end in every case.

The child stays in our process group but doesn't die of a Ctrl-C or SIGTERM meant for us: both signals are blocked
while it starts, and it ignores them later. The pipe on its standard input is its lifeline: when we are gone, for
whatever reason, it reads the end.
"""

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
import zmq.asyncio

from benthic.common.errors import EngineDead
from benthic.config import EngineConfig
from benthic.messages.start import EngineStart, ModelSource, encode_start

ENGINE_COMMAND = (sys.executable, "-m", "benthic.engine.process")


class EngineProcess:
    """Owns the child, its sockets and their folder."""

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._command = list(command)
        self._folder = Path(tempfile.mkdtemp(prefix="benthic-"))  # mode 0700
        self._context = zmq.asyncio.Context()
        self.push: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PUSH)  # sends at once or not at all
        self.pull = self._context.socket(zmq.PULL)
        for socket, name in ((self.push, "to_engine"), (self.pull, "from_engine")):
            socket.setsockopt(zmq.LINGER, 0)
            socket.set_hwm(0)
            socket.bind(self._address(name))
        self._child: subprocess.Popen[bytes] | None = None

    def _address(self, name: str) -> str:
        return f"ipc://{self._folder / name}"

    def start(
        self, config: EngineConfig, source: ModelSource, on_exit: Callable[[int], None], pass_fds: Sequence[int] = ()
    ) -> None:
        """Start the child and give it its order; `on_exit` gets its exit status, from another thread.

        `pass_fds` stay open in the child as long as it lives: the locks of the disk folders, which so are free only
        when neither process can write any more.

        Raises EngineDead when it can't be started or ends before it has read the order.
        """
        order = EngineStart(
            config=config,
            source=source,
            recv_addr=self._address("to_engine"),
            send_addr=self._address("from_engine"),
        )
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._child = subprocess.Popen(self._command, stdin=subprocess.PIPE, pass_fds=pass_fds)
        except OSError as error:
            raise EngineDead(f"the engine process can't be started: {error}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        child = self._child
        threading.Thread(target=lambda: on_exit(child.wait()), name="engine-exit", daemon=True).start()
        assert child.stdin is not None
        try:
            child.stdin.write(encode_start(order))
            child.stdin.flush()
        except BrokenPipeError:
            raise EngineDead("the engine process ended before it had read its start order") from None

    @property
    def pid(self) -> int | None:
        """The child's process id, once started."""
        return None if self._child is None else self._child.pid

    def hang_up(self) -> None:
        """Close the lifeline: the child ends by itself."""
        if self._child is not None and self._child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.close()

    def kill(self) -> None:
        """End the child at once."""
        if self._child is not None:
            self._child.kill()  # does nothing once it has been waited for

    def close(self) -> None:
        """Kill what still lives, close the sockets, remove the folder."""
        self.hang_up()
        self.kill()
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a disk holds it: it ends, and unlocks, by itself
                self._child.wait(timeout=5)
        for socket in (self.push, self.pull):
            socket.close(linger=0)
        self._context.term()
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the sockets' folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"
    return f"exit code {status}"

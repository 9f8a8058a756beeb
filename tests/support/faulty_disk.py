"""Two disks to put under the floor: one that fails as a predicate says, and one that records what is done to it.

`power_cuts` turns a record into the states that a power cut may leave, and `build_state` puts one into a folder.

What may be lost: a write that no later `fdatasync` of the file covers, whole or in any of its 4 KiB blocks, each by
itself, in any order; so may a rename, an unlink or a new name before the folder's sync. Index transactions are modelled
as LMDB promises them: all of one or nothing, in order; the one in progress may be on disk already.
"""

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import lmdb

from benthic.tiers.disk.io import Buffer, DiskIO, IndexCommit, SystemDisk

BLOCK = 4096


@dataclass(frozen=True)
class Call:
    """One call of the seam, as a predicate sees it."""

    name: str  # the method's
    path: Path
    offset: int = 0
    num_bytes: int = 0
    direct: bool = False


Fault = Callable[[Call], "OSError | int | None"]  # an error to raise, a number of bytes for a short transfer, or None


class _Forwarding:
    """Passes every call on; knows the path and kind of each descriptor."""

    def __init__(self, below: DiskIO | None = None) -> None:
        self.below: DiskIO = below or SystemDisk()
        self.paths: dict[int, Path] = {}
        self.direct: dict[int, bool] = {}

    def open(self, path: Path, *, create: bool = False, direct: bool = False, read_only: bool = False) -> int:
        fd = self.below.open(path, create=create, direct=direct, read_only=read_only)
        self.paths[fd], self.direct[fd] = path, direct
        return fd

    def close(self, fd: int) -> None:
        self.paths.pop(fd, None)
        self.below.close(fd)

    def size(self, fd: int) -> int:
        return self.below.size(fd)

    def preallocate(self, fd: int, offset: int, size: int) -> None:
        self.below.preallocate(fd, offset, size)

    def truncate(self, fd: int, size: int) -> None:
        self.below.truncate(fd, size)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return self.below.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return self.below.preadv(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self.below.fdatasync(fd)

    def make_folder(self, path: Path) -> None:
        self.below.make_folder(path)

    def fsync_folder(self, path: Path) -> None:
        self.below.fsync_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        self.below.rename(old, new)

    def unlink(self, path: Path) -> None:
        self.below.unlink(path)

    def free_bytes(self, path: Path) -> int:
        return self.below.free_bytes(path)

    def before_commit(self, commit: IndexCommit) -> None:
        self.below.before_commit(commit)

    def after_commit(self, commit: IndexCommit) -> None:
        self.below.after_commit(commit)


def error(number: int) -> OSError:
    """An OSError as the system makes it."""
    return OSError(number, os.strerror(number))


class FaultyDisk(_Forwarding):
    """Asks `fault` before every call; a fault that is a number makes a transfer short. A hang is a fault that waits.

    `fault` may be changed at any time; `calls` counts what was asked, by the method's name.
    """

    def __init__(self, fault: Fault = lambda call: None, below: DiskIO | None = None) -> None:
        super().__init__(below)
        self.fault = fault
        self.calls: dict[str, int] = {}

    def _ask(self, name: str, path: Path, offset: int = 0, num_bytes: int = 0, direct: bool = False) -> int | None:
        self.calls[name] = self.calls.get(name, 0) + 1
        answer = self.fault(Call(name, path, offset, num_bytes, direct))
        if isinstance(answer, OSError):
            raise answer
        return answer

    def open(self, path: Path, *, create: bool = False, direct: bool = False, read_only: bool = False) -> int:
        self._ask("open", path, direct=direct)
        return super().open(path, create=create, direct=direct, read_only=read_only)

    def preallocate(self, fd: int, offset: int, size: int) -> None:
        self._ask("preallocate", self.paths[fd], offset, size)
        super().preallocate(fd, offset, size)

    def truncate(self, fd: int, size: int) -> None:
        self._ask("truncate", self.paths[fd], size)
        super().truncate(fd, size)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        short = self._ask("pwritev", self.paths[fd], offset, sum(map(len, buffers)), self.direct[fd])
        return super().pwritev(fd, buffers if short is None else _first(buffers, short), offset)

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        short = self._ask("preadv", self.paths[fd], offset, sum(map(len, buffers)), self.direct[fd])
        return super().preadv(fd, buffers if short is None else _first(buffers, short), offset)

    def fdatasync(self, fd: int) -> None:
        self._ask("fdatasync", self.paths[fd])
        super().fdatasync(fd)

    def make_folder(self, path: Path) -> None:
        self._ask("make_folder", path)
        super().make_folder(path)

    def fsync_folder(self, path: Path) -> None:
        self._ask("fsync_folder", path)
        super().fsync_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        self._ask("rename", new)
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._ask("unlink", path)
        super().unlink(path)

    def before_commit(self, commit: IndexCommit) -> None:
        self._ask("before_commit", commit.path)
        super().before_commit(commit)


def fail(name: str, number: int, *, path: str = "") -> Fault:
    """A fault: every call of the method `name` whose path ends in `path` fails with errno `number`."""
    return lambda call: error(number) if call.name == name and str(call.path).endswith(path) else None


def refuse_direct(at_open: bool) -> Fault:
    """A filesystem without O_DIRECT, which says so at open or only at the transfer."""

    def fault(call: Call) -> OSError | None:
        transfers = ("open",) if at_open else ("pwritev", "preadv")
        return error(errno.EINVAL) if call.direct and call.name in transfers else None

    return fault


def hang(name: str, until: threading.Event, *, path: str = "") -> Fault:
    """A fault: every call of the method `name` whose path ends in `path` waits for the event."""

    def fault(call: Call) -> None:
        if call.name == name and str(call.path).endswith(path):
            until.wait()

    return fault


def _first(buffers: Sequence[Buffer], num_bytes: int) -> list[memoryview]:
    left: list[memoryview] = []
    for buffer in buffers:
        left.append(memoryview(buffer)[:num_bytes])
        num_bytes -= len(left[-1])
    return [view for view in left if len(view)]


@dataclass(frozen=True)
class Event:
    """One thing that was done: `write`, `truncate`, `sync`, `create`, `rename`, `unlink`, `folder`, `commit` (its
    beginning), `committed`, or a `mark` of the test's own."""

    kind: str
    path: Path
    offset: int = 0  # of a write; the size of a truncate; of a sync: it covers the trace's first so many events …
    not_covered: frozenset[int] = frozenset()  # … but for these
    data: bytes = b""
    new: Path | None = None  # of a rename
    commit: IndexCommit | None = None
    mark: object = None


class TracingDisk(_Forwarding):
    """Records in `trace`, in order, everything that changes files, with its contents. Any number of threads.

    A write stands where it began, a sync where it ended; the sync names the writes that had returned when it began.
    """

    def __init__(self, below: DiskIO | None = None) -> None:
        super().__init__(below)
        self.trace: list[Event] = []
        self._lock = threading.Lock()
        self._under_way: set[int] = set()  # numbers of writes in the trace

    def mark(self, value: object) -> None:
        """Note in the trace what a test wants to know at this point, e.g. that a page was acknowledged."""
        self.trace.append(Event("mark", Path(), mark=value))

    def open(self, path: Path, *, create: bool = False, direct: bool = False, read_only: bool = False) -> int:
        if create and not path.exists():
            self.trace.append(Event("create", path))
        return super().open(path, create=create, direct=direct, read_only=read_only)

    def preallocate(self, fd: int, offset: int, size: int) -> None:
        super().preallocate(fd, offset, size)
        self.trace.append(Event("truncate", self.paths[fd], self.size(fd)))

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self.trace.append(Event("truncate", self.paths[fd], size))

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        data = b"".join(bytes(buffer) for buffer in buffers)
        with self._lock:
            number = len(self.trace)
            self.trace.append(Event("write", self.paths[fd], offset, data=data))
            self._under_way.add(number)
        try:
            return super().pwritev(fd, buffers, offset)
        finally:
            with self._lock:
                self._under_way.discard(number)

    def fdatasync(self, fd: int) -> None:
        with self._lock:
            number = len(self.trace)
            not_covered = frozenset(self._under_way)
        super().fdatasync(fd)
        self.trace.append(Event("sync", self.paths[fd], number, not_covered=not_covered))

    def fsync_folder(self, path: Path) -> None:
        super().fsync_folder(path)
        self.trace.append(Event("folder", path))

    def rename(self, old: Path, new: Path) -> None:
        self.trace.append(Event("rename", old, new=new))
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.trace.append(Event("unlink", path))

    def before_commit(self, commit: IndexCommit) -> None:
        super().before_commit(commit)
        self.trace.append(Event("commit", commit.path, commit=commit))

    def after_commit(self, commit: IndexCommit) -> None:
        self.trace.append(Event("committed", commit.path, commit=commit))
        super().after_commit(commit)


@dataclass
class State:
    """What one power cut leaves: whole files by path, index contents by path, and the test's marks before the cut."""

    files: dict[Path, bytearray] = field(default_factory=dict)
    indexes: dict[Path, dict[bytes, bytes]] = field(default_factory=dict)
    marks: list[object] = field(default_factory=list)


def snapshot(folder: Path) -> State:
    """What lies in a folder whose indexes nobody has open: the state that a trace from now on starts with."""
    state = State()
    for path in folder.rglob("*"):
        if path.suffix == ".lmdb" and path.stat().st_size:
            with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
                state.indexes[path] = dict(txn.cursor())
        elif path.is_file() and not path.name.endswith("-lock"):
            state.files[path] = bytearray(path.read_bytes())
    return state


def power_cuts(
    trace: Sequence[Event], rng: random.Random, *, start: State | None = None, first: int = 0, per_point: int = 3
) -> Iterator[State]:
    """States that a cut before each event from number `first` on, and after the last, may leave.

    At each point: nothing unsynced has reached the disk, all of it has, `per_point` random mixtures. `start` is what
    lay there before the trace, where nothing was unsynced; without it, an empty folder.
    """
    for end in range(first, len(trace) + 1):
        chances = [0.0, 1.0, *(rng.random() for _ in range(per_point))]
        for chance in chances:
            yield _cut(trace[:end], start or State(), rng, chance)


def _cut(done: Sequence[Event], start: State, rng: random.Random, chance: float) -> State:
    """The state after `done`, where what is not synced has reached the disk with probability `chance`."""
    state = State(
        {path: bytearray(content) for path, content in start.files.items()},
        {path: dict(entries) for path, entries in start.indexes.items()},
        list(start.marks),
    )
    for at, event in enumerate(done):
        durable = event.kind in ("mark", "committed") or _is_covered(done, at)
        _apply(event, state, lambda durable=durable: durable or rng.random() < chance)  # type: ignore[misc]
    last = next((event for event in reversed(done) if event.kind in ("commit", "committed")), None)
    if last is not None and last.kind == "commit" and rng.random() < chance:
        assert last.commit is not None
        _commit(last.commit, state)  # in progress at the cut: it may have become durable
    return state


def _apply(event: Event, state: State, got_through: Callable[[], bool]) -> None:
    """Carry out one event on the state, as far as it got through to the disk."""
    if event.kind == "mark":
        state.marks.append(event.mark)
    elif event.kind == "committed":
        assert event.commit is not None
        _commit(event.commit, state)
    elif event.kind in ("create", "rename", "unlink"):
        if got_through():
            _change_name(event, state)
    elif event.kind in ("write", "truncate") and event.path in state.files:  # else its name was lost, and so is it
        file = state.files[event.path]
        if event.kind == "truncate":
            if got_through():
                del file[event.offset :]
                file.extend(bytes(event.offset - len(file)))
            return
        for begin in range(0, len(event.data), BLOCK):
            if got_through():
                _store(file, event.offset + begin, event.data[begin : begin + BLOCK])


def _is_covered(done: Sequence[Event], at: int) -> bool:
    """Whether a sync after event `at` makes it durable: the file's for contents, the folder's for names."""
    event = done[at]
    if event.kind in ("write", "truncate"):
        return any(
            later.kind == "sync" and later.path == event.path and at < later.offset and at not in later.not_covered
            for later in done[at + 1 :]
        )
    folder = (event.new or event.path).parent
    return any(later.kind == "folder" and later.path == folder for later in done[at + 1 :])


def _change_name(event: Event, state: State) -> None:
    if event.kind == "create":
        state.files.setdefault(event.path, bytearray())
    elif event.kind == "unlink":
        state.files.pop(event.path, None)
        state.indexes.pop(event.path, None)
    elif event.new is not None:
        if event.path in state.files:
            state.files[event.new] = state.files.pop(event.path)
        if event.path in state.indexes:
            state.indexes[event.new] = state.indexes.pop(event.path)


def _store(file: bytearray, offset: int, data: bytes) -> None:
    if len(file) < offset + len(data):
        file.extend(bytes(offset + len(data) - len(file)))
    file[offset : offset + len(data)] = data


def _commit(commit: IndexCommit, state: State) -> None:
    index = state.indexes.setdefault(commit.path, {})
    if commit.clear:
        index.clear()
    for key in commit.deletes:
        index.pop(key, None)
    index.update(commit.puts)


def build_state(state: State, old_root: Path, new_root: Path) -> None:
    """Write a state's files and indexes below `new_root`, as they lay below `old_root`."""
    for path, content in state.files.items():
        target = new_root / path.relative_to(old_root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    for path, entries in state.indexes.items():
        target = new_root / path.relative_to(old_root)
        target.parent.mkdir(parents=True, exist_ok=True)
        with lmdb.open(str(target), subdir=False, map_size=1 << 24, sync=False) as env, env.begin(write=True) as txn:
            for key, value in entries.items():
                txn.put(key, value)

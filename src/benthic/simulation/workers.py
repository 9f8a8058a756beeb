"""The simulated tier workers: they carry out the core's commands in simulated time, and report as real ones do.

All ranks do the same at the same rate, so one report stands for all of them; an operation takes as long as the rank
with the largest share of its pages.
"""

from collections.abc import Sequence

from benthic.common.layout import ceil_div
from benthic.kvcache import Command, OpId
from benthic.kvcache.commands import (
    DONE,
    FAILED,
    Backup,
    ClearDisk,
    Drain,
    LoadBack,
    Lookup,
    Reload,
    Spill,
    Touch,
)
from benthic.simulation.channel import Channel
from benthic.simulation.floor import Floor
from benthic.simulation.setup import Setup

LOOKUP_US = 1_000  # 2,000 hashes take under 5 ms
DISK_LATENCY_US = 500


class Workers:
    """Owns the channels, the disk floor and what is reported and not yet settled."""

    def __init__(self, setup: Setup) -> None:
        self.floor = Floor(setup.owners, setup.l3_pages) if setup.has_l3 else None
        self.seen: dict[OpId, int] = {}  # reported; the caller drops what is settled
        self._owners = setup.owners
        self._backups = Channel(setup.copy_us_per_page)
        self._load_backs = Channel(setup.copy_us_per_page)
        self._gathers = Channel(setup.copy_us_per_page)
        self._lookups = Channel(0, LOOKUP_US)
        self._disk = Channel(setup.disk_us_per_page, DISK_LATENCY_US)
        self._channels = (self._backups, self._load_backs, self._gathers, self._lookups, self._disk)
        self._spills: dict[OpId, Spill] = {}  # by gather, then by durable
        self._lookup_of: dict[OpId, Lookup] = {}
        self._reload_of: dict[OpId, Reload] = {}
        self._drain_of: dict[OpId, OpId | None] = {}  # cut reload whose last page is under way → its drain

    def submit(self, commands: Sequence[Command], now_us: int) -> None:
        """Take commands, in order."""
        for command in commands:
            self._submit(command, now_us)

    def _submit(self, command: Command, now_us: int) -> None:
        match command:
            case Backup():
                self._backups.submit(command.op, self._share(len(command.pages)), now_us)
            case LoadBack():
                self._load_backs.submit(command.op, self._share(len(command.pages)), now_us)
            case Spill():
                self._spills[command.gather] = command
                self._gathers.submit(command.gather, self._share(len(command.frames)), now_us)
            case Lookup():
                self._lookup_of[command.op] = command
                self._lookups.submit(command.op, 0, now_us)
            case Reload():
                self._reload_of[command.op] = command
                self._disk.submit(command.op, self._share(len(command.frames)), now_us, first=True)
            case Touch():
                assert self.floor is not None
                self.floor.touch(command.hashes, command.first, command.age)
            case Drain():
                if command.reload in self._drain_of:
                    self._drain_of[command.reload] = command.op
                else:
                    self.seen[command.op] = DONE
            case ClearDisk():
                raise ValueError("a replay flushes nothing")

    def next_us(self) -> int | None:
        """When the next transfer ends; None: nothing is under way."""
        return min((end for channel in self._channels if (end := channel.next_end_us()) is not None), default=None)

    def advance(self, now_us: int) -> None:
        """Report what has ended by `now_us`."""
        for channel in (self._backups, self._load_backs):
            self.seen.update(dict.fromkeys(channel.take_done(now_us), DONE))
        for op in self._gathers.take_done(now_us):
            spill = self._spills.pop(op)
            self._spills[spill.durable] = spill
            self._disk.submit(spill.durable, self._share(len(spill.frames)), now_us)
            self.seen[op] = DONE
        for op in self._lookups.take_done(now_us):
            self._answer_lookup(op)
        for op in self._disk.take_done(now_us):
            self._disk_done(op)

    def report_now(self, overdue: Sequence[OpId], now_us: int) -> None:
        """Lookups and reloads past their deadline: what is verified by now."""
        for op in overdue:
            if op in self.seen:
                continue
            if op in self._lookup_of:
                del self._lookup_of[op]
                self.seen[op] = 1
                continue
            reload = self._reload_of.pop(op)
            moved, under_way = self._disk.cut(op, now_us)
            if under_way:
                self._drain_of[op] = None
            self.seen[op] = 1 + self._on_disk(reload, min(moved * self._owners, len(reload.hashes)))

    def _answer_lookup(self, op: OpId) -> None:
        lookup = self._lookup_of.pop(op, None)
        if lookup is not None:
            assert self.floor is not None
            self.seen[op] = 1 + self.floor.num_leading(lookup.hashes, lookup.first)

    def _disk_done(self, op: OpId) -> None:
        assert self.floor is not None
        if (reload := self._reload_of.pop(op, None)) is not None:
            self.seen[op] = 1 + self._on_disk(reload, len(reload.hashes))
        elif op in self._drain_of:
            drain = self._drain_of.pop(op)
            if drain is not None:
                self.seen[drain] = DONE
        else:
            spill = self._spills.pop(op)
            self.seen[op] = DONE if self.floor.write(spill.hashes, spill.first, spill.age) else FAILED

    def _on_disk(self, reload: Reload, num_pages: int) -> int:
        """Of the first pages of a reload, those not collected since its lookup."""
        assert self.floor is not None
        return self.floor.num_leading(reload.hashes[:num_pages], reload.first)

    def _share(self, num_pages: int) -> int:
        return ceil_div(num_pages, self._owners)

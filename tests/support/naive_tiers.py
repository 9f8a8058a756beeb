"""A naive model of all tiers: flat dicts of whole prefixes, told what has happened, compared with what the core holds.

Like `NaiveCache` it does not choose what is evicted: it checks that whatever a tier has dropped was in no use, that a
tier has gained only what was committed, loaded back, backed up or reloaded, and that each tier is closed under prefix.
"""

from collections.abc import Iterable, Sequence

from benthic.common.layout import owner_of
from benthic.kvcache import CacheCore, Command, OpId, Stream
from benthic.kvcache.commands import DONE, Agreed, Backup, LoadBack, Reload, Spill

Prefix = tuple[bytes, ...]  # the hashes of all its pages, the first page's first


class NaiveTiers:
    """What each tier must hold, by prefix."""

    def __init__(self, core: CacheCore) -> None:
        self.core = core
        self.l1: dict[Prefix, None] = {}
        self.l2: dict[Prefix, None] = {}  # complete on every rank
        self.backups: dict[OpId, list[Prefix]] = {}  # attached and not settled
        self.limbo: dict[OpId, list[Prefix]] = {}  # rolled back: its copies may still be under way
        self.loads: dict[OpId, list[Prefix]] = {}
        self.gathers: dict[OpId, list[Prefix]] = {}
        self.reloads: dict[OpId, list[Prefix]] = {}
        self.whole: dict[bytes, Prefix] = {}  # by its last page

    def learn(self, hashes: Sequence[bytes]) -> None:
        """The prefixes of a request."""
        for end in range(1, len(hashes) + 1):
            self.whole[hashes[end - 1]] = tuple(hashes[:end])

    def leading(self, hashes: Sequence[bytes], limit: int) -> tuple[int, int]:
        """Leading pages in L1, and in any tier."""
        in_l1 = end = 0
        pending = self._pending()
        while end < min(limit, len(hashes)):
            prefix = tuple(hashes[: end + 1])
            if prefix in self.l1 and in_l1 == end:
                in_l1 = end + 1
            elif prefix not in self.l2 and prefix not in self.l1 and prefix not in pending:
                break
            end += 1
        return in_l1, end

    def _pending(self) -> dict[Prefix, OpId]:
        return {prefix: op for op, prefixes in self.backups.items() for prefix in prefixes}

    # --- what happens -------------------------------------------------------------------------------------------------

    def committed(self, hashes: Sequence[bytes], start: int, end: int) -> None:
        """A run's pages are in L1 from now on."""
        for index in range(start, end):
            self.l1[tuple(hashes[: index + 1])] = None

    def told(self, commands: Iterable[Command]) -> None:
        """What the core has issued."""
        for c in commands:
            match c:
                case Backup():
                    prefixes = self._of_operation(c.op)
                    assert all(p in self.l1 and p not in self.l2 for p in prefixes)
                    above = prefixes[0][:-1]
                    assert not above or above in self.l2 or above in self._pending(), "the parent has no copy"
                    self.backups[c.op] = prefixes
                case LoadBack():
                    self.loads[c.op] = self._of_operation(c.op)
                    assert all(p in self.l2 for p in self.loads[c.op]), "loaded back before it was complete"
                    self.l1 |= dict.fromkeys(self.loads[c.op])
                case Spill():
                    self.gathers[c.gather] = [self.whole[h] for h in c.hashes]
                    assert all(p in self.l2 for p in self.gathers[c.gather])
                case Reload():
                    self.reloads[c.op] = [self.whole[h] for h in c.hashes]
                    above = self.reloads[c.op][0][:-1]
                    assert not above or above in self.l2, "the attach point has no copy"

    def _of_operation(self, op_id: OpId) -> list[Prefix]:
        op = self.core.state.ops.ops[op_id]
        return [self.whole[h] for node in self.core.state.tree.nodes_of(op.bottom, op.first) for h in node.hashes]

    def settled(self, agreed: Iterable[Agreed]) -> None:
        """What is over on all ranks, in order."""
        for end in agreed:
            if end.op in self.limbo:
                del self.limbo[end.op]
            elif end.op in self.backups:
                prefixes = self.backups.pop(end.op)
                if end.value == DONE:
                    self.l2 |= dict.fromkeys(prefixes)
                else:
                    self._fail_below(prefixes)
            elif end.op in self.reloads:
                for prefix in self.reloads.pop(end.op)[: end.value - 1]:
                    if prefix in self._pending():
                        break
                    self.l2[prefix] = None
            self.loads.pop(end.op, None)
            self.gathers.pop(end.op, None)

    def _fail_below(self, failed: list[Prefix]) -> None:
        tops = dict.fromkeys(failed)
        for op, prefixes in list(self.backups.items()):
            first = prefixes[0]
            if any(first[:n] in tops for n in range(1, len(first) + 1)):
                self.limbo[op] = self.backups.pop(op)

    # --- comparing ----------------------------------------------------------------------------------------------------

    def used_l1(self) -> dict[Prefix, None]:
        """Prefixes that runs and copies lock in L1."""
        ends = [self.whole[run.node.hashes[-1]] for run in self.core.runs if run.num_cached]
        ends += [p[-1] for p in (*self.backups.values(), *self.limbo.values(), *self.loads.values())]
        return _with_heads(ends)

    def used_l2(self) -> dict[Prefix, None]:
        """Prefixes that copies, gathers, reloads and holds lock in L2."""
        ends = [p[-1] for p in (*self.backups.values(), *self.loads.values(), *self.gathers.values())]
        ends += [p[0][:-1] for p in self.reloads.values()]
        holds = self.core.reloads.holds.values()
        ends += [tuple(h.hashes[: h.landed_end]) for h in holds if h.node is not None]
        return _with_heads(ends)

    def compare(self) -> None:
        """Tiers, counts and closure; what a tier has dropped is forgotten if it might be."""
        l1: dict[Prefix, None] = {}
        l2: dict[Prefix, None] = {}
        pending: dict[Prefix, OpId] = {}
        for node in self.core.state.tree.nodes.values():
            prefixes = [self.whole[h] for h in node.hashes]
            assert len(prefixes[-1]) == node.end
            if node.l1 is not None:
                l1 |= dict.fromkeys(prefixes)
            if node.l2 is not None:
                l2 |= {} if node.backup else dict.fromkeys(prefixes)
                pending |= dict.fromkeys(prefixes, node.backup) if node.backup else {}
        _follow("L1", self.l1, l1, self.used_l1())
        _follow("L2", self.l2, l2, self.used_l2())
        assert pending == self._pending()
        for name, tier in (("L1", l1), ("L2", l2 | dict.fromkeys(pending))):
            assert all(len(p) == 1 or p[:-1] in tier for p in tier), f"{name} is not closed under prefix"
        self._compare_counts()

    def _compare_counts(self) -> None:
        core = self.core
        runs = dict.fromkeys(range(core.config.num_owners), 0)
        for run in core.runs:
            for index in range(run.num_cached, len(run.pages)):
                runs[owner_of(index, len(runs))] += 1
        for owner, lane in enumerate(core.lanes()):
            cached = sum(owner_of(len(p) - 1, len(runs)) == owner for p in self.l1)
            assert (lane.cached, lane.private) == (cached, runs[owner])
        in_l2 = [*self.l2, *self._pending()]
        for owner, lane in enumerate(core.l2_lanes()):
            assert lane.cached == sum(owner_of(len(p) - 1, len(runs)) == owner for p in in_l2)
            assert lane.total == lane.free + lane.cached + lane.private
        of_operations = sum(map(len, (*self.limbo.values(), *self.reloads.values())))
        of_operations += sum(op.num_pages for op in core.state.ops.of(Stream.DRAIN).values())
        assert sum(lane.private for lane in core.l2_lanes()) == of_operations


def _with_heads(ends: Iterable[Prefix]) -> dict[Prefix, None]:
    return {end[:n]: None for end in ends for n in range(1, len(end) + 1)}


def _follow(name: str, model: dict[Prefix, None], now: dict[Prefix, None], used: dict[Prefix, None]) -> None:
    for prefix in [p for p in model if p not in now]:
        assert prefix not in used, f"{name} has dropped what is in use"
        del model[prefix]
    assert not [p for p in now if p not in model], f"{name} holds what it was never given"

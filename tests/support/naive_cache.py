"""A naive model of the cache core: flat dicts of whole prefixes, and a memory in which freed pages are poisoned.

The model does not choose what is evicted. It watches what the core has dropped, checks that this was allowed, and that
whatever the core hands out holds the right bytes. A "token page" is one small number; a prefix is a tuple of them.
"""

from dataclasses import dataclass, field

from benthic.common.layout import owner_of
from benthic.kvcache import CacheCore, PageRun, extend

Prefix = tuple[int, ...]
POISON = "poison"


def hashes_of(prompt: Prefix) -> list[bytes]:
    """The content hash of each page of the sequence."""
    prev, hashes = b"root", []
    for token_page in prompt:
        prev = extend(prev, bytes([token_page]))
        hashes.append(prev)
    return hashes


@dataclass
class NaiveRun:
    """A sequence as the model sees it."""

    prompt: Prefix
    num_cached: int = 0
    pages: list[int] = field(default_factory=list)


class NaiveCache:
    """What must be cached, and what every page of memory holds."""

    def __init__(self, num_owners: int, pages_per_lane: int) -> None:
        self.num_owners = num_owners
        self.pages_per_lane = pages_per_lane
        self.cached: dict[Prefix, int] = {}  # prefix -> page that holds its last token page
        self.runs: dict[int, NaiveRun] = {}
        self.memory: list[list[Prefix | str]] = [[POISON] * pages_per_lane for _ in range(num_owners)]

    # --- what may be and what is --------------------------------------------------------------------------------------

    def leading(self, prompt: Prefix, limit: int) -> int:
        """Cached leading pages."""
        length = 0
        while length < min(limit, len(prompt)) and prompt[: length + 1] in self.cached:
            length += 1
        return length

    def locked(self) -> dict[Prefix, int]:
        """Cached prefixes that a run uses."""
        return {r.prompt[:n]: 1 for r in self.runs.values() for n in range(1, r.num_cached + 1)}

    def used(self, owner: int) -> int:
        """Pages of a lane that are cached or private; also: no page has two uses."""
        uses = [page for prefix, page in self.cached.items() if owner_of(len(prefix) - 1, self.num_owners) == owner]
        for run in self.runs.values():
            private = range(run.num_cached, len(run.pages))
            uses += [run.pages[index] for index in private if owner_of(index, self.num_owners) == owner]
        assert len(set(uses)) == len(uses), "a page has two uses"
        return len(uses)

    def evictable(self, owner: int) -> int:
        """Cached pages of a lane that no run uses."""
        locked = self.locked()
        return sum(p not in locked and owner_of(len(p) - 1, self.num_owners) == owner for p in self.cached)

    def room(self, run: NaiveRun, num_pages: int) -> list[int]:
        """Pages of each lane that would be free or evictable behind an allocation."""
        need = [0] * self.num_owners
        for index in range(len(run.pages), len(run.pages) + num_pages):
            need[owner_of(index, self.num_owners)] += 1
        return [self.pages_per_lane - self.used(o) + self.evictable(o) - need[o] for o in range(self.num_owners)]

    # --- following the core -------------------------------------------------------------------------------------------

    def took_cached(self, seq_id: int, run: PageRun) -> None:
        """The core has (re)matched: it must have taken the cached pages themselves."""
        model = self.runs[seq_id]
        for index in range(model.num_cached, run.num_cached):
            assert run.pages[index] == self.cached[model.prompt[: index + 1]]
        model.num_cached, model.pages = run.num_cached, list(run.pages)

    def allocated(self, seq_id: int, run: PageRun) -> None:
        """The core has given private pages; the sequence writes them at once."""
        model = self.runs[seq_id]
        assert run.pages[: len(model.pages)] == model.pages
        for index in range(len(model.pages), len(run.pages)):
            cell = self.memory[owner_of(index, self.num_owners)]
            assert cell[run.pages[index]] == POISON, "a page that is in use was handed out"
            cell[run.pages[index]] = model.prompt[: index + 1]
        model.pages = list(run.pages)

    def committed(self, seq_id: int, run: PageRun, num_pages: int) -> list[tuple[int, int]]:
        """The run's next pages have entered the cache; gives the duplicates that the core must name."""
        model = self.runs[seq_id]
        replaced = []
        for index in range(model.num_cached, model.num_cached + num_pages):
            prefix = model.prompt[: index + 1]
            if prefix in self.cached:
                model.pages[index] = self.cached[prefix]
                replaced.append((index, self.cached[prefix]))
            else:
                self.cached[prefix] = model.pages[index]
        model.num_cached += num_pages
        assert run.pages == model.pages
        return replaced

    def drop_evicted(self, core: CacheCore) -> list[Prefix]:
        """Forget what the core no longer has; none of it may be in use, and no page may be left without its prefix."""
        gone = [p for p in self.cached if core.probe(hashes_of(p), len(p)).in_l1 < len(p)]
        locked = self.locked()
        for prefix in gone:
            assert prefix not in locked, "a page in use was evicted"
            self.memory[owner_of(len(prefix) - 1, self.num_owners)][self.cached.pop(prefix)] = POISON
        assert all(len(p) == 1 or p[:-1] in self.cached for p in self.cached), "not closed under prefix"
        return gone

    def compare(self, core: CacheCore) -> None:
        """Poison what nobody uses, then read all that somebody does; counts and runs must agree with the core's."""
        live = [dict.fromkeys(range(0)) for _ in range(self.num_owners)]
        for prefix, page in self.cached.items():
            owner = owner_of(len(prefix) - 1, self.num_owners)
            assert self.memory[owner][page] == prefix, "a cached page was overwritten or freed"
            live[owner][page] = None
        for seq_id, run in self.runs.items():
            for index, page in enumerate(run.pages):
                owner = owner_of(index, self.num_owners)
                assert self.memory[owner][page] == run.prompt[: index + 1], f"sequence {seq_id} reads wrong bytes"
                live[owner][page] = None
        for owner, lane in enumerate(core.lanes()):
            for page in range(self.pages_per_lane):
                if page not in live[owner]:
                    self.memory[owner][page] = POISON
            cached = sum(owner_of(len(p) - 1, self.num_owners) == owner for p in self.cached)
            assert (lane.total, lane.cached, lane.free) == (
                self.pages_per_lane,
                cached,
                self.pages_per_lane - self.used(owner),
            )
            assert lane.locked == cached - self.evictable(owner)
            assert lane.total == lane.free + lane.cached + lane.private

"""The cache core's tree: match, insert and evict of multi-turn requests, hashed beforehand; hashing by itself.

2,000 requests of 8k tokens at page 64 in conversations of five turns; turn i shares its first i fifths with the one
before. Match is `probe`; insert is a whole sequence through the core (open, allocate, commit, close), on an empty L1
that is large enough; evict is one plan for half of all pages, carried out.
"""

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256

from benchmarks.common import arguments, measure, report
from benthic.common.layout import owner_of
from benthic.kvcache import CacheCore, CoreConfig, page_hashes, root_hash

PAGE_SIZE = 64  # tokens
TURNS = 5
AIMS = {"match_per_s": 100_000, "insert_per_s": 20_000}


def conversations(num_requests: int, num_tokens: int, seed: int) -> list[bytes]:
    """Token ids of each request; the turns of one conversation share a prefix, and different ones are mixed in time."""
    rng = random.Random(seed)
    requests: list[bytes] = []
    for _ in range(0, num_requests, TURNS):
        words = array("i", (rng.randrange(100_000) for _ in range(num_tokens)))
        for turn in range(TURNS):
            shared = num_tokens * turn // TURNS
            fresh = array("i", (rng.randrange(100_000) for _ in range(num_tokens - shared)))
            words = words[:shared] + fresh
            requests.append(words.tobytes())
    order = list(range(len(requests)))
    order.sort(key=lambda index: (index % TURNS, index))  # all first turns, then all second ones
    return [requests[index] for index in order[:num_requests]]


def insert_all(core: CacheCore, requests: Sequence[list[bytes]]) -> None:
    """Each request as one sequence: cached pages taken, the others allocated, committed and left behind."""
    for tick, hashes in enumerate(requests):
        core.begin_tick(tick)
        run = core.open(tick, hashes, len(hashes))
        missing = len(hashes) - run.num_cached
        if missing:
            if not core.allocate(run, missing):
                raise SystemExit("L1 is too small for the requests: no figures")
            core.commit(run, hashes[run.num_cached :])
        core.close(run)


def match_all(core: CacheCore, requests: Sequence[list[bytes]]) -> int:
    """Cached pages over all requests."""
    probe = core.probe
    return sum([probe(hashes, len(hashes)).in_l1 for hashes in requests])


def evict_half(core: CacheCore) -> int:
    """Allocate half of L1 for one sequence on a full cache; gives the pages evicted."""
    run = core.open(-1, (), 0)
    if not core.allocate(run, core.config.l1_pages * core.config.num_owners // 2):
        raise SystemExit("half of a full cache could not be evicted: no figures")
    return core.counters.evicted_l1


def main(argv: Sequence[str] | None = None) -> None:
    """Check what the core holds, then time it."""
    parser = arguments(__doc__.splitlines()[0], repeats=7)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--tokens", type=int, default=8_192)
    parser.add_argument("--owners", type=int, default=1)
    args = parser.parse_args(argv)
    root = root_hash(b"benchmark", None)
    tokens = conversations(args.requests, args.tokens, seed=11)
    requests = [page_hashes(root, ids, PAGE_SIZE) for ids in tokens]
    owner_of_hash = {h: owner_of(index, args.owners) for hashes in requests for index, h in enumerate(hashes)}
    distinct = len(owner_of_hash)
    lane = max(Counter(owner_of_hash.values()).values())

    def empty() -> CacheCore:
        return CacheCore(CoreConfig(num_owners=args.owners, l1_pages=lane, l1_free_pages=0))

    def full() -> CacheCore:
        core = empty()
        insert_all(core, requests)
        return core

    core = full()
    _check(core, requests, distinct)
    inserts = measure(lambda c: insert_all(c, requests), empty, args.repeats)
    matches = measure(lambda c: match_all(c, requests), lambda: core, args.repeats)
    evictions = measure(evict_half, full, args.repeats)
    long = b"".join(tokens)[: 4 * 131_072]
    hashing = measure(lambda _: page_hashes(root, long, PAGE_SIZE), lambda: None, args.repeats)
    plain = measure(lambda _: sha256(long).digest(), lambda: None, args.repeats)

    evicted = evict_half(full())
    figures = {
        "match_per_s": matches.per_second(args.requests),
        "insert_per_s": inserts.per_second(args.requests),
        "evict_pages_per_s": evictions.per_second(evicted),
        "hash_tokens_per_s": hashing.per_second(len(long) // 4),
        "sha256_tokens_per_s": plain.per_second(len(long) // 4),
        "requests": args.requests,
        "owners": args.owners,
        "pages": distinct,
        "nodes": core.num_nodes,
    }
    rows = [
        ("requests", f"{args.requests:,} of {args.tokens:,} tokens, {args.owners} owner(s)"),
        ("tree", f"{distinct:,} pages in {core.num_nodes:,} nodes"),
        ("match", f"{figures['match_per_s']:,.0f} requests/s; all: {matches.describe()}"),
        ("insert", f"{figures['insert_per_s']:,.0f} requests/s; all: {inserts.describe()}"),
        ("evict", f"{figures['evict_pages_per_s']:,.0f} pages/s; {evicted:,} pages: {evictions.describe()}"),
        ("hash", f"{figures['hash_tokens_per_s']:,.0f} tokens/s; 128k tokens: {hashing.describe()}"),
        ("SHA-256 of the same bytes at once", plain.describe()),
    ]
    rows += [(f"aim, {key}", f"{aim:,}: {'met' if figures[key] >= aim else 'MISSED'}") for key, aim in AIMS.items()]
    report("Cache core: tree and hashing", rows, figures, as_json=args.json)


def _check(core: CacheCore, requests: Sequence[list[bytes]], distinct: int) -> None:
    core.check()
    cached = sum(lane.cached for lane in core.lanes())
    if cached != distinct or match_all(core, requests) != sum(map(len, requests)):
        raise SystemExit(f"{distinct} pages went in, {cached} are cached: no figures")


if __name__ == "__main__":
    main()

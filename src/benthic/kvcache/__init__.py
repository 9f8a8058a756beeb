"""The replicated cache core: content hashes, radix tree, owner lanes and eviction planner. No I/O, no clock."""

from benthic.kvcache.errors import InvariantError
from benthic.kvcache.hashing import BIGRAM_BYTES, HASH_BYTES, TOKEN_BYTES, bigrams, extend, page_hashes, root_hash
from benthic.kvcache.machine import CacheCore, CoreConfig, LaneCounts, PageRun
from benthic.kvcache.planner import EvictionPlan, Holding, plan_eviction

__all__ = [
    "BIGRAM_BYTES",
    "HASH_BYTES",
    "TOKEN_BYTES",
    "CacheCore",
    "CoreConfig",
    "EvictionPlan",
    "Holding",
    "InvariantError",
    "LaneCounts",
    "PageRun",
    "bigrams",
    "extend",
    "page_hashes",
    "plan_eviction",
    "root_hash",
]

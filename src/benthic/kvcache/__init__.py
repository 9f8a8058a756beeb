"""The replicated cache core: hashes, radix tree, owner lanes, planner, operations and agreement. No I/O, no clock."""

from benthic.kvcache.agreement import MinReduce, agree, assert_same_state
from benthic.kvcache.commands import Agreed, Command, Completion, OpId, Stream
from benthic.kvcache.errors import InvariantError
from benthic.kvcache.hashing import BIGRAM_BYTES, HASH_BYTES, TOKEN_BYTES, bigrams, extend, page_hashes, root_hash
from benthic.kvcache.machine import CacheCore, Found, LaneCounts, PageRun
from benthic.kvcache.planner import EvictionPlan, Holding, plan_eviction
from benthic.kvcache.reload import Hold
from benthic.kvcache.state import CoreConfig, Counters

__all__ = [
    "BIGRAM_BYTES",
    "HASH_BYTES",
    "TOKEN_BYTES",
    "Agreed",
    "CacheCore",
    "Command",
    "Completion",
    "CoreConfig",
    "Counters",
    "EvictionPlan",
    "Found",
    "Hold",
    "Holding",
    "InvariantError",
    "LaneCounts",
    "MinReduce",
    "OpId",
    "PageRun",
    "Stream",
    "agree",
    "assert_same_state",
    "bigrams",
    "extend",
    "page_hashes",
    "plan_eviction",
    "root_hash",
]

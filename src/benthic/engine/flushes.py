"""Flushes that wait: L1 and L2 are dropped in the tick that asks, L3 when what is in flight there has settled."""

from benthic.engine.events import Events
from benthic.kvcache import CacheCore
from benthic.messages import FlushCache, FlushDone

NOT_EMPTY_YET = "L3 is not empty yet: transfers are still under way; it will be as soon as they end"


class Flushes:
    """Owns what L1 and L2 dropped and kept, by token, until L3's part is over."""

    def __init__(self, core: CacheCore) -> None:
        self._core = core
        self._asked: dict[int, tuple[dict[str, int], dict[str, int]]] = {}

    def ask(self, flush: FlushCache, events: Events) -> None:
        """Drop what can be dropped now; answered at once unless L3 is among the tiers."""
        done = self._core.flush(flush.tiers)
        if "l3" in flush.tiers and self._core.config.disk:
            self._asked[flush.token] = (done.dropped, done.kept)
            self._core.flush_disk(flush.token)
        else:
            events.flushed.append(FlushDone(flush.token, done.dropped, done.kept))

    def answer(self, events: Events) -> None:
        """Answer those whose L3 part is over, or has been held up past its bound."""
        for done in self._core.flushes.take_done():
            dropped, kept = self._asked.pop(done.token)
            events.flushed.append(FlushDone(done.token, dropped, kept, NOT_EMPTY_YET if done.late else ""))

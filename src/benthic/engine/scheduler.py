"""The scheduler: which requests compute what in this tick. Pure decisions over replicated state.

A tick is `begin(inputs)`, `tick(inputs) -> plan`, then the loop launches the plan, then `launched(plan)` lets the
written pages into the tree. The scheduler reads no clock, queue or device; with equal inputs every rank's scheduler
takes the same decisions.
"""

from bisect import insort
from heapq import merge

import numpy as np

from benthic.common.layout import ceil_div
from benthic.engine.events import Events
from benthic.engine.flushes import Flushes
from benthic.engine.plan import PrefillChunk, SchedulerLimits, StepPlan, StepResult, TickInput, Totals, stands_beside
from benthic.engine.request import Request, State, request_from
from benthic.engine.rows import Rows
from benthic.kvcache import CacheCore, Found, InvariantError, OpId, extend
from benthic.messages import Finished, FinishReason, Prefilled


def _order(request: Request) -> tuple[int, int]:
    return request.order


class Scheduler:
    """Owns the queue, the running requests and the cache core."""

    def __init__(self, limits: SchedulerLimits, core: CacheCore) -> None:
        self.limits = limits
        self.core = core
        self.rows = Rows(limits.max_running, limits.max_request_tokens, limits.page_size)
        self.waiting: list[Request] = []  # sorted by `order`
        self.requests: dict[int, Request] = {}  # everything not finished, by id
        self.held: list[Request] = []  # oldest first
        self.draining: list[Request] = []
        self.prefilling: list[Request] = []  # sorted by `order`
        self.totals = Totals()
        self._arrivals = 0
        self._flushes = Flushes(core)

    # --- the tick -----------------------------------------------------------------------------------------------------

    def begin(self, inputs: TickInput) -> None:
        """Before `tick`, with the same inputs: settle what all ranks agree on."""
        self.core.begin_tick(
            inputs.tick,
            inputs.now_us,
            inputs.agreed,
            read_us_per_page=inputs.read_us_per_page,
            compute_us_per_page=inputs.compute_us_per_page,
        )

    def tick(self, inputs: TickInput) -> tuple[StepPlan | None, Events]:
        """Take in what happened, then choose this tick's step (None: nothing can be computed now)."""
        events = Events()
        for result in inputs.results:
            self._take_result(result, events)
        for message in inputs.arrivals:
            request = request_from(message, self._arrivals, inputs.now_us)
            self._arrivals += 1
            self.requests[request.id] = request
            self._arrive(request)
        for request_id in inputs.aborts:
            if (gone := self.requests.get(request_id)) is not None:
                self._finish(gone, "abort", events)
        for flush in inputs.flushes:
            self._flushes.ask(flush, events)
        self._flushes.answer(events)
        self._settle_held()
        self._settle_draining()
        if self.limits.queue_timeout_us:
            self._time_out_waiting(inputs.now_us, events)
        decode_slots = self._decode_rows()
        chunks = self._prefill_chunks(inputs.now_us)
        # A prefill may have preempted decodes to make room, and have had to step back itself all the same.
        decode_slots = decode_slots[self.rows.decoding[decode_slots]]
        return self._plan(inputs.tick, decode_slots, chunks), events

    def launched(self, plan: StepPlan, events: Events) -> None:
        """The plan's forward is launched: whole pages enter the tree, lengths move on, first passes are reported."""
        rows = self.rows
        slots = plan.decode_slots
        rows.computed[slots] += 1
        rows.length[slots] += 1
        for chunk in plan.chunks:
            self._chunk_launched(chunk, events)
        self._commit_generated(slots)

    def _chunk_launched(self, chunk: PrefillChunk, events: Events) -> None:
        request, rows, slot = chunk.request, self.rows, chunk.slot
        end = chunk.start + chunk.count
        rows.computed[slot] = end
        request.fresh = False
        if chunk.logprob_rows:
            request.prompt_logprobs_sent = chunk.logprob_start + chunk.logprob_rows
        self._commit(request, end // self.limits.page_size)
        if not chunk.samples:
            return
        self.prefilling.remove(request)
        request.state = State.DECODE
        rows.length[slot] = end + 1
        rows.decoding[slot] = True
        if not request.prefilled:
            request.prefilled = True
            found = (request.cached_l1, request.cached_l2, request.cached_l3)
            events.prefilled.append(Prefilled(request.id, found[0], request.queue_us / 1e6, found[1], found[2]))
            if request.choice == 0:
                self.totals.prompt_tokens += request.prompt_len
                self.totals.cached_tokens_l1 += found[0]
                self.totals.cached_tokens_l2 += found[1]
                self.totals.cached_tokens_l3 += found[2]

    @property
    def num_running(self) -> int:
        return self.rows.num_used - len(self.draining)

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or drains."""
        return not self.requests

    # --- held requests ------------------------------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        """Held if the disk may have what the tree lacks, else waiting."""
        if request.may_match:
            request.hold = self.core.hold(request.id, request.hashes, self._match_limit(request))
        if request.hold is not None:
            request.state = State.HELD
            self.held.append(request)
        else:
            insort(self.waiting, request, key=_order)

    def _settle_held(self) -> None:
        """Whoever needs to wait for the disk no longer is free for admission, in its place in the queue."""
        for request in [r for r in self.held if r.hold is None or r.hold.done]:
            self.held.remove(request)
            request.state = State.WAITING
            insort(self.waiting, request, key=_order)

    def _let_go_of_hold(self, request: Request) -> None:
        if request.hold is not None:
            self.core.release(request.hold)
            request.hold = None

    # --- results ------------------------------------------------------------------------------------------------------

    def _take_result(self, result: StepResult, events: Events) -> None:
        """Append the step's tokens to the requests that still hold their slot, and finish those that ended."""
        rows = self.rows
        plan = result.plan
        events.add_prompt_logprobs(plan, result.output, self.requests)  # first: the token may end its request
        alive = np.flatnonzero(rows.epoch[plan.sample_slots] == plan.sample_epochs)
        slots = plan.sample_slots[alive]
        if len(slots):
            tokens = result.output.tokens[alive]
            stopped, too_long = rows.append_tokens(slots, tokens)
            self.totals.generated_tokens += len(slots)
            events.add_tokens(rows.ids[slots], tokens)
            events.add_extras(plan, result.output, alive, rows)
            page_full = rows.known[slots] % self.limits.page_size == 0
            for slot in slots[page_full].tolist():
                self._hash_generated(rows.requests[slot])
            self._commit_generated(slots)
            for i in np.flatnonzero(stopped | too_long).tolist():
                request = rows.requests[int(slots[i])]
                assert request is not None
                self._finish(request, "stop" if stopped[i] else "length", events)

    def _hash_generated(self, request: Request | None) -> None:
        """The sequence's last whole page is known: continue its chain of content hashes."""
        assert request is not None
        p, rows = self.limits.page_size, self.rows
        known = int(rows.known[request.slot])
        while (done := len(request.hashes)) < known // p:
            page = rows.history[request.slot, done * p : (done + 1) * p]
            request.hashes.append(extend(request.hashes[-1] if done else request.root, page.tobytes()))

    def _commit_generated(self, slots: np.ndarray) -> None:
        """Pages of decoding rows whose KV is launched and whose tokens are known enter the tree."""
        rows = self.rows
        whole = np.minimum(rows.computed[slots], rows.known[slots]) // self.limits.page_size
        for slot in slots[(whole > rows.committed[slots]) & rows.decoding[slots]].tolist():
            request = rows.requests[slot]
            assert request is not None
            self._commit(request, int(min(rows.computed[slot], rows.known[slot])) // self.limits.page_size)

    def _commit(self, request: Request, num_pages: int) -> None:
        """The first `num_pages` pages of the request belong to the tree from now on."""
        rows, run = self.rows, request.run
        assert run is not None
        start = run.num_cached
        if num_pages > start:
            for page_idx, page in self.core.commit(run, request.hashes[start:num_pages]):
                rows.table[request.slot, page_idx] = page  # a duplicate: the tree's page, ours is free
        rows.committed[request.slot] = max(num_pages, start)

    def _finish(
        self, request: Request, reason: FinishReason, events: Events, message: str = "", status: int = 500
    ) -> None:
        """The request ends: its cached pages stay, everything else is free at once."""
        queues = {
            State.HELD: self.held,
            State.WAITING: self.waiting,
            State.PREFILL: self.prefilling,
            State.DRAINING: self.draining,
        }
        if request.state in queues:
            queues[request.state].remove(request)
        self._release(request)
        request.state = State.FINISHED
        del self.requests[request.id]
        events.finished.append(Finished(request.id, reason, message, status))

    def _release(self, request: Request) -> None:
        if request.run is not None:
            self.core.close(request.run)
            request.run = None
        self._let_go_of_hold(request)
        if request.slot >= 0:
            self.rows.give_back(request.slot)

    def _time_out_waiting(self, now_us: int, events: Events) -> None:
        bound = self.limits.queue_timeout_us
        queued = (*self.held, *self.waiting)
        for request in [r for r in queued if not r.admitted and now_us - r.received_us > bound]:
            waited = (now_us - request.received_us) / 1e6
            message = (
                f"the request waited {waited:.1f} s for its start, longer than --queue-timeout {bound / 1e6:g} s; "
                "try again later"
            )
            self._finish(request, "error", events, message, 503)

    # --- preemption ---------------------------------------------------------------------------------------------------

    def _preempt_for(self, request: Request) -> bool:
        """Preempt the newest running request of the lowest priority.

        False if that is `request` itself (now preempted).
        """
        victim = max((r for r in self.rows.requests if r is not None and r.run is not None), key=_order)
        self._preempt(victim)
        return victim is not request

    def _preempt(self, request: Request) -> None:
        """Give up the request's pages; those in the tree stay cached, so it comes back through the cache."""
        rows, slot = self.rows, request.slot
        assert request.run is not None
        if request.state is State.PREFILL:
            self.prefilling.remove(request)
            request.high_water = max(request.high_water, int(rows.computed[slot]))
        else:
            request.high_water = int(rows.known[slot])
        self.core.close(request.run)
        request.run = None
        rows.decoding[slot] = False
        request.state = State.DRAINING  # sampled tokens may still arrive; then it waits again
        self.draining.append(request)
        self.totals.preemptions += 1

    def _settle_draining(self) -> None:
        """Preempted requests whose sampled tokens have all arrived go back to their place in the queue."""
        for request in list(self.draining):
            slot = request.slot
            if self.rows.known[slot] == self.rows.length[slot]:
                self.draining.remove(request)
                request.tokens = self.rows.history[slot, : self.rows.known[slot]].copy()
                self.rows.give_back(slot)
                request.state = State.WAITING
                insort(self.waiting, request, key=_order)

    # --- choosing -----------------------------------------------------------------------------------------------------

    def _decode_rows(self) -> np.ndarray:
        """Slots that decode in this tick; each has a page for its new position."""
        rows = self.rows
        slots = np.flatnonzero(rows.decoding & (rows.length < rows.limit))
        short = slots[rows.computed[slots] // self.limits.page_size >= rows.num_pages[slots]]
        if not len(short):
            return slots
        needy = [r for s in short.tolist() if (r := rows.requests[s]) is not None]
        for request in sorted(needy, key=_order):
            self._grow(request, 1)
        room = rows.computed[slots] // self.limits.page_size < rows.num_pages[slots]
        return slots[rows.decoding[slots] & room]

    def _grow(self, request: Request, num_pages: int) -> bool:
        """Allocate pages for a running request, preempting others until they fit.

        False: it was preempted itself, or sits out this tick because pages under a copy will be free soon.
        """
        while request.run is not None:
            if self.core.allocate(request.run, num_pages):
                self.rows.set_pages(request.slot, request.run.pages, len(request.run.pages) - num_pages)
                return True
            if self.core.copying:
                return False
            if not self._preempt_for(request):
                return False
        return False

    def _prefill_chunks(self, now_us: int) -> list[PrefillChunk]:
        """Chunks of running prefills and of newly admitted requests, within the tick's token budget.

        All in their order: a long prompt of low priority does not keep what comes before it from being admitted.
        """
        budget = self.limits.chunk_tokens
        chunks: list[PrefillChunk] = []
        computing: set[bytes] = set()  # hashes of the pages in this tick's chunks; asked for membership only
        waiting = self.waiting[: self.limits.max_running] if self.rows.free else []
        admitting = True
        for request in merge(list(self.prefilling), waiting, key=_order):
            if budget <= 0:
                break
            if request.state is State.PREFILL:  # else it was preempted for one before it
                budget -= self._next_chunk(request, budget, chunks, computing)
            elif request.state is State.WAITING and admitting and self.rows.free:
                found = self._probe(request)
                if self._being_computed(request, found.end, computing):
                    continue
                if not stands_beside(chunks, found.end * self.limits.page_size, self.limits.step_context_tokens):
                    break
                count = self._admit(request, found, budget)
                admitting = count > 0  # first come, first served: who needs less does not overtake
                if admitting:
                    request.queue_us = now_us - request.received_us if not request.admitted else request.queue_us
                    request.admitted = True
                    if not self._sits_out(request):
                        budget -= self._add_chunk(request, count, chunks, computing)
        return chunks

    def _next_chunk(self, request: Request, budget: int, chunks: list[PrefillChunk], computing: set[bytes]) -> int:
        """The next chunk of a running prefill. Returns its tokens: 0 if it waits, or was preempted for lack of room."""
        if self._sits_out(request):
            return 0
        self._adopt(request)
        if self._sits_out(request):  # what it has adopted is being loaded back
            return 0
        if self._being_computed(request, request.run.num_cached if request.run else 0, computing):
            return 0
        if not stands_beside(chunks, int(self.rows.computed[request.slot]), self.limits.step_context_tokens):
            return 0
        count = self._chunk_len(request, budget)
        need = self._pages_short(request, count)
        if count and (not need or self._grow(request, need)):
            return self._add_chunk(request, count, chunks, computing)
        return 0

    def _sits_out(self, request: Request) -> bool:
        """Beside running decodes a request joins the batch when its load-back has settled; alone, at once."""
        assert request.run is not None
        return bool(request.run.load_backs) and bool(self.rows.decoding.any())

    def _probe(self, request: Request) -> Found:
        if not request.may_match:
            return Found(0, 0)
        return self.core.probe(request.hashes, self._match_limit(request))

    def _match_limit(self, request: Request) -> int:
        """Pages that may come from the cache: at least one token is always computed."""
        return (len(request.tokens) - 1) // self.limits.page_size if request.may_match else 0

    def _being_computed(self, request: Request, page_idx: int, computing: set[bytes]) -> bool:
        """Its next page is in a chunk of this tick: wait one tick, then find it in the tree."""
        return (
            request.may_match
            and page_idx < min(len(request.hashes), self._match_limit(request))
            and request.hashes[page_idx] in computing
        )

    def _adopt(self, request: Request) -> None:
        """Pages that another request has computed since this one's last chunk need no computing."""
        run, rows = request.run, self.rows
        assert run is not None
        if not request.may_match or len(run.pages) != run.num_cached:
            return
        start = run.num_cached
        if self.core.adopt(run, request.hashes, self._match_limit(request)):
            self._count_hits(request, start, run.num_cached)
            rows.set_pages(request.slot, run.pages, start)
            rows.computed[request.slot] = run.num_cached * self.limits.page_size
            rows.committed[request.slot] = run.num_cached

    def _count_hits(self, request: Request, first_page: int, end_page: int) -> None:
        """Tokens taken from the cache that the request had not computed itself before a preemption."""
        if not request.prefilled:
            p = self.limits.page_size
            request.cached_l1 += max(0, end_page * p - max(first_page * p, request.high_water))

    def _count_lower_hits(self, request: Request, found: Found) -> None:
        """The same for pages that L1 lacked: from the disk where the request was held for them, else from L2."""
        if request.prefilled or found.end == found.in_l1:
            return
        p, hold = self.limits.page_size, request.hold
        start, end = max(found.in_l1 * p, request.high_water), found.end * p
        from_disk = 0
        if hold is not None:
            from_disk = max(0, min(end, hold.landed_end * p) - max(start, hold.landed_first * p))
        request.cached_l3 += from_disk
        request.cached_l2 += max(0, end - start) - from_disk

    def _chunk_len(self, request: Request, budget: int) -> int:
        """Tokens of the next chunk: to the end of the prompt, or to a page border."""
        start = int(self.rows.computed[request.slot])
        return self._cut(start, len(request.tokens), budget)

    def _cut(self, start: int, total: int, budget: int) -> int:
        left = total - start
        if left <= budget:
            return left
        end = (start + budget) // self.limits.page_size * self.limits.page_size
        return max(0, end - start)

    def _pages_short(self, request: Request, count: int) -> int:
        assert request.run is not None
        end = int(self.rows.computed[request.slot]) + count
        return ceil_div(end, self.limits.page_size) - len(request.run.pages)

    def _admit(self, request: Request, found: Found, budget: int) -> int:
        """Start the request if its next chunk and a page of decode fit.

        Returns the chunk's tokens, 0 if it has to wait.
        """
        p = self.limits.page_size
        start = found.end * p
        count = self._cut(start, len(request.tokens), budget)
        need = ceil_div(start + count, p) - found.in_l1  # those to be loaded back included
        alone = self.rows.num_used == len(self.draining)
        # With nothing running the request fits whatever the watermark: its limit is what L1 holds.
        extra, keep_free = (0, 0) if alone else (1, self.limits.l1_free_pages)
        if count == 0 or not self.core.has_room_to_open(request.hashes, found.in_l1, need + extra, keep_free):
            return 0
        self.waiting.remove(request)
        run = request.run = self.core.open(request.id, request.hashes, found.end)
        if run.num_cached != found.end or not self.core.allocate(run, need - (found.end - found.in_l1)):
            raise InvariantError(f"request {request.id}: {need} pages had room and could not be allocated")
        request.state = State.PREFILL
        request.fresh = True
        slot = self.rows.take(request)
        self._count_hits(request, 0, found.in_l1)
        self._count_lower_hits(request, found)
        self._let_go_of_hold(request)
        self.rows.set_pages(slot, run.pages, 0)
        self.rows.computed[slot] = start
        self.rows.committed[slot] = found.end
        insort(self.prefilling, request, key=_order)
        return count

    def _add_chunk(self, request: Request, count: int, chunks: list[PrefillChunk], computing: set[bytes]) -> int:
        start = int(self.rows.computed[request.slot])
        end = start + count
        p = self.limits.page_size
        computing.update(request.hashes[start // p : end // p])
        logprob_start = logprob_rows = 0
        if request.params.prompt_logprobs is not None:
            # Row i holds the distribution of prompt token i + 1; those launched before a preemption are not wanted
            # again.
            logprob_start = max(start, request.prompt_logprobs_sent)
            logprob_rows = max(0, min(end, request.prompt_len - 1) - logprob_start)
        chunks.append(
            PrefillChunk(
                request=request,
                slot=request.slot,
                start=start,
                count=count,
                samples=end == len(request.tokens),
                first=request.fresh,
                logprob_start=logprob_start,
                logprob_rows=logprob_rows,
            )
        )
        return count

    # --- the plan -----------------------------------------------------------------------------------------------------

    def _plan(self, tick: int, decode_slots: np.ndarray, chunks: list[PrefillChunk]) -> StepPlan | None:
        if not len(decode_slots) and not chunks:
            return None
        sampling = [c.slot for c in chunks if c.samples]
        sample_slots = np.concatenate([decode_slots, np.array(sampling, np.int64)]) if sampling else decode_slots
        return StepPlan(
            tick=tick,
            decode_slots=decode_slots,
            chunks=tuple(chunks),
            sample_slots=sample_slots,
            sample_epochs=self.rows.epoch[sample_slots],
            sample_hidden=self.rows.hidden[sample_slots],
            load_backs=self._load_backs_of(decode_slots, chunks) if self.core.loading_back else (),
        )

    def _load_backs_of(self, decode_slots: np.ndarray, chunks: list[PrefillChunk]) -> tuple[OpId, ...]:
        """Load-backs in flight into pages that these rows read."""
        requests = [self.rows.requests[slot] for slot in decode_slots.tolist()] + [c.request for c in chunks]
        ops: dict[OpId, None] = {}
        for request in requests:
            if request is not None and request.run is not None:
                ops.update(dict.fromkeys(request.run.load_backs))
        return tuple(ops)

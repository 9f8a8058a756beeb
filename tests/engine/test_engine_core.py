"""The scheduler and the cache core together, over a runner whose answers depend on every page's content."""

from hypothesis import given, settings
from hypothesis import strategies as st

from benthic.messages import Abort, CacheState, FlushCache, FlushDone, QueryState
from tests.support.engine_driver import Driver
from tests.support.fake_runner import EOS, greedy, next_token


def prompt_of(length: int, start: int = 1) -> list[int]:
    return [(start * 17 + i * 5) % 90 for i in range(length)]


def test_one_request_gets_the_models_tokens_and_ends_by_length():
    d = Driver()
    d.run(d.submit(1, prompt_of(37), max_tokens=9))
    assert d.seen[1].tokens == greedy(prompt_of(37), 9)
    assert d.seen[1].finished is not None
    assert d.seen[1].finished.reason == "length"
    assert d.seen[1].cached == 0
    d.assert_no_leak()


def test_an_end_token_ends_the_request_and_the_token_computed_beyond_it_is_dropped():
    prompt = next(prompt_of(9, s) for s in range(500) if EOS in greedy(prompt_of(9, s), 12)[2:-2])
    d = Driver()
    d.run(d.submit(1, prompt, max_tokens=12, stop_token_ids=(EOS,)))
    assert d.seen[1].tokens == greedy(prompt, 12, (EOS,))
    assert d.seen[1].finished is not None
    assert d.seen[1].finished.reason == "stop"
    d.assert_no_leak()


def test_every_page_sized_length_three_times_and_the_next_turn():
    """Case C1: whole-prompt hits leave one page to compute; generated pages are found by the next turn."""
    p = 4
    for n in (1, p - 1, p, p + 1, 2 * p, 4 * p, 15, 16, 17):
        d = Driver(page_size=p, chunk_tokens=16)
        prompt = prompt_of(n)
        answer = greedy(prompt, 6)
        for i in range(3):
            d.run(d.submit(i, prompt, max_tokens=6))
            assert d.seen[i].tokens == answer
            assert d.seen[i].cached == (0 if i == 0 else (n - 1) // p * p)
        turn = prompt + answer + prompt_of(5, 3)
        d.run(d.submit(9, turn, max_tokens=6))
        assert d.seen[9].tokens == greedy(turn, 6)
        assert d.seen[9].cached == (n + 5) // p * p  # the last generated token was never fed back
        d.assert_no_leak()


def test_a_prefix_brought_by_many_at_once_is_computed_once():
    d = Driver(max_running=8, chunk_tokens=32, l1_pages=200)
    prompt = prompt_of(101)
    d.run(*(d.submit(i, prompt, max_tokens=3, choice=i) for i in range(6)))
    assert all(d.seen[i].tokens == greedy(prompt, 3) for i in range(6))
    # one whole computation; the others compute what no page holds (101 = 25 pages + 1) and decode
    assert d.runner.computed_tokens <= 101 + 5 * 1 + 6 * 3
    assert [d.seen[i].cached for i in range(6)] == [0] + [100] * 5
    d.assert_no_leak()


def test_preemption_all_the_time_still_answers_right():
    d = Driver(l1_pages=12, page_size=4, max_running=6, chunk_tokens=8, l1_free_pages=1, max_request_tokens=48)
    prompts = {i: prompt_of(9 + i % 5, i) for i in range(20)}
    d.run(*(d.submit(i, p, max_tokens=24) for i, p in prompts.items()))
    for i, p in prompts.items():
        assert d.seen[i].tokens == greedy(p, 24), i
    assert d.engine.scheduler.totals.preemptions > 10
    # case H3: unrelated prompts show no hits, whatever was preempted
    assert d.engine.scheduler.totals.cached_tokens_l1 == 0
    assert d.engine.scheduler.totals.prompt_tokens == sum(map(len, prompts.values()))
    d.assert_no_leak()


def test_prompt_logprobs_cover_the_prompt_even_when_the_first_token_ends_the_request():
    """Echo with max_tokens 0 or 1: the last chunk's scores and the end come in one result."""
    for n in (2, 8, 9, 33):
        d = Driver(chunk_tokens=8)
        d.run(d.submit(1, prompt_of(n), max_tokens=1, prompt_logprobs=2))
        assert d.seen[1].prompt_scores == [-float(i) for i in range(1, n)]
        d.run(
            d.submit(2, prompt_of(n), max_tokens=3, prompt_logprobs=0)
        )  # the prompt is cached now, and scored all the same
        assert d.seen[2].prompt_scores == [-float(i) for i in range(1, n)]
        assert d.seen[2].tokens == greedy(prompt_of(n), 3)
        d.assert_no_leak()


def test_what_comes_beside_the_tokens_survives_preemption():
    """Log-probabilities and hidden states: one a token, in order, none twice, none lost."""
    d = Driver(l1_pages=12, page_size=4, max_running=6, chunk_tokens=8, l1_free_pages=0, max_request_tokens=48)
    prompts = {i: prompt_of(9 + i % 5, i) for i in range(12)}
    extras = {"logprobs": 1, "prompt_logprobs": 1, "return_hidden_states": True}
    d.run(*(d.submit(i, p, max_tokens=24, **(extras if i % 3 else {})) for i, p in prompts.items()))
    assert d.engine.scheduler.totals.preemptions > 5
    for i, p in prompts.items():
        seen = d.seen[i]
        assert seen.tokens == greedy(p, 24), i
        assert seen.scores == ([-float(t) for t in seen.tokens] if i % 3 else []), i
        assert seen.hidden == ([float(t) for t in seen.tokens] if i % 3 else []), i
        assert seen.prompt_scores == ([-float(at) for at in range(1, len(p))] if i % 3 else []), i
    d.assert_no_leak()


def test_a_decode_preempted_for_a_prefill_that_steps_back_too_does_not_run_in_that_tick():
    """The driver checks it after each tick; the jobs are (arrival, prompt, answer, priority)."""
    d = Driver(l1_pages=12, max_running=4, chunk_tokens=16, l1_free_pages=1, max_request_tokens=48, seed=1093)
    jobs = [(9, 29, 7, -1), (7, 4, 9, 1), (8, 15, 11, -1), (11, 19, 9, 0)]
    for tick in range(15):
        due = [(i, n, m, p) for i, (at, n, m, p) in enumerate(jobs) if at == tick]
        d.tick(*(d.submit(i, prompt_of(n, i), max_tokens=m, priority=p) for i, n, m, p in due))
    d.run()
    assert d.engine.scheduler.totals.preemptions >= 2
    for i, (_, n, m, _) in enumerate(jobs):
        assert d.seen[i].tokens == greedy(prompt_of(n, i), m)


def test_a_penalised_request_restarts_its_counts_with_what_it_has_generated():
    """After each (re)admission the device's counts start from the prompt and all tokens so far."""
    d = Driver(l1_pages=12, page_size=4, max_running=6, chunk_tokens=8, l1_free_pages=0, max_request_tokens=48)
    prompts = {i: prompt_of(9 + i % 5, i) for i in range(8)}
    d.run(*(d.submit(i, p, max_tokens=24, presence_penalty=0.5) for i, p in prompts.items()))
    inits = [init for step in d.runner.steps for init in step.penalty_inits]
    assert len(inits) == len(prompts) + d.engine.scheduler.totals.preemptions > len(prompts) + 3
    whole = [(p, d.seen[i].tokens) for i, p in prompts.items()]
    for init in inits:
        known = next(tokens for prompt, tokens in whole if prompt == init.prompt.tolist())
        assert init.output.tolist() == known[: len(init.output)]
    assert sum(len(init.output) > 0 for init in inits) > 3


def test_end_tokens_are_forbidden_up_to_min_tokens_and_end_the_request_behind_it():
    starts = (prompt_of(n, s) for n in range(3, 30) for s in range(90))
    prompt = next(p for p in starts if EOS in greedy(p, 3)[1:])
    d = Driver()
    d.run(d.submit(1, prompt, max_tokens=12, min_tokens=4, stop_token_ids=(EOS,)))
    banned = {int(s.sampling.position[0]) - len(prompt) for s in d.runner.steps if s.sampling.bias is not None}
    assert banned == {0, 1, 2, 3}
    assert d.seen[1].tokens[:4] == greedy(prompt, 4)  # the fake model does not heed the ban: the engine must not stop
    d.run(d.submit(2, prompt, max_tokens=12, min_tokens=1, stop_token_ids=(EOS,)))
    assert d.seen[2].tokens == greedy(prompt, 12, (EOS,))


def test_a_request_as_large_as_l1_runs_after_others():
    d = Driver(l1_pages=10, page_size=4, max_request_tokens=40)
    d.run(d.submit(0, prompt_of(20, 2)), d.submit(1, prompt_of(36), max_tokens=4), d.submit(2, prompt_of(8, 5)))
    for i, p in ((0, prompt_of(20, 2)), (1, prompt_of(36)), (2, prompt_of(8, 5))):
        assert d.seen[i].tokens == greedy(p, 4)
    d.run(d.submit(3, prompt_of(40 - 1), max_tokens=1))
    assert d.seen[3].tokens == greedy(prompt_of(39), 1)
    d.assert_no_leak()


def test_lower_priority_values_run_first():
    d = Driver(max_running=1)
    d.tick(d.submit(0, prompt_of(8), max_tokens=3))
    d.run(d.submit(1, prompt_of(8, 2), priority=5), d.submit(2, prompt_of(8, 3), priority=-1))
    order = [r.id for reply in d.replies for r in getattr(reply, "finished", ())]
    assert order == [0, 2, 1]


def test_a_long_prefill_of_low_priority_does_not_hold_up_a_request_that_goes_before_it():
    d = Driver(chunk_tokens=8, l1_pages=100)
    d.tick(d.submit(0, prompt_of(200), priority=1))
    d.tick(d.submit(1, prompt_of(9, 2), priority=0, max_tokens=2), d.submit(2, prompt_of(9, 3), priority=1))
    while d.seen[1].finished is None:
        d.tick()
    assert d.seen[0].cached is None  # its prompt is not done yet
    assert d.seen[2].cached is None  # same priority, later: not before it
    d.run()
    order = [r.id for reply in d.replies for r in getattr(reply, "prefilled", ())]
    assert order == [1, 0, 2]
    for i, p in enumerate((prompt_of(200), prompt_of(9, 2), prompt_of(9, 3))):
        assert d.seen[i].tokens == greedy(p, 2 if i == 1 else 4)
    d.assert_no_leak()


def test_an_abort_in_every_state_frees_everything():
    for ticks_before in range(12):
        d = Driver(max_running=2, chunk_tokens=8)
        d.tick(*(d.submit(i, prompt_of(30, i), max_tokens=10) for i in range(4)))
        for _ in range(ticks_before):
            d.tick()
        alive = tuple(i for i in range(4) if d.seen[i].finished is None)
        d.run(Abort(alive))
        assert all(d.seen[i].finished is not None and d.seen[i].finished.reason == "abort" for i in alive)
        d.assert_no_leak()


def test_an_abort_that_comes_with_its_own_submit_ends_the_request():
    d = Driver()
    d.run(d.submit(1, prompt_of(5)), Abort((1,)))
    assert d.seen[1].finished is not None
    assert d.seen[1].finished.reason == "abort"
    d.assert_no_leak()


def test_queue_timeout_ends_a_request_that_never_started():
    d = Driver(max_running=1, queue_timeout_us=100_000)
    d.run(d.submit(0, prompt_of(4), max_tokens=200), d.submit(1, prompt_of(4, 2)))
    assert d.seen[0].tokens == greedy(prompt_of(4), 200)
    assert d.seen[1].finished is not None
    assert (d.seen[1].finished.reason, d.seen[1].finished.status) == ("error", 503)
    assert "--queue-timeout" in d.seen[1].finished.message


def test_flush_beside_running_requests_keeps_theirs_and_says_so():
    d = Driver(l1_pages=64)
    d.run(d.submit(0, prompt_of(32)))
    d.tick(d.submit(1, prompt_of(32, 2), max_tokens=40))
    for _ in range(6):
        d.tick()
    d.tick(FlushCache(5))
    done = next(r for r in d.replies if isinstance(r, FlushDone))
    assert done.token == 5
    assert done.dropped["l1"] >= 8
    assert done.kept["l1"] > 0
    d.run()
    assert d.seen[1].tokens == greedy(prompt_of(32, 2), 40)
    d.run(d.submit(2, prompt_of(32)))
    assert d.seen[2].cached == 0
    d.assert_no_leak()


def test_salted_requests_do_not_share_pages():
    d = Driver()
    d.run(d.submit(0, prompt_of(32)))
    d.run(d.submit(1, prompt_of(32), salt="tenant"))
    d.run(d.submit(2, prompt_of(32), salt="tenant"))
    assert [d.seen[i].cached for i in range(3)] == [0, 0, 28]


def test_state_adds_up():
    d = Driver()
    d.tick(d.submit(0, prompt_of(30)), QueryState(3))
    state = next(r for r in d.replies if isinstance(r, CacheState))
    assert state.token == 3
    assert state.running == 1
    assert sum(lane.free + lane.cached + lane.private for lane in state.lanes) == 64


def test_a_prefill_preempted_half_way_counts_none_of_its_own_pages_as_hits():
    """Case H3: it comes back through the cache, but nobody else had computed what it finds there."""
    d = Driver(l1_pages=14, max_running=2, chunk_tokens=4, l1_free_pages=0, max_request_tokens=56)
    d.tick(d.submit(0, prompt_of(8), max_tokens=40))
    d.run(d.submit(1, prompt_of(44, 3), max_tokens=2))
    assert d.engine.scheduler.totals.preemptions > 0
    assert d.seen[1].tokens == greedy(prompt_of(44, 3), 2)
    assert [d.seen[i].cached for i in range(2)] == [0, 0]
    d.assert_no_leak()


def test_nothing_is_computed_beyond_the_last_token():
    for seed in range(10):  # the seed decides when results arrive
        d = Driver(seed=seed)
        d.run(d.submit(1, prompt_of(21), max_tokens=7))
        assert d.runner.computed_tokens == 21 + 7 - 1


def test_background_eviction_keeps_the_watermark():
    d = Driver(l1_pages=32, l1_free_pages=6, max_request_tokens=64)
    for i in range(12):
        d.run(d.submit(i, prompt_of(30, i), max_tokens=3))
        assert d.core.lanes()[0].free >= 6
    assert d.core.counters.evicted_l1 > 0
    assert d.core.lanes()[0].cached > 10


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[int, list[int], int, int]]:
    """(tick of arrival, prompt, max_tokens, priority); prompts share heads."""
    heads = [prompt_of(draw(st.integers(0, 30)), s) for s in range(3)]
    jobs = []
    for i in range(draw(st.integers(1, 14))):
        head = heads[draw(st.integers(0, 2))]
        prompt = (head + prompt_of(draw(st.integers(1, 12)), 20 + i * draw(st.integers(0, 1))))[:36]
        jobs.append((draw(st.integers(0, 20)), prompt, draw(st.integers(1, 12)), draw(st.integers(-1, 1))))
    return jobs


@settings(max_examples=120, deadline=None)
@given(
    jobs=workloads(),
    l1_pages=st.integers(12, 40),
    max_running=st.integers(1, 6),
    chunk_pages=st.integers(1, 5),
    free_pages=st.integers(0, 4),
    seed=st.integers(0, 99),
    aborts=st.dictionaries(st.integers(0, 13), st.integers(0, 40), max_size=4),
    flushes=st.sets(st.integers(0, 40), max_size=2),
)
def test_any_workload_gets_the_answers_of_one_request_alone(
    jobs, l1_pages, max_running, chunk_pages, free_pages, seed, aborts, flushes
):
    d = Driver(
        l1_pages=l1_pages,
        max_running=max_running,
        chunk_tokens=4 * chunk_pages,
        l1_free_pages=free_pages,
        max_request_tokens=48,
        seed=seed,
    )
    for tick in range(42):
        messages = [
            d.submit(i, prompt, max_tokens=n, priority=priority)
            for i, (at, prompt, n, priority) in enumerate(jobs)
            if at == tick
        ]
        gone = tuple(i for i, at in aborts.items() if at == tick and i in d.seen and d.seen[i].finished is None)
        d.tick(*messages, *([Abort(gone)] if gone else []), *([FlushCache(tick)] if tick in flushes else []))
    d.run()
    for i, (_, prompt, n, _) in enumerate(jobs):
        seen = d.seen[i]
        assert seen.finished is not None
        want = greedy(prompt, n)
        assert seen.tokens == (want if seen.finished.reason != "abort" else want[: len(seen.tokens)])
        assert next_token(prompt) == want[0]
    d.assert_no_leak()


def test_the_contexts_under_one_steps_prefill_rows_are_bounded_and_everybody_comes_to_a_turn():
    """What several ranks bring together for a step has a place of its own; one request always fits."""
    bound = 70
    d = Driver(page_size=4, chunk_tokens=48, l1_pages=300, max_running=8, step_context_tokens=bound)
    prefixes = [prompt_of(length, start) for start, length in enumerate((40, 24, 64, 32, 28), 3)]
    for i, prefix in enumerate(prefixes):
        d.run(d.submit(i, prefix, max_tokens=1))
    turns = [prefix + prompt_of(60 if i == 2 else 20, 20 + i) for i, prefix in enumerate(prefixes)]
    first = len(d.runner.steps)
    d.run(*(d.submit(100 + i, turn, max_tokens=3) for i, turn in enumerate(turns)))
    contexts = []
    for step in d.runner.steps[first:]:
        starts = step.seq_lens[step.num_decode :] - step.query_lens
        contexts.append([int(start) for start in starts])
    assert all(len(starts) <= 1 or sum(starts) <= bound for starts in contexts)
    assert any(sum(starts) > bound for starts in contexts)  # alone a longer one is computed all the same
    assert any(len(starts) > 1 for starts in contexts)
    assert all(d.seen[100 + i].tokens == greedy(turn, 3) for i, turn in enumerate(turns))
    d.assert_no_leak()

"""Host time of a tick at 256 running requests: scheduling, batch assembly, results, page commits. No model, no device.

The runner is a stand-in that answers with constant tokens at once, so all that is measured is the scheduler thread's
own work. `python -m benchmarks.tick [--json]`; key `ms_median`.
"""

import statistics
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.common import arguments, report
from benthic.engine.core import EngineCore, build_core
from benthic.engine.plan import SchedulerLimits
from benthic.forward import LayerHooks, StepInput, StepOutput
from benthic.kvcache import page_hashes, root_hash
from benthic.messages import Outputs, SamplingParams, Submit
from benthic.parallel.control import Alone, Control
from benthic.runner.interface import RunnerInfo

RUNNING = 256
PROMPT_TOKENS = 2048
PAGE = 64


class Answered:
    """A step that is done."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def done(self) -> bool:
        return True

    def result(self) -> StepOutput:
        return self._output


class InstantRunner:
    """Answers each step at once with token 7."""

    info = RunnerInfo(vocab_size=50_000, hidden_size=1, max_position=1 << 20, eos_token_ids=(0,), namespace=bytes(32))

    def submit(self, step: StepInput, hooks: LayerHooks | None = None) -> Answered:
        assert hooks is None, "nothing is copied"
        return Answered(StepOutput(tokens=np.full(len(step.sample_rows), 7, np.int32)))

    def close(self) -> None:
        """Nothing is held."""


def build(control: Control, running: int) -> EngineCore:
    """This rank's engine, for `running` requests; over several ranks the pages are spread as under --cp."""
    limits = SchedulerLimits(
        page_size=PAGE, max_running=running, max_request_tokens=8192, chunk_tokens=8192, l1_free_pages=128
    )
    core = build_core(limits, max(512, running * 64 // control.size), control.size)
    return EngineCore(limits, core, InstantRunner(), control=control)


def fill(engine: EngineCore, running: int, *, sampled: bool) -> None:
    """So many requests, until all of them decode; on rank 0."""
    root = root_hash(bytes(32), None)
    rng = np.random.default_rng(0)
    extra = (
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "presence_penalty": 0.1} if sampled else {"temperature": 0.0}
    )
    messages = []
    for i in range(running):
        ids = rng.integers(0, 50_000, PROMPT_TOKENS, dtype=np.int32).tobytes()
        params = SamplingParams(max_tokens=4096, stop_token_ids=(0, 2), seed=i, **extra)  # type: ignore[arg-type]
        hashes = b"".join(page_hashes(root, ids, PAGE))
        messages.append(Submit(id=i, prompt=ids, root=root, hashes=hashes, params=params))
    engine.tick(list(messages))
    while engine.scheduler.num_running < running or engine.scheduler.prefilling:
        engine.tick([])


def measure(engine: EngineCore, ticks: int, running: int) -> list[float]:
    """Host milliseconds of each decode tick."""
    times = []
    for _ in range(ticks):
        start = time.perf_counter()
        replies = engine.tick([])
        times.append((time.perf_counter() - start) * 1e3)
        tokens = sum(len(r.ids) // 8 for r in replies if isinstance(r, Outputs))
        assert tokens == running, f"a tick brought {tokens} tokens, not {running}"
    return times


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    args = arguments(__doc__ or "", repeats=600).parse_args(argv)
    rows: list[tuple[str, str]] = []
    figures: dict[str, object] = {}
    for name, prefix, sampled in (("greedy", "", False), ("sampled with penalties", "sampled_", True)):
        engine = build(Alone(), RUNNING)
        fill(engine, RUNNING, sampled=sampled)
        times = sorted(measure(engine, args.repeats, RUNNING))
        median, p99 = statistics.median(times), times[int(len(times) * 0.99)]
        rows.append((f"{RUNNING} running, {name}", f"{median:.3f} ms a tick  (p99 {p99:.3f}, max {times[-1]:.3f})"))
        figures |= {f"{prefix}ms_median": median, f"{prefix}ms_p99": p99, f"{prefix}ms_max": times[-1]}
    report("host time of a tick", rows, figures, as_json=args.json, note="the bound is 1 ms")


if __name__ == "__main__":
    main()

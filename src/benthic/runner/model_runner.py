"""The runner: one thread that carries out steps in order, so that the scheduler prepares the next one meanwhile.

On CUDA the thread only queues work and is soon ahead of the device; on a CPU it is the device.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from benthic.attention.interface import Attention
from benthic.config import RunnerConfig
from benthic.forward import LayerHooks, StepInput, StepOutput
from benthic.parallel.collectives import Collectives
from benthic.parallel.layout import SINGLE, ParallelLayout
from benthic.runner.execution import Launched, StepExecutor
from benthic.runner.graphs import DecodeGraphs, Model, RunnerShape, graph_sizes, prompt_limit
from benthic.runner.interface import RunnerInfo
from benthic.runner.sampler import Sampler
from benthic.runner.streams import new_stream
from benthic.runner.warmup import scratch_prefill, warmup_steps

MAX_OUTSTANDING = 2
Progress = Callable[[str, int, int], None]  # what, done, total

T = TypeVar("T")


class _Pending:
    """A submitted step; see runner.interface.PendingStep."""

    def __init__(self, runner: "ModelRunner", step: StepInput, hooks: LayerHooks | None) -> None:
        self._runner = runner
        self._step = step
        self._hooks = hooks
        self._queued = threading.Event()  # its work is, or it has failed
        self._launched: Launched | None = None
        self._output: StepOutput | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._queued.is_set() and (self._launched is None or self._launched.done())

    def result(self) -> StepOutput:
        """Block until the output is on the host. Raises what this step, or one before it, raised."""
        self._queued.wait()
        if self._error is None and self._output is None:
            assert self._launched is not None
            try:
                self._output = self._launched.output()
            except Exception as error:  # noqa: BLE001  # a device error shows up here; later steps must fail too
                self._error = error
                self._runner._failure = error
            self._launched = None
        self._runner._collected(self)
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output

    def launch(self) -> None:
        """On the runner's thread."""
        hooks, self._hooks = self._hooks, None
        try:
            if self._runner._failure is not None:
                if hooks is not None:
                    hooks.end(True)
                raise self._runner._failure
            self._launched = self._runner._executor.execute(self._step, hooks)
        except BaseException as error:  # noqa: BLE001  # handed to the caller of `result`
            self._error = error
            self._runner._failure = error
        finally:
            self._queued.set()


class ModelRunner:
    """Implements runner.interface.Runner. Owns the thread, its stream, and through the executor all device state.

    `num_pages` are those of the pools that `attention` reads, without the scratch page; `chunk_tokens` is the longest
    prefill of a step, `max_running` the number of request slots, `max_seq_len` the longest context in tokens.
    `warm_contexts`: lengths in tokens past which the model runs other kernels, which the warm-up then meets too.
    """

    def __init__(
        self,
        *,
        model: Model,
        attention: Attention,
        num_pages: int,
        config: RunnerConfig,
        max_running: int,
        max_seq_len: int,
        page_size: int,
        chunk_tokens: int,
        device: torch.device,
        info: RunnerInfo,
        warm_contexts: tuple[int, ...] = (),
        layout: ParallelLayout = SINGLE,
        group: Collectives | None = None,
    ) -> None:
        """`group` joins the runners' threads of all ranks of `layout`, each of which gets the same steps."""
        if group is not None:
            config = replace(config, graph_batch_sizes=())  # an exchange between ranks can't be captured yet
        self.info = info
        self._shape = RunnerShape(
            max_running=max_running,
            max_seq_len=max_seq_len,
            page_size=page_size,
            num_pages=num_pages,
            device=device,
        )
        self._chunk_tokens = min(chunk_tokens, max_seq_len)
        self._warm_contexts = warm_contexts
        self._eager_tokens = prompt_limit(self._shape, config) + 1  # prompts as short as this run in no graph
        behind = max(graph_sizes(self._shape, config), default=0)  # prompt tokens that run as rows of a graph
        last_tokens = torch.zeros(self._shape.first_prompt_slot + behind, dtype=torch.int64, device=device)
        self._graphs = DecodeGraphs(
            model=model, attention=attention, last_tokens=last_tokens, shape=self._shape, config=config
        )
        self._executor = StepExecutor(
            model=model,
            attention=attention,
            graphs=self._graphs,
            last_tokens=last_tokens,
            sampler=Sampler(vocab_size=info.vocab_size, num_slots=max_running + 1, device=device),
            shape=self._shape,
            layout=layout,
            group=group,
        )
        self._failure: BaseException | None = None
        self._outstanding: set[_Pending] = set()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="runner", daemon=True)
        self._thread.start()

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Batch sizes of the decode graphs, rising; empty: decode runs eagerly."""
        return self._graphs.sizes

    def submit(self, step: StepInput, hooks: LayerHooks | None = None) -> _Pending:
        """Queue the step behind those before it; returns at once. At most two steps may be without a taken result.

        `hooks` are told how far the step is; their `end` is called whatever happens to it.
        """
        assert self._thread.is_alive(), "the runner is closed"
        assert len(self._outstanding) < MAX_OUTSTANDING, "take a result before submitting a third step"
        pending = _Pending(self, step, hooks)
        self._outstanding.add(pending)
        self._tasks.put(pending.launch)
        return pending

    def warmup(self, progress: Progress = lambda what, done, total: None) -> None:
        """Capture the decode graphs, then run a prefill of a whole chunk and a decode. Call before the first submit."""
        assert not self._outstanding
        self._call(lambda: self._graphs.capture(lambda done, total: progress("decode graphs", done, total)))
        steps = warmup_steps(self._shape, self._chunk_tokens, self._warm_contexts, self._eager_tokens)
        for done, step in enumerate(steps):
            progress("warm-up", done, len(steps))
            self.submit(step).result()
        progress("warm-up", len(steps), len(steps))

    def time_chunk(self) -> tuple[int, float]:
        """Tokens of a whole chunk without a context, and the seconds that its prefill takes once warmed up."""
        started = time.perf_counter()
        self.submit(scratch_prefill(self._shape, self._chunk_tokens)).result()
        return self._chunk_tokens, time.perf_counter() - started

    def close(self) -> None:
        """Finish what is queued, end the thread and let go of device memory. Results not yet taken can still be."""
        if not self._thread.is_alive():
            return
        self._tasks.put(None)
        self._thread.join()
        del self._executor, self._graphs

    def _run(self) -> None:
        device = self._shape.device
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if device.type == "cuda":
                torch.cuda.set_device(device.index or 0)  # a thread starts on device 0; plain "cuda" has no index
                torch.cuda.synchronize(device)  # weights and pool were written on other streams
                stack.enter_context(torch.cuda.stream(new_stream(device)))
            while (task := self._tasks.get()) is not None:
                task()
            if device.type == "cuda" and self._failure is None:
                torch.cuda.synchronize(device)

    def _call(self, function: Callable[[], T]) -> T:
        """Run on the thread, wait, and raise what it raised."""
        answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def task() -> None:
            try:
                answer.put((function(), None))
            except BaseException as error:  # noqa: BLE001  # raised again by the caller
                answer.put((None, error))

        self._tasks.put(task)
        value: Any
        value, error = answer.get()
        if error is not None:
            raise error
        result: T = value
        return result

    def _collected(self, pending: _Pending) -> None:
        self._outstanding.discard(pending)

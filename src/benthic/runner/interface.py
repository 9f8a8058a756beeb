"""What the engine sees of a runner; the model runner and the fake of the tick benchmark both implement it."""

from dataclasses import dataclass
from typing import Protocol

from benthic.forward import LayerHooks, StepInput, StepOutput


class PendingStep(Protocol):
    """A submitted step. Steps finish in the order they were submitted."""

    def done(self) -> bool:
        """Whether `result` would return at once. A rank-local fact."""

    def result(self) -> StepOutput:
        """Block until the step's output is on the host. Raises what the step raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerInfo:
    """What the engine needs to know of the loaded model."""

    vocab_size: int
    hidden_size: int
    max_position: int  # the model's own context limit
    eos_token_ids: tuple[int, ...]
    namespace: bytes  # 32 bytes


class Runner(Protocol):
    """Carries out steps; decides nothing."""

    info: RunnerInfo

    def submit(self, step: StepInput, hooks: LayerHooks | None = None) -> PendingStep:
        """Queue the step behind those before it; returns at once. At most two may be outstanding.

        `hooks` are told how far the step is; their `end` is called whatever happens to it.
        """

    def close(self) -> None:
        """Wait for what is queued, release threads and device memory."""

"""Short ways to a SamplingInput and through a Sampler."""

from typing import Any

import numpy as np
import torch

from benthic.forward import LogprobRows, PenaltyInit, SamplingInput
from benthic.runner.sampler import Sampled, Sampler
from benthic.runner.staging import Staging

_DTYPES = {"seed": np.int64, "choice": np.int64, "position": np.int64, "hidden": np.int64}
_INTEGERS = ("top_k", "penalty_rows", "logprobs")


def sampling_input(num_rows: int, **values: Any) -> SamplingInput:
    """Fields as scalars (the same for every row) or sequences; temperature 1 and seeds 0, 1, 2, … where left out."""
    fields: dict[str, Any] = {"temperature": 1.0, "seed": np.arange(num_rows), "choice": 0, "position": 7, **values}
    for name, value in fields.items():
        if name == "bias":
            rows, tokens, added = zip(*value, strict=True)
            fields[name] = np.array(rows), np.array(tokens), np.array(added, dtype=np.float32)
        elif value is not None:
            dtype = _DTYPES.get(name, np.int32 if name in _INTEGERS else np.float32)
            array = np.asarray(value, dtype=dtype)
            fields[name] = array if name == "hidden" else np.broadcast_to(array, (num_rows,)).copy()
    return SamplingInput(**fields)


def run_sampler(
    sampler: Sampler, logits: torch.Tensor, sampling: SamplingInput, inits: tuple[PenaltyInit, ...] = ()
) -> Sampled:
    """Plan, upload, start penalties and sample, as a step does. The given logits stay as they are."""
    plan = sampler.plan(sampling, inits)
    tensors = Staging(logits.device).upload(plan.arrays)
    sampler.start_penalties(tensors)
    return sampler.sample(logits.clone(), plan, tensors)


def logprob_rows(sampled: Sampled) -> LogprobRows:
    """On the host."""
    assert sampled.logprobs is not None
    return LogprobRows(
        chosen=sampled.logprobs.chosen.cpu().numpy(),
        top_ids=sampled.logprobs.top_ids.cpu().numpy(),
        top=sampled.logprobs.top.cpu().numpy(),
    )

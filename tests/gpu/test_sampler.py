"""The sampler on CUDA: what the CPU chooses, without one wait for the device."""

import numpy as np
import pytest
import torch

from benthic.forward import PenaltyInit
from benthic.runner.noise import index_terms, noise_bits, row_keys
from benthic.runner.sampler import Sampler
from benthic.runner.staging import Staging
from tests.gpu import synchronizing
from tests.support.sampling_cases import logprob_rows, run_sampler, sampling_input

pytestmark = pytest.mark.gpu
VOCAB, ROWS = 5000, 150


def wishes() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "temperature": rng.choice([0.0, 0.7, 1.3], ROWS).astype(np.float32),
        "top_k": rng.choice([0, 5, 300], ROWS).astype(np.int32),
        "top_p": rng.choice([1.0, 0.8], ROWS).astype(np.float32),
        "min_p": rng.choice([0.0, 0.05], ROWS).astype(np.float32),
        "seed": rng.integers(-(2**62), 2**62, ROWS),
        "penalty_rows": np.where(rng.random(ROWS) < 0.5, np.arange(ROWS), -1).astype(np.int32),
        "presence": np.full(ROWS, 0.5, np.float32),
        "frequency": np.full(ROWS, 0.2, np.float32),
        "repetition": np.full(ROWS, 1.1, np.float32),
        "logprobs": rng.choice([-1, 0, 5], ROWS).astype(np.int32),
        "bias": [(r, t, a) for r in range(0, ROWS, 3) for t, a in ((7, 3.0), (9, -np.inf))],
    }


def test_noise_has_the_same_bits(cuda: torch.device) -> None:
    numbers = np.random.default_rng(1).integers(-(2**62), 2**62, (3, 20))
    keys = torch.from_numpy(row_keys(*numbers))
    cpu = noise_bits(keys, index_terms(10_000, torch.device("cpu")))
    assert torch.equal(noise_bits(keys.to(cuda), index_terms(10_000, cuda)).cpu(), cpu)


def test_cuda_chooses_what_the_cpu_chooses(cuda: torch.device) -> None:
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    answers = []
    for device in (torch.device("cpu"), cuda):
        sampler = Sampler(vocab_size=VOCAB, num_slots=ROWS, device=device)
        inits = tuple(
            PenaltyInit(slot=s, prompt=np.arange(s, s + 40, dtype=np.int32), output=np.array([s, s, 3], np.int32))
            for s in range(ROWS)
        )
        steps = [run_sampler(sampler, logits.to(device), sampling_input(ROWS, **wishes()), inits)]
        steps += [
            run_sampler(sampler, logits.to(device), sampling_input(ROWS, **{**wishes(), "position": step}))
            for step in range(5)
        ]
        answers.append(steps)
    for cpu, gpu in zip(*answers, strict=True):
        assert (cpu.tokens == gpu.tokens.cpu()).sum() >= ROWS - 1  # a filter's border may fall between two roundings
        expected, found = logprob_rows(cpu), logprob_rows(gpu)
        same = np.isclose(expected.chosen, found.chosen, atol=1e-4)
        assert same.sum() >= len(same) - 1
        np.testing.assert_allclose(expected.top, found.top, atol=1e-4)


def test_sampling_never_waits_for_the_device(cuda: torch.device) -> None:
    sampler, staging = Sampler(vocab_size=VOCAB, num_slots=ROWS, device=cuda), Staging(cuda)
    inits = (PenaltyInit(slot=0, prompt=np.arange(9, dtype=np.int32), output=np.zeros(0, np.int32)),)
    everyone = {**wishes(), "penalty_rows": np.where(np.arange(ROWS) == 0, 0, -1)}
    with synchronizing.forbidden():
        for sampling in (sampling_input(ROWS, **everyone), sampling_input(ROWS, temperature=0), sampling_input(ROWS)):
            plan = sampler.plan(sampling, inits)
            tensors = staging.upload(plan.arrays)
            sampler.start_penalties(tensors)
            sampled = sampler.sample(torch.randn(ROWS, VOCAB, device=cuda), plan, tensors)
            assert sampled.tokens.shape == (ROWS,)


def test_greedy_ties_take_the_lowest_index(cuda: torch.device) -> None:
    logits = torch.zeros(64, 128_256, device=cuda)
    logits[:, [70_001, 90_000]] = 1.0
    sampler = Sampler(vocab_size=128_256, num_slots=1, device=cuda)
    assert (run_sampler(sampler, logits, sampling_input(64, temperature=0)).tokens == 70_001).all()

"""Logits and greedy tokens of a small stored model against what transformers computed for it."""

import json
from pathlib import Path

import pytest
import torch

from benthic.models.llama import LlamaModel
from benthic.models.registry import load_model
from benthic.weights.checkpoint import SafetensorsReader
from benthic.weights.locate import locate
from tests.support.compare import assert_same_greedy, top_gaps
from tests.support.model_driver import ModelDriver

FOLDER = Path(__file__).parents[1] / "data" / "oracles" / "llama"
PROMPTS = range(4)


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return load_model(locate(str(FOLDER)), torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> SafetensorsReader:
    folder = tmp_path_factory.mktemp("oracle")
    (folder / "model.safetensors").symlink_to(FOLDER / "reference.safetensors")
    return SafetensorsReader(folder)


def assert_logits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = json.loads((FOLDER / "reference.json").read_text())["tolerance"] * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("chunk", [None, 1, 7, 32])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_prefill_logits_equal_the_reference_in_any_chunks(
    model: LlamaModel, oracle: SafetensorsReader, prompt: int, chunk: int | None
) -> None:
    tokens = oracle.load(f"prompt{prompt}.tokens").tolist()
    logits = ModelDriver(model).prefill(tokens, chunk)
    assert_logits(logits, oracle.load(f"prompt{prompt}.logits"))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_cached_decode_equals_the_reference(model: LlamaModel, oracle: SafetensorsReader, prompt: int) -> None:
    expected = oracle.load(f"prompt{prompt}.greedy_logits")
    tokens, logits = ModelDriver(model).greedy(oracle.load(f"prompt{prompt}.tokens").tolist(), len(expected))
    assert_logits(logits, expected)
    stored = oracle.load(f"prompt{prompt}.greedy_tokens").tolist()
    assert assert_same_greedy(tokens, stored, top_gaps(expected), 1e-3) > 0


def test_mixed_steps_equal_the_reference(model: LlamaModel, oracle: SafetensorsReader) -> None:
    """All prompts share steps: short ones decode while the long one is still in chunks."""
    driver = ModelDriver(model, rows=len(PROMPTS))
    prompts = [oracle.load(f"prompt{p}.tokens").tolist() for p in PROMPTS]
    greedy = [oracle.load(f"prompt{p}.greedy_tokens").tolist() for p in PROMPTS]
    expected = [oracle.load(f"prompt{p}.greedy_logits") for p in PROMPTS]
    done = [0] * len(PROMPTS)
    for _ in range(30):
        decode = {r: greedy[r][done[r] - 1] for r in PROMPTS if 0 < done[r] < 24}
        prefill = {r: prompts[r][driver.lens[r] : driver.lens[r] + 20] for r in PROMPTS if not done[r]}
        if not decode and not prefill:
            break
        logits = driver.step(decode, prefill)
        rows = [
            *range(len(decode)),
            *(torch.tensor([len(t) for t in prefill.values()]).cumsum(0) + len(decode) - 1).tolist(),
        ]
        for row, at in zip([*decode, *prefill], rows, strict=True):
            if driver.lens[row] >= len(prompts[row]):
                assert_logits(logits[at], expected[row][done[row]])
                done[row] += 1
    assert done == [24] * len(PROMPTS)

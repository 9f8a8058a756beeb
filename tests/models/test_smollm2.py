"""The built-in model against transformers' LlamaForCausalLM fed with the same tensors: greedy tokens of 20 prompts."""

from typing import Any

import pytest
import torch
import transformers

from benthic.models.llama import LlamaModel
from benthic.models.registry import Checkpoint, load_model, open_checkpoint
from benthic.weights.locate import BUILT_IN, Source, locate
from benthic.weights.tokenizer import load_tokenizer
from tests.support.compare import assert_same_greedy, top_gaps
from tests.support.model_driver import ModelDriver

PROMPTS = [
    "What is the capital of France? Answer in one sentence.",
    "Name three colours.",
    "Write a haiku about the sea.",
    "What is 12 + 30?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
    "Explain gravity to a child.",
    "List the first five prime numbers.",
    "What does a compiler do?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Summarise: The cat sat on the mat and slept all day.",
    "def fibonacci(n):",
    "Once upon a time",
    "The three laws of thermodynamics are",
    "SELECT name FROM users WHERE",
    "Wie heißt die Hauptstadt von Deutschland?",
    "1, 1, 2, 3, 5, 8,",
    "A    lot\n\n\nof   white\tspace 12 345",
    "🙂 emoji and ünïcödé",
]
NEW_TOKENS = 12
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.5}  # logits; bfloat16 rounds logits of 16 to 32 to 0.125


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(locate(BUILT_IN))


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def pair(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> tuple[Any, LlamaModel]:
    return transformers_model(checkpoint, request.param), load_model(checkpoint, torch.device("cpu"), request.param)


def transformers_model(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    c, reader = checkpoint.config, checkpoint.reader
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        max_position_embeddings=c.max_position,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    rotary = type(model.model.rotary_emb)(config)  # not part of the state: built off the meta device
    state = {name: reader.load(name).to(dtype) for name in reader.names()}
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, assign=True)
    model.model.rotary_emb = rotary
    return model.eval()


@torch.inference_mode()
def transformers_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits


def prompt_tokens(source: Source) -> list[list[int]]:
    tokenizer = load_tokenizer(source)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        if index < 12
        else tokenizer.encode(text)
        for index, text in enumerate(PROMPTS)
    ]


def test_greedy_tokens_equal_transformers(pair: tuple[Any, LlamaModel]) -> None:
    """Ours are made one by one through the cache; theirs are the best after the same tokens, all at once."""
    reference, model = pair
    compared = 0
    for prompt in prompt_tokens(locate(BUILT_IN)):
        tokens, _ = ModelDriver(model).greedy(prompt, NEW_TOKENS)
        theirs = transformers_logits(reference, prompt + tokens[:-1])[len(prompt) - 1 :]
        compared += assert_same_greedy(tokens, theirs.argmax(-1).tolist(), top_gaps(theirs), TOLERANCE[model.dtype])
    # bfloat16 ends many comparisons early, float32 hardly any
    least = {torch.float32: 0.9, torch.bfloat16: 0.2}[model.dtype]
    assert compared >= least * NEW_TOKENS * len(PROMPTS)


def test_prefill_logits_are_as_exact_as_transformers(pair: tuple[Any, LlamaModel], checkpoint: Checkpoint) -> None:
    reference, model = pair
    prompt = prompt_tokens(locate(BUILT_IN))[0]
    ours = ModelDriver(model).prefill(prompt)
    if model.dtype == torch.float32:
        expected = transformers_logits(reference, prompt)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
        return
    exact = transformers_logits(transformers_model(checkpoint, torch.float32), prompt)
    rounding = (transformers_logits(reference, prompt) - exact).abs().mean().item()
    assert 0 < (ours - exact).abs().mean().item() < 1.25 * rounding


def test_it_knows_the_capital_of_france(checkpoint: Checkpoint) -> None:
    source = locate(BUILT_IN)
    model = load_model(checkpoint, torch.device("cpu"), torch.float32)
    tokens, _ = ModelDriver(model).greedy(prompt_tokens(source)[0], 8)
    assert load_tokenizer(source).decode(tokens) == "The capital of France is Paris.<|im_end|>"


def test_progress_rises_to_the_total(checkpoint: Checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    load_model(checkpoint, torch.device("cpu"), torch.bfloat16, lambda done, total: seen.append((done, total)))
    dones = [done for done, _ in seen]
    assert dones == sorted(dones)
    assert len(seen) > 200
    assert seen[-1][0] == seen[-1][1] == sum(checkpoint.reader.info(n).num_bytes for n in checkpoint.reader.names())

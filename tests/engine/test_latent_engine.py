"""A model with latent attention, index keys and experts through the whole engine: every tier, format and chunk."""

from pathlib import Path

import numpy as np
import pytest

from benthic.common.errors import ConfigError
from tests.support.real_engine import RealEngine
from tests.support.tiny_checkpoint import write_checkpoint
from tests.support.tiny_dsa import CONFIG, TOPK, write_dsa_checkpoint

FORMATS = ("model", "fp8", "target=fp8,index=model", "index=fp8")
PAGE = 16
ENOUGH = {"l1_pages": 120, "max_context": 512, "max_running": 8, "chunk_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dsa_checkpoint(tmp_path_factory.mktemp("dsa"))


def prompt_of(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, length)]


PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((5 * PAGE + 3, TOPK - 9, 20 * PAGE + 7, TOPK, 1))]


def whole_pages(prompt: list[int]) -> int:
    return (len(prompt) - 1) // PAGE * PAGE


@pytest.fixture(scope="module")
def right(folder: Path) -> dict[str, list[list[int]]]:
    """What a fresh engine with only L1 answers to each prompt alone, by format."""
    answers = {}
    for kv_dtype in FORMATS:
        with RealEngine(folder, kv_dtype=kv_dtype, **ENOUGH) as engine:
            answers[kv_dtype] = [engine.ask([prompt])[0].tokens for prompt in PROMPTS]
    return answers


def floor(path: Path) -> dict[str, object]:
    return {"l2_size": "8MiB", "l3_dir": str(path), "l3_size": "32MiB"}


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_prefix_from_each_tier_gives_the_answer_of_a_fresh_engine(
    kv_dtype: str, folder: Path, right: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    options = {"kv_dtype": kv_dtype, **ENOUGH, **floor(tmp_path)}
    with RealEngine(folder, **options) as engine:
        for tier in (None, 0, 1):
            if tier == 1:
                engine.flush("l1")
            for prompt, expected in zip(PROMPTS, right[kv_dtype], strict=True):
                (told,) = engine.ask([prompt])
                assert told.tokens == expected
                found = [0, 0, 0]
                if tier is not None:
                    found[tier] = whole_pages(prompt)
                assert list(told.cached) == found
    with RealEngine(folder, **options) as engine:
        assert [told.tokens for told in engine.ask(PROMPTS)] == right[kv_dtype]  # all in one batch
    with RealEngine(folder, **options) as engine:
        for prompt, expected in zip(PROMPTS, right[kv_dtype], strict=True):
            (told,) = engine.ask([prompt])
            assert (told.tokens, told.cached) == (expected, (0, 0, whole_pages(prompt)))


@pytest.mark.parametrize("chunk", [PAGE, 7 * PAGE, 512])
def test_no_chunk_size_changes_an_answer(chunk: int, folder: Path, right: dict[str, list[list[int]]]) -> None:
    with RealEngine(folder, kv_dtype="model", **{**ENOUGH, "chunk_tokens": chunk}) as engine:
        assert [told.tokens for told in engine.ask(PROMPTS)] == right["model"]


def test_short_prefills_in_graphs_change_no_answer(folder: Path, right: dict[str, list[list[int]]]) -> None:
    """Whole prompts, chunks of one page, and what is left after a hit."""
    limits = {"graph_batch_sizes": "4,8,32", "graph_prefill_tokens": 32}
    with RealEngine(folder, kv_dtype="model", **{**ENOUGH, "chunk_tokens": PAGE}, **limits) as engine:
        assert [told.tokens for told in engine.ask(PROMPTS)] == right["model"]
        for prompt, expected in zip(PROMPTS, right["model"], strict=True):
            (told,) = engine.ask([prompt])
            assert (told.tokens, told.cached) == (expected, (whole_pages(prompt), 0, 0))


def test_a_request_that_passes_k_while_it_decodes_goes_on_as_if_it_had_been_a_prompt(folder: Path) -> None:
    """The longer prompt is the shorter one's text, so its first token is that one's next."""
    prompt = prompt_of(TOPK - 4, 31)
    with RealEngine(folder, kv_dtype="model", **ENOUGH) as engine:
        (told,) = engine.ask([prompt], max_tokens=12)
    with RealEngine(folder, kv_dtype="model", graph_batch_sizes="none", **ENOUGH) as engine:
        for length in range(12):
            assert engine.ask([prompt + told.tokens[:length]], max_tokens=1)[0].tokens == [told.tokens[length]]


def test_another_kv_dtype_on_a_used_folder_never_meets_the_first_ones_pages(
    folder: Path, right: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    """Case A3."""
    seen: set[str] = set()
    for kv_dtype in ("model", "fp8", "index=fp8", "model", "fp8"):
        with RealEngine(folder, kv_dtype=kv_dtype, **ENOUGH, **floor(tmp_path)) as engine:
            for prompt, expected in zip(PROMPTS, right[kv_dtype], strict=True):
                (told,) = engine.ask([prompt])
                assert told.tokens == expected
                assert told.cached == (0, 0, whole_pages(prompt) if kv_dtype in seen else 0)
            others = [row for row in engine.ready.table if row.name == "L3, another model's"]
            assert len(others) == len(seen - {kv_dtype})
        seen.add(kv_dtype)


def test_the_table_says_what_is_kept_and_why(folder: Path) -> None:
    with RealEngine(folder, **ENOUGH) as engine:
        assert engine.row("--kv-dtype") == "target_kv=float32, index_k=float32 (the model's dtype)"
        page = PAGE * 4 * (CONFIG["num_hidden_layers"] * 48 + 3 * 32)  # type: ignore[operator]
        assert engine.row("page").startswith(f"16 tokens = {page / 1024:.2f} KiB")
    with RealEngine(folder, kv_dtype="fp8", **ENOUGH) as engine:
        assert engine.row("--kv-dtype") == "target_kv=fp8, index_k=fp8 (given)"
        latents = 32 + 4 + 2 * 16  # codes, a scale, and the rope part in bfloat16
        page = PAGE * (CONFIG["num_hidden_layers"] * latents + 3 * (32 + 4))  # type: ignore[operator]
        assert engine.row("page").startswith(f"16 tokens = {page / 1024:.2f} KiB")


def test_fp8_is_refused_where_it_does_not_work_yet(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--kv-dtype fp8: works for models with latent attention .*, not for llama"):
        RealEngine(write_checkpoint(tmp_path / "llama"), kv_dtype="fp8", **ENOUGH)


def test_backends_may_be_named_for_each_use(folder: Path, right: dict[str, list[list[int]]]) -> None:
    with RealEngine(folder, kv_dtype="model", attention_backend="prefill=torch", **ENOUGH) as engine:
        assert engine.row("--attention-backend") == "torch (given for prefill)"
        assert engine.ask(PROMPTS[:1])[0].tokens == right["model"][0]
    with pytest.raises(ConfigError, match=r"--attention-backend triton can't be used: the triton .* not cpu"):
        RealEngine(folder, attention_backend="decode=triton", **ENOUGH)

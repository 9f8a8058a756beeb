"""Servers of a model with latent attention that keep their cache in other formats on one disk folder (case A3)."""

from pathlib import Path

import numpy as np

from tests.support.floor_process import FloorServer, assert_whole, floor_flags, whole_pages
from tests.support.tiny_dsa import write_dsa_checkpoint


def test_another_kv_dtype_or_page_size_never_meets_the_first_ones_pages(tmp_path: Path) -> None:
    """Going back to settings that have been there finds their pages; their answers are those of the first time."""
    model, floor = write_dsa_checkpoint(tmp_path / "model"), tmp_path / "kv"
    rng = np.random.default_rng(7)
    prompts = [tuple(int(token) for token in rng.integers(0, 256, length)) for length in (40, 200, 333)]
    first: dict[tuple[str, ...], list[str]] = {}
    model_dtype, fp8, wide = ("--kv-dtype", "model"), ("--kv-dtype", "fp8"), ("--kv-dtype", "fp8", "--page-size", "32")
    for settings in (model_dtype, fp8, wide, model_dtype, fp8):
        server = FloorServer(model, *floor_flags(floor), *settings)
        try:
            server.wait_ready()
            answers = [server.ask(prompt) for prompt in prompts]
            texts = [answer.text for answer in answers]
            if settings in first:
                assert texts == first[settings]
                assert [answer.l3 for answer in answers] == [whole_pages(prompt) for prompt in prompts]
            else:
                assert [answer.cached for answer in answers] == [0, 0, 0]
            assert server.output().count("L3, another model's") == len(first.keys() - {settings})
            first.setdefault(settings, texts)
            server.wait_settled()
            assert server.stop() == 0, server.output()
        finally:
            server.kill()
    assert_whole(floor)

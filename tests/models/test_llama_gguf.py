"""Names and row order of Llama models in GGUF files."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from benthic.models.llama_gguf import gguf_name, half_split
from benthic.models.registry import open_checkpoint
from benthic.weights.locate import BUILT_IN, locate


def test_names_go_over_and_back() -> None:
    checkpoint = open_checkpoint(locate(BUILT_IN))
    names = checkpoint.reader.names()
    assert "model.layers.29.self_attn.q_proj.weight" in names
    assert gguf_name("model.layers.29.self_attn.q_proj.weight") == "blk.29.attn_q.weight"
    assert gguf_name("model.layers.3.self_attn.k_proj.bias") == "blk.3.attn_k.bias"
    assert gguf_name("lm_head.weight") == "output.weight"
    assert gguf_name("rope_freqs.weight") == "rope_freqs.weight"
    assert len({checkpoint.reader.info(name).name for name in names}) == len(names) == 272


@given(st.integers(1, 4), st.integers(1, 8), st.sampled_from([(), (3,)]))
def test_rows_come_back_in_half_split_order(heads: int, pairs: int, rest: tuple[int, ...]) -> None:
    original = torch.randn(heads * pairs * 2, *rest)
    interleaved = original.clone()
    for head in range(heads):
        for pair in range(pairs):
            for half in range(2):
                source = head * pairs * 2 + half * pairs + pair
                interleaved[head * pairs * 2 + 2 * pair + half] = original[source]
    assert torch.equal(half_split(interleaved, heads), original)

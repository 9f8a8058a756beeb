"""What each family keeps of a token, in which format and why."""

import dataclasses

import pytest
import torch

from benthic.attention.interface import AttentionSpec
from benthic.attention.latent import IndexSpec, LatentSpec
from benthic.attention.payload import Payload
from benthic.common.errors import ConfigError
from benthic.config.kv_dtype import KVDtypes, parse_kv_dtype
from benthic.models.kv_layout import KVFormats, attention_spec, choose_kv_formats, kv_payloads
from benthic.weights.model_config import ModelShape
from tests.support.dsa_shapes import LLAMA, dsa_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, F32 = torch.bfloat16, torch.float32
DSA, DENSE = dsa_config(), dsa_config(architecture="deepseek_v3", indexer=None)


def test_llama_keeps_keys_and_values_as_ever() -> None:
    (kv,) = kv_payloads(LLAMA, 16, KVFormats(dtype=BF16))
    assert kv == Payload("target_kv", (0, 1, 2), (2, 16, 2, 16), BF16)
    assert (kv.slice_bytes, kv.page_bytes) == (2 * 16 * 2 * 16 * 2, 3 * 2048)


def test_latents_come_from_each_layer_and_index_keys_from_those_that_index() -> None:
    assert kv_payloads(DSA, 16, KVFormats(dtype=F32)) == (
        Payload("target_kv", (0, 1, 2, 3, 4), (16, 48), F32),
        Payload("index_k", (0, 1, 4), (16, 32), F32),
    )
    assert kv_payloads(DENSE, 16, KVFormats(dtype=F32)) == (Payload("target_kv", (0, 1, 2, 3, 4), (16, 48), F32),)


def test_fp8_pools_are_bytes_with_their_scales() -> None:
    glm = dsa_config(kv_lora_rank=512, qk_rope_head_dim=64)
    indexer = dataclasses.replace(DSA.indexer, head_dim=128)
    formats = KVFormats(dtype=BF16, target_fp8=True, index_fp8=True)
    latents, keys = kv_payloads(dataclasses.replace(glm, indexer=indexer), 64, formats)
    assert latents == Payload("target_kv", (0, 1, 2, 3, 4), (64, 656), torch.uint8)
    assert keys == Payload("index_k", (0, 1, 4), (64 * 132,), torch.uint8)
    assert keys.slice_bytes == 64 * 128 + 64 * 4


@pytest.mark.parametrize(
    ("text", "config", "dtype", "device", "capability", "words", "reason"),
    [
        (None, LLAMA, BF16, CUDA, (9, 0), "bfloat16", "the model's dtype"),
        ("model", LLAMA, F32, CPU, None, "float32", "the model's dtype"),
        (None, DSA, F32, CPU, None, "target_kv=float32,index_k=float32", "the model's dtype"),
        (None, DSA, BF16, CUDA, (8, 0), "target_kv=bfloat16,index_k=bfloat16", "compute capability 8.0 has no fp8"),
        (None, DSA, BF16, CUDA, (8, 9), "target_kv=bfloat16,index_k=fp8", "compute capability 8.9 multiplies fp8"),
        (None, DENSE, BF16, CUDA, (9, 0), "target_kv=bfloat16", "the model's dtype"),
        ("fp8", DSA, F32, CPU, None, "target_kv=fp8,index_k=fp8", "given"),
        ("fp8", DENSE, F32, CPU, None, "target_kv=fp8", "given"),
        ("bf16", DSA, BF16, CUDA, (9, 0), "target_kv=bfloat16,index_k=bfloat16", "given"),
        ("target=fp8", DSA, BF16, CUDA, (9, 0), "target_kv=fp8,index_k=fp8", "given; compute capability 9.0"),
        ("index=fp8", DSA, F32, CPU, None, "target_kv=float32,index_k=fp8", "the model's dtype; given"),
        ("target=fp8,index=model", DSA, BF16, CUDA, (9, 0), "target_kv=fp8,index_k=bfloat16", "given"),
    ],
)
def test_formats_and_why(
    text: str | None,
    config: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    capability: tuple[int, int] | None,
    words: str,
    reason: str,
) -> None:
    formats, why = choose_kv_formats(parse_kv_dtype(text), config, dtype, device, capability)
    assert formats.words(config) == words
    assert reason in why


@pytest.mark.parametrize(
    ("wish", "config", "words"),
    [
        (KVDtypes(target="fp8", index="fp8"), LLAMA, "works for models with latent attention.*not for llama"),
        (KVDtypes(index="fp8"), LLAMA, "not for llama"),
        (KVDtypes(target="bfloat16"), LLAMA, "--kv-dtype bfloat16: .*here float32.*add --dtype bfloat16"),
        (KVDtypes(index="float16"), DSA, "--kv-dtype float16: .*here float32.*or take model"),
        (KVDtypes(index="fp8"), DENSE, "index=fp8: deepseek_v3 has no index keys"),
    ],
)
def test_what_a_model_cannot_have_is_refused(wish: KVDtypes, config: ModelShape, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_kv_formats(wish, config, F32, CPU)


def test_specs_carry_the_shapes() -> None:
    grouped = attention_spec(LLAMA, page_size=16, formats=KVFormats(dtype=F32), device=CPU, max_seq_len=64)
    assert isinstance(grouped, AttentionSpec)
    assert (grouped.num_heads, grouped.num_kv_heads, grouped.head_dim, grouped.scale) == (6, 2, 16, 0.25)
    formats = KVFormats(dtype=F32, target_fp8=True)
    latent = attention_spec(DSA, page_size=16, formats=formats, device=CPU, max_seq_len=64)
    assert isinstance(latent, LatentSpec)
    assert (latent.num_heads, latent.rank, latent.rope_dim, latent.fp8, latent.max_seq_len) == (4, 32, 16, True, 64)
    assert latent.scale == DSA.scale
    assert latent.index == IndexSpec(num_layers=3, num_heads=4, head_dim=32, topk=24, fp8=False)
    dense = attention_spec(DENSE, page_size=16, formats=formats, device=CPU, max_seq_len=64)
    assert isinstance(dense, LatentSpec)
    assert dense.index is None

"""What a model keeps of each token: its payloads, in which format, and the shapes of attention over them. Pure."""

from dataclasses import dataclass

import torch

from benthic.attention.interface import AttentionSpec
from benthic.attention.latent import IndexSpec, LatentSpec, latent_bytes
from benthic.attention.payload import Payload
from benthic.common.errors import ConfigError
from benthic.config.kv_dtype import FLAG, KVDtypes
from benthic.weights.dsa_config import DsaConfig
from benthic.weights.model_config import LlamaConfig, ModelShape

FP8_CAPABILITY = (8, 9)  # CUDA devices from here on multiply e4m3


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFormats:
    """How the payloads are stored: in the model's dtype, or as e4m3 with scales."""

    dtype: torch.dtype  # of the model
    target_fp8: bool = False
    index_fp8: bool = False

    def words(self, config: ModelShape) -> str:
        """In words, each payload where there are two; a part of the namespace, so never to be changed."""
        model = _name(self.dtype)
        if isinstance(config, LlamaConfig):
            return model
        target = f"target_kv={'fp8' if self.target_fp8 else model}"
        return target if config.indexer is None else f"{target},index_k={'fp8' if self.index_fp8 else model}"


def choose_kv_formats(
    wish: KVDtypes,
    config: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    capability: tuple[int, int] | None = None,
) -> tuple[KVFormats, str]:
    """The formats and the reason in words. `capability` replaces the CUDA device's. Raises ConfigError."""
    if isinstance(config, LlamaConfig):
        if "fp8" in (wish.target, wish.index):
            raise ConfigError(
                f"{FLAG} fp8: works for models with latent attention (deepseek_v3, deepseek_v32, glm_moe_dsa), not for "
                f"{config.architecture}; leave the flag out"
            )
        _explicit(wish.target, dtype)
        _explicit(wish.index, dtype)
        return KVFormats(dtype=dtype), "the model's dtype"
    if config.indexer is None and wish.index not in ("auto", wish.target):
        raise ConfigError(f"{FLAG} index={wish.index}: {config.architecture} has no index keys; give target= alone")
    target_fp8, index_fp8 = _explicit(wish.target, dtype), _explicit(wish.index, dtype)
    target_reason = "the model's dtype" if wish.target == "auto" else "given"
    if config.indexer is None:
        return KVFormats(dtype=dtype, target_fp8=target_fp8), target_reason
    index_reason = "given"
    if wish.index == "auto":
        index_fp8, index_reason = _fast_fp8(device, capability)
    reason = target_reason if target_reason == index_reason else f"{target_reason}; {index_reason}"
    return KVFormats(dtype=dtype, target_fp8=target_fp8, index_fp8=index_fp8), reason


def kv_payloads(config: ModelShape, page_size: int, formats: KVFormats) -> tuple[Payload, ...]:
    """What a page of `page_size` tokens is made of, in the order of a frame. Layouts: the attention interfaces."""
    layers, dtype = tuple(range(config.num_layers)), formats.dtype
    if isinstance(config, LlamaConfig):
        return (Payload("target_kv", layers, (2, page_size, config.num_kv_heads, config.head_dim), dtype),)
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    latents = Payload("target_kv", layers, (page_size, rank + rope), dtype)
    if formats.target_fp8:
        record = latent_bytes(rank, rope, dtype.itemsize, fp8=True)
        latents = Payload("target_kv", layers, (page_size, record), torch.uint8)
    if config.indexer is None:
        return (latents,)
    size, indexing = config.indexer.head_dim, indexing_layers(config)
    if formats.index_fp8:
        return latents, Payload("index_k", indexing, (page_size * (size + 4),), torch.uint8)
    return latents, Payload("index_k", indexing, (page_size, size), dtype)


def indexing_layers(config: DsaConfig) -> tuple[int, ...]:
    """The layers that compute a selection, and so have index keys."""
    if config.indexer is None:
        return ()
    return tuple(layer for layer, indexes in enumerate(config.indexer.layers) if indexes)


def attention_spec(
    config: ModelShape, *, page_size: int, formats: KVFormats, device: torch.device, max_seq_len: int
) -> AttentionSpec | LatentSpec:
    """What a backend needs to know; `max_seq_len` in tokens."""
    if isinstance(config, LlamaConfig):
        return AttentionSpec(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            page_size=page_size,
            dtype=formats.dtype,
            device=device,
            max_seq_len=max_seq_len,
        )
    indexer, index = config.indexer, None
    if indexer is not None:
        index = IndexSpec(
            num_layers=len(indexing_layers(config)),
            num_heads=indexer.num_heads,
            head_dim=indexer.head_dim,
            topk=indexer.topk,
            fp8=formats.index_fp8,
        )
    return LatentSpec(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        rank=config.kv_lora_rank,
        rope_dim=config.qk_rope_head_dim,
        scale=config.scale,
        page_size=page_size,
        dtype=formats.dtype,
        device=device,
        max_seq_len=max_seq_len,
        fp8=formats.target_fp8,
        index=index,
    )


def _explicit(wish: str, dtype: torch.dtype) -> bool:
    """Whether it is fp8. Raises ConfigError for a dtype that is not the model's."""
    if wish not in ("auto", "model", "fp8", _name(dtype)):
        raise ConfigError(
            f"{FLAG} {wish}: the cache is kept in the model's dtype, here {_name(dtype)}, or in fp8; "
            f"add --dtype {wish} to compute in {wish}, or take model"
        )
    return wish == "fp8"


def _fast_fp8(device: torch.device, capability: tuple[int, int] | None) -> tuple[bool, str]:
    if device.type != "cuda":
        return False, "the model's dtype"
    found = torch.cuda.get_device_capability(device) if capability is None else capability
    name = ".".join(map(str, found))
    if found >= FP8_CAPABILITY:
        return True, f"compute capability {name} multiplies fp8 index keys twice as fast"
    return False, f"compute capability {name} has no fp8 products"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

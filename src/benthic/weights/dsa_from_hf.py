"""A DsaConfig out of a parsed config.json. What would be computed differently from what the file says is refused."""

from collections.abc import Mapping
from typing import Any

from benthic.common.errors import ModelError
from benthic.weights.dsa_config import DsaArchitecture, DsaConfig, IndexerConfig, MoEConfig
from benthic.weights.fields import Fields, check_tokens_and_layers
from benthic.weights.rope_config import read_rope

DSA_CLASSES: dict[str, DsaArchitecture] = {
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
_DOES = {True: "computes a selection", False: "shares that of a layer below"}


def dsa_architecture(raw: Mapping[str, Any], fields: Fields) -> DsaArchitecture | None:
    """The DSA architecture that `model_type` and `architectures` name, if any. Raises ModelError where they differ."""
    kind, listed = raw.get("model_type"), raw.get("architectures")
    classes = [name for name in (listed if isinstance(listed, list) else ()) if isinstance(name, str)]
    by_class = next((DSA_CLASSES[name] for name in classes if name in DSA_CLASSES), None)
    by_type = next((name for name in DSA_CLASSES.values() if name == kind), None)
    if by_class is None and by_type is None:
        return None
    if kind is not None and by_type is None:
        raise ModelError(
            f"{fields.where}: model_type {kind!r} is not supported, though architectures is {listed!r}; "
            f"supported: {', '.join(DSA_CLASSES.values())}"
        )
    if classes and by_class != (by_type or by_class):
        raise ModelError(f"{fields.where}: model_type {kind!r} and architectures {listed!r} contradict each other")
    return by_type or by_class


def read_dsa(architecture: DsaArchitecture, fields: Fields, eos_token_ids: tuple[int, ...]) -> DsaConfig:
    """The config. Raises ModelError for a missing or absurd field, or one whose value is not supported."""
    _refuse_unsupported(fields)
    num_layers, num_mtp = fields.count("num_hidden_layers"), fields.optional_count("num_nextn_predict_layers", 0) or 0
    check_tokens_and_layers(fields.where, fields.count("vocab_size"), num_layers, eos_token_ids)
    if num_mtp > 1:
        raise fields.bad("num_nextn_predict_layers", "0 or 1")
    config = DsaConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=fields.count("num_attention_heads"),
        q_lora_rank=fields.count("q_lora_rank"),
        kv_lora_rank=fields.count("kv_lora_rank"),
        qk_nope_head_dim=fields.count("qk_nope_head_dim"),
        qk_rope_head_dim=fields.count("qk_rope_head_dim"),
        v_head_dim=fields.count("v_head_dim"),
        rms_norm_eps=fields.number("rms_norm_eps", None, 0.0, 1.0),
        max_position=fields.count("max_position_embeddings"),
        rope=read_rope(fields, ("default", "yarn"), None),
        indexer=_indexer(architecture, fields, num_layers, num_mtp),
        moe=_moe(fields, num_layers, num_mtp),
        num_mtp_layers=num_mtp,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        bos_token_id=fields.optional_count("bos_token_id", 0),
        eos_token_ids=eos_token_ids,
    )
    _check_sizes(config, fields)
    return config


def _refuse_unsupported(fields: Fields) -> None:
    fields.demand("hidden_act", "silu", "")
    fields.demand("attention_bias", False, ": biases of attention are not supported")
    fields.demand("mlp_bias", False, ": biases of the MLP are not supported")
    fields.demand("rope_interleave", True, ": the main rope turns interleaved pairs")
    fields.demand("scoring_func", "sigmoid", "")
    fields.demand("topk_method", "noaux_tc", "")
    if not fields.given("q_lora_rank"):
        raise fields.bad("q_lora_rank", "a whole number: queries without a latent are not supported")


def _check_sizes(config: DsaConfig, fields: Fields) -> None:
    rope = config.qk_rope_head_dim
    if rope % 2:
        raise fields.bad("qk_rope_head_dim", "an even number")
    # `head_dim` is not looked at: published files put anything there
    total = config.qk_nope_head_dim + rope
    fields.demand(
        "qk_head_dim", total, f", the sum of qk_nope_head_dim and qk_rope_head_dim, {total - rope} and {rope}"
    )
    if config.indexer and config.indexer.head_dim < rope:
        raise fields.bad("index_head_dim", f"at least qk_rope_head_dim, {rope}")


def _indexer(architecture: DsaArchitecture, fields: Fields, num_layers: int, num_mtp: int) -> IndexerConfig | None:
    if architecture == "deepseek_v3":
        if fields.given("index_topk"):
            raise fields.bad("index_topk", "nothing: deepseek_v3 has dense attention (deepseek_v32 has an indexer)")
        return None
    return IndexerConfig(
        num_heads=fields.count("index_n_heads"),
        head_dim=fields.count("index_head_dim"),
        topk=fields.count("index_topk"),
        interleaved_rope=fields.flag("indexer_rope_interleave", architecture == "glm_moe_dsa"),
        layers=_indexing_layers(fields, num_layers, num_mtp),
    )


def _indexing_layers(fields: Fields, num_layers: int, num_mtp: int) -> tuple[bool, ...]:
    """The first description in the order of the dictionary counts; a later one that says otherwise is refused."""
    said: dict[str, tuple[bool, ...]] = {}
    if fields.given("indexer_types"):
        said["indexer_types"] = _marks(fields, "indexer_types", ("full", "shared"), num_layers, num_mtp)
    if fields.given("index_topk_pattern"):
        said["index_topk_pattern"] = _marks(fields, "index_topk_pattern", ("F", "S"), num_layers, num_mtp)
    frequency = fields.optional_count("index_topk_freq", 1)
    if frequency is not None or not said:
        offset = fields.optional_count("index_skip_topk_offset", 0)
        first = 2 if offset is None else offset
        said["index_topk_freq"] = tuple(max(i - first + 1, 0) % (frequency or 1) == 0 for i in range(num_layers))
    (source, layers), *others = said.items()
    for other, marks in others:
        if marks != layers:
            layer = next(i for i in range(num_layers) if marks[i] != layers[i])
            raise ModelError(
                f"{fields.where}: {source} and {other} contradict each other: by {source} layer {layer} "
                f"{_DOES[layers[layer]]}, by {other} it {_DOES[marks[layer]]}"
            )
    if not layers[0]:
        raise fields.bad(source, "a description by which layer 0 indexes: there is no layer below to share with")
    return layers


def _moe(fields: Fields, num_layers: int, num_mtp: int) -> MoEConfig:
    config = MoEConfig(
        num_experts=fields.count("n_routed_experts"),
        num_experts_per_token=fields.count("num_experts_per_tok"),
        intermediate_size=fields.count("moe_intermediate_size"),
        num_shared_experts=fields.count("n_shared_experts"),
        num_groups=fields.count("n_group"),
        topk_groups=fields.count("topk_group"),
        norm_topk=fields.flag("norm_topk_prob", None),
        routed_scaling=fields.number("routed_scaling_factor", None, 1e-6, 1e6),
        layers=_expert_layers(fields, num_layers, num_mtp),
    )
    experts, groups = config.num_experts, config.num_groups
    if experts % groups or (groups > 1 and experts < 2 * groups):
        raise fields.bad("n_group", f"groups of equal size and at least 2, of n_routed_experts {experts}")
    if config.topk_groups > groups:
        raise fields.bad("topk_group", f"at most n_group, {groups}")
    reachable = experts // groups * config.topk_groups
    if config.num_experts_per_token > reachable:
        raise fields.bad("num_experts_per_tok", f"at most the {reachable} experts of topk_group groups")
    return config


def _expert_layers(fields: Fields, num_layers: int, num_mtp: int) -> tuple[bool, ...]:
    if fields.given("mlp_layer_types"):
        return _marks(fields, "mlp_layer_types", ("sparse", "dense"), num_layers, num_mtp)
    dense, every = fields.count("first_k_dense_replace", 0), fields.optional_count("moe_layer_freq", 1) or 1
    return tuple(i >= dense and i % every == 0 for i in range(num_layers))


def _marks(fields: Fields, key: str, words: tuple[str, str], num_layers: int, num_mtp: int) -> tuple[bool, ...]:
    """Which layers have the first of two words; an entry for the MTP layer, which always has it, may follow."""
    value = fields.raw[key]
    expected = f"{num_layers} times {words[0]!r} or {words[1]!r}, one a layer"
    if not isinstance(value, list | str) or len(value) not in (num_layers, num_layers + num_mtp):
        raise fields.bad(key, f"{expected}, not {len(value)}" if isinstance(value, list | str) else expected)
    for layer, word in enumerate(value):
        if word not in words[: 2 if layer < num_layers else 1]:
            raise fields.bad(key, f"{expected}; that of layer {layer} is {word!r}")
    return tuple(word == words[0] for word in value[:num_layers])

"""config.json of the models with latent attention: both spellings, the rules for layers, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benthic.common.errors import ModelError
from benthic.weights.dsa_config import DsaConfig, IndexerConfig
from benthic.weights.locate import TINY, locate
from benthic.weights.model_config import RopeConfig, config_from_hf, read_config, read_generation_defaults

ORACLES = Path(__file__).parents[1] / "data" / "oracles"
GLM: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144,
    "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 78, "num_attention_heads": 64,
    "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "head_dim": 192, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "index_topk_freq": 4,
    "index_skip_topk_offset": 3, "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "eos_token_id": [154820, 154827, 154829],
    "hidden_act": "silu", "attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 8000000},
}  # fmt: skip
YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
NOT_GLM = ("rope_parameters", "index_topk_freq", "index_skip_topk_offset", "head_dim")
V32: dict[str, Any] = {key: value for key, value in GLM.items() if key not in NOT_GLM} | {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "num_hidden_layers": 61,
    "num_attention_heads": 128, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_group": 8, "topk_group": 4,
    "rope_theta": 10000, "rope_scaling": YARN, "max_position_embeddings": 163840, "moe_layer_freq": 1,
}  # fmt: skip
V3: dict[str, Any] = {key: value for key, value in V32.items() if not key.startswith("index")} | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def parse(raw: dict[str, Any], **changes: Any) -> DsaConfig:
    config = config_from_hf(raw | changes, Path("m"))
    assert isinstance(config, DsaConfig)
    return config


def indexing(**changes: Any) -> list[int]:
    """The indexing layers of a GLM model of eight layers that says nothing else about them."""
    base = {key: value for key, value in GLM.items() if key not in ("index_topk_freq", "index_skip_topk_offset")}
    indexer = parse(base, num_hidden_layers=8, **changes).indexer
    assert indexer is not None
    return [i for i, computes in enumerate(indexer.layers) if computes]


def test_glm() -> None:
    config = parse(GLM)
    assert config.architecture == "glm_moe_dsa"
    assert config.rope == RopeConfig(theta=8e6)
    assert (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (192, 64, 256)  # head_dim lies
    assert config.scale == 0.0625
    assert (config.num_mtp_layers, config.eos_token_ids) == (1, (154820, 154827, 154829))
    assert config.indexer is not None
    assert [i for i, computes in enumerate(config.indexer.layers) if computes] == [0, 1, *range(2, 78, 4)]
    assert config.indexer.interleaved_rope
    assert [i for i, has in enumerate(config.moe.layers) if not has] == [0, 1, 2]


def test_deepseek_v32() -> None:
    config = parse(V32)
    assert config.architecture == "deepseek_v32"
    assert config.rope == RopeConfig(
        theta=1e4, kind="yarn", factor=40.0, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0
    )
    assert config.scale == pytest.approx(0.135234, abs=1e-6)
    assert config.rope.angle_gain == 1.0
    assert config.indexer == IndexerConfig(
        num_heads=32, head_dim=128, topk=2048, interleaved_rope=False, layers=(True,) * 61
    )
    assert (config.moe.num_groups, config.moe.topk_groups, len(config.moe.layers)) == (8, 4, 61)


def test_deepseek_v3_has_no_indexer() -> None:
    assert parse(V3).indexer is None


def test_both_spellings_of_rope_are_the_same() -> None:
    new = {key: value for key, value in V32.items() if key not in ("rope_theta", "rope_scaling")}
    rope = {"rope_type": "yarn", "rope_theta": 10000, **{k: v for k, v in YARN.items() if k != "type"}}
    assert parse(new, rope_parameters=rope) == parse(V32)


def test_the_nested_theta_wins() -> None:
    assert parse(GLM, rope_theta=1e6).rope.theta == 8e6


def test_gains_of_yarn() -> None:
    rope = parse(V32, rope_scaling=YARN | {"mscale": 0.5, "mscale_all_dim": 0.0}).rope
    assert rope.angle_gain == pytest.approx(0.05 * math.log(40) + 1)
    assert rope.softmax_gain == 1.0


def test_which_layers_index() -> None:
    assert indexing() == list(range(8))
    assert indexing(index_topk_freq=None, index_skip_topk_offset=5) == list(range(8))
    assert indexing(index_topk_freq=3) == [0, 1, 4, 7]  # the offset is 2 by default
    assert indexing(index_topk_pattern="FSSFSSFS") == [0, 3, 6]
    assert indexing(indexer_types=["full", "shared"] * 4) == [0, 2, 4, 6]
    assert indexing(indexer_types=["full", "shared"] * 4, index_topk_freq=None, index_topk_pattern=None) == [0, 2, 4, 6]
    assert indexing(index_topk_pattern="FSSFSSFSF") == [0, 3, 6]  # the MTP layer may be listed too


def test_which_layers_have_experts() -> None:
    kinds = ["sparse", "dense", "dense", "sparse"]
    small = {"num_hidden_layers": 4, "index_topk_freq": None}
    assert parse(GLM, **small, mlp_layer_types=kinds).moe.layers == (True, False, False, True)
    assert parse(GLM, **small, first_k_dense_replace=0).moe.layers == (True,) * 4
    assert parse(GLM, **small, first_k_dense_replace=1, moe_layer_freq=2).moe.layers == (False, False, True, False)


def test_the_indexer_rope_follows_the_field_where_it_is_there() -> None:
    for raw in (GLM, V32):
        for interleaved in (True, False):
            indexer = parse(raw, indexer_rope_interleave=interleaved).indexer
            assert indexer is not None
            assert indexer.interleaved_rope is interleaved


def test_either_of_class_and_type_is_enough() -> None:
    for key in ("architectures", "model_type"):
        assert parse({k: v for k, v in V32.items() if k != key}) == parse(V32)


def test_mtp_layers_are_none_where_nothing_is_said() -> None:
    assert parse({key: value for key, value in GLM.items() if key != "num_nextn_predict_layers"}).num_mtp_layers == 0
    assert parse(GLM, num_nextn_predict_layers=0).num_mtp_layers == 0


def test_fp8_in_blocks_is_accepted() -> None:
    assert parse(V32, quantization_config=FP8) == parse(V32)
    assert parse(V32, quantization_config=FP8 | {"scale_fmt": "ue8m0", "modules_to_not_convert": ["x"]}) == parse(V32)
    assert parse(V32, quantization_config=None) == parse(V32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "glm5_next"}, r"config\.json: model_type 'glm5_next' is not supported, though .*GlmMoeDsa"),
        ({"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]}, "model_type 'deepseek_v4'"),
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3' and architectures .* contradict each other"),
        ({"architectures": ["LlamaForCausalLM"]}, "model_type 'glm_moe_dsa' and architectures .* contradict"),
        ({"attention_bias": True}, "attention_bias: expected false: biases of attention .*, found True"),
        ({"hidden_act": "gelu"}, "hidden_act: expected \"silu\", found 'gelu'"),
        ({"scoring_func": "softmax"}, "scoring_func: expected \"sigmoid\", found 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method: expected \"noaux_tc\", found 'greedy'"),
        ({"rope_interleave": False}, "rope_interleave: expected true"),
        ({"q_lora_rank": None}, "q_lora_rank: expected a whole number: queries without a latent .*, found None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1, found 0.5"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "'llama3' is not supported; .*default, yarn"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope: rope_theta: expected a number .*, found nothing"),
        ({"rope_parameters": YARN}, "rope: rope_theta: expected a number"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: expected an even number, found 63"),
        ({"qk_head_dim": 255}, "qk_head_dim: expected 256, the sum .* 192 and 64, found 255"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers: expected 0 or 1, found 2"),
        ({"index_topk": None}, "index_topk: expected a whole number from 1"),
        ({"index_topk": 0}, "index_topk: .*found 0"),
        ({"index_head_dim": 32}, "index_head_dim: expected at least qk_rope_head_dim, 64, found 32"),
        ({"indexer_rope_interleave": 1}, "indexer_rope_interleave: expected true or false, found 1"),
        ({"n_group": 3}, "n_group: expected groups of equal size and at least 2, of n_routed_experts 256, found 3"),
        ({"n_group": 256}, "n_group: expected groups of equal size and at least 2"),
        ({"topk_group": 2}, "topk_group: expected at most n_group, 1, found 2"),
        ({"n_group": 64}, "num_experts_per_tok: expected at most the 4 experts of topk_group groups, found 8"),
        ({"n_shared_experts": 0}, "n_shared_experts: .*found 0"),
        ({"norm_topk_prob": None}, "norm_topk_prob: expected true or false, found None"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor: expected a number .*found nan"),
        ({"first_k_dense_replace": None}, "first_k_dense_replace: expected a whole number from 0"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types: expected 78 times 'sparse' or 'dense', .*, not 1"),
        ({"mlp_layer_types": ["dense"] * 77 + ["moe"]}, "that of layer 77 is 'moe'"),
        ({"mlp_layer_types": ["dense"] * 79}, "that of layer 78 is 'dense'"),
        ({"mlp_layer_types": 78}, "mlp_layer_types: expected 78 times"),
        ({"index_topk_freq": 0}, "index_topk_freq: .*found 0"),
        ({"index_skip_topk_offset": 0}, "index_topk_freq: expected a description by which layer 0 indexes"),
        ({"num_hidden_layers": 5000}, "5000 layers: expected 4096 at most"),
        ({"eos_token_id": [154880]}, "end token 154880"),
        ({"vocab_size": 1 << 40}, "vocab_size: .*found 1099511627776"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false, found 'no'"),
    ],
)
def test_fields_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(GLM, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": None}, "factor: expected a number, which rope type yarn needs"),
        ({"original_max_position_embeddings": None}, "rope: original_max_position_embeddings"),
        ({"beta_fast": 1}, "beta_fast: expected more than beta_slow, 1.0, found 1"),
        ({"attention_factor": 1.2}, "attention_factor: expected nothing: mscale"),
        ({"truncate": False}, "truncate: expected true"),
        ({"mscale": "x"}, "mscale: expected a number"),
        ({"type": "longrope"}, "'longrope' is not supported"),
    ],
)
def test_yarn_that_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(V32, rope_scaling=YARN | change)


def test_an_indexer_of_a_dense_model_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"index_topk: expected nothing: deepseek_v3 has dense attention.*, found 2048"
    ):
        parse(V3, index_topk=2048)


def test_descriptions_of_indexing_layers_that_contradict_are_refused() -> None:
    types = ["full", "full", "full", "shared"] * 2
    with pytest.raises(
        ModelError,
        match="indexer_types and index_topk_freq contradict each other: by indexer_types layer 2 computes a selection, "
        "by index_topk_freq it shares that of a layer below",
    ):
        indexing(indexer_types=types, index_topk_freq=4)
    with pytest.raises(ModelError, match=r"indexer_types and index_topk_pattern contradict .* layer 3 shares"):
        indexing(indexer_types=types, index_topk_pattern="FFFFFFFS")
    assert indexing(indexer_types=types, index_topk_pattern="FFFSFFFS") == [0, 1, 2, 4, 5, 6]


def test_a_first_layer_that_shares_is_refused() -> None:
    for change in ({"indexer_types": ["shared"] + ["full"] * 7}, {"index_topk_pattern": "SFFFFFFF"}):
        with pytest.raises(ModelError, match=f"{next(iter(change))}: expected a description by which layer 0 indexes"):
            indexing(**change)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"NVFP4 weights \(ModelOpt\) can't be loaded yet"),
        ({"quant_method": "awq"}, "quantization_config.quant_method: expected \"fp8\".*, found 'awq'"),
        (FP8 | {"weight_block_size": [64, 128]}, r"weight_block_size: expected \[128, 128\].*, found \[64, 128\]"),
        ({"quant_method": "fp8"}, "weight_block_size: .*, found nothing"),
        (FP8 | {"fmt": "e5m2"}, "fmt: expected \"e4m3\", found 'e5m2'"),
        (FP8 | {"activation_scheme": "static"}, 'activation_scheme: expected "dynamic"'),
        (FP8 | {"scale_fmt": "int"}, 'scale_fmt: expected "ue8m0" or nothing'),
        (FP8 | {"moe_quant_algo": "NVFP4"}, "moe_quant_algo: expected nothing.*, found 'NVFP4'"),
        ("fp8", "quantization_config: expected a table, found 'fp8'"),
    ],
)
def test_quantisation_that_is_refused(quantization: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(V32, quantization_config=quantization)


def test_an_older_modelopt_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GLM))
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"hf_quant_config\.json: ModelOpt weights"):
        read_config(locate(str(tmp_path)))


def test_the_fp8_oracle() -> None:
    config = read_config(locate(str(ORACLES / "deepseek_v32-fp8")))
    assert isinstance(config, DsaConfig)
    assert (config.architecture, config.num_layers, config.kv_lora_rank, config.moe.num_groups) == (
        "deepseek_v32", 4, 32, 4,
    )  # fmt: skip
    assert config.indexer == IndexerConfig(
        num_heads=8, head_dim=32, topk=16, interleaved_rope=False, layers=(True,) * 4
    )


def test_the_built_in_model() -> None:
    config = read_config(locate(TINY))
    assert isinstance(config, DsaConfig)
    assert (config.architecture, config.num_layers, config.num_mtp_layers) == ("glm_moe_dsa", 8, 1)
    assert config.indexer == IndexerConfig(
        num_heads=4, head_dim=64, topk=256, interleaved_rope=True, layers=(True,) * 8
    )
    assert config.moe.layers == (False, *(True,) * 7)
    assert config.rope == RopeConfig(theta=1e5)
    assert read_generation_defaults(locate(TINY)).eos_token_ids == (0, 7, 9)

"""What config.json says of the weights' quantisation: plain weights and fp8 in blocks of 128 x 128 can be loaded."""

from pathlib import Path

from benthic.common.errors import ModelError
from benthic.weights.fields import Fields

BLOCK = 128  # rows and columns of a weight that share a scale
_PLAIN = "a checkpoint in bf16, or in fp8 with weight_block_size [128, 128]"


def check_quantization(fields: Fields) -> None:
    """Raises ModelError for a `quantization_config` whose weights would be read wrongly; none is fine."""
    if not fields.given("quantization_config"):
        return
    quantization = fields.table("quantization_config")
    method, algorithm = quantization.raw.get("quant_method"), quantization.raw.get("quant_algo")
    if method == "modelopt" or algorithm is not None:
        raise ModelError(
            f"{fields.where}: quantization_config: {algorithm or method} weights (ModelOpt) can't be loaded yet; "
            f"expected {_PLAIN}"
        )
    if method != "fp8":
        raise quantization.bad("quant_method", f'"fp8"; take {_PLAIN}')
    quantization.demand("fmt", "e4m3", "")
    quantization.demand("activation_scheme", "dynamic", "")
    quantization.demand("scale_fmt", "ue8m0", " or nothing")
    if quantization.given("moe_quant_algo"):
        raise quantization.bad("moe_quant_algo", "nothing: experts in another format than fp8 can't be loaded yet")
    if quantization.raw.get("weight_block_size") != [BLOCK, BLOCK]:
        raise quantization.bad("weight_block_size", f"[{BLOCK}, {BLOCK}]: scales of other blocks are not supported")


def check_no_modelopt_file(folder: Path) -> None:
    """Raises ModelError where an older ModelOpt checkpoint describes itself beside its config.json."""
    path = folder / "hf_quant_config.json"
    if path.is_file():
        raise ModelError(f"{path}: ModelOpt weights (NVFP4 or FP8) can't be loaded yet; expected {_PLAIN}")

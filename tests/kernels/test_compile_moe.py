"""The interpreter accepts what the compiler may not: compile the latent writes' and the experts' kernels for Hopper."""

import os
import subprocess
import sys

PROGRAM = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from benthic.kernels.experts import kernel as experts
from benthic.kernels.experts.single import kernel as single
from benthic.kernels.experts.sorting import kernel as sorting
from benthic.kernels.experts.summing.kernel import _sum_kernel, _sum_norm_kernel
from benthic.kernels.experts.tiles import plan_for
from benthic.kernels.head_linear.kernel import _head_kernel
from benthic.kernels.index_query.kernel import _index_query_kernel
from benthic.kernels.index_write.kernel import _index_write_kernel
from benthic.kernels.latent_step.kernel import _latent_step_kernel
from benthic.kernels.latent_write.kernel import _latent_write_kernel
from benthic.kernels.moe_route.kernel import _moe_route_kernel
from benthic.kernels.narrow_linear.kernel import _few_kernel, _many_kernel
from benthic.kernels.row_linear import kernel as row_linear
from benthic.kernels.norm_products.kernel import _norm_row_kernel, _norm_rows_kernel
from benthic.kernels.query_rope.kernel import _query_rope_kernel
from benthic.kernels.query_step.kernel import _query_step_kernel
from benthic.kernels.silu_mul.kernel import _silu_mul_kernel

LIMIT = 227 << 10
INT32 = ("chosen_ptr", "order_ptr", "inverse_ptr", "places_ptr", "items_ptr", "ends_ptr", "experts_ptr")
FLOAT32 = ("table_ptr", "logits_ptr", "bias_ptr", "weights_ptr", "scale_ptr", "key_scale_ptr", "scaled_ptr")
TYPES = {**dict.fromkeys(INT32, "*i32"), **dict.fromkeys(FLOAT32, "*fp32"), "positions_ptr": "*i64",
         "slots_ptr": "*i64", "codes_ptr": "*fp8e4nv", "eps": "fp32", "scaling": "fp32",
         "factor": "fp32"}
# multiples of 16, as torch allocates and models have
ALIGNED = "_ptr", "stride_x", "stride_w", "stride_e", "stride_d", "stride_t", "stride_h", "_dim"

def build(fn, constants, types=(), warps=4, stages=3):
    constants = constants | ({"PDL": True} if "PDL" in fn.arg_names else {})
    known = {**TYPES, **dict(types)}
    signature = {a: known.get(a, "*bf16" if a.endswith("_ptr") else "i32") for a in fn.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(fn.arg_names) if a.endswith(ALIGNED)}
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})

FP8 = {"record_ptr": "*fp8e4nv", "key_ptr": "*fp8e4nv"}
latent = {"PAGE_SIZE": 64, "R": 512, "P": 64, "BLOCKS": 4, "BLOCK_P": 64}
index = {"E": 128, "P": 64, "INTERLEAVED": False, "BLOCK_E": 128}
for fp8 in (False, True):
    types = FP8 if fp8 else {"scale_ptr": "*bf16", "key_scale_ptr": "*bf16"}
    build(_latent_write_kernel, {**latent, "FP8": fp8}, types)
    build(_index_write_kernel, {**index, "PAGE_SIZE": 64, "FP8": fp8}, {**types, "bias_ptr": "*bf16"}, warps=1)
    build(_latent_step_kernel, {**latent, **index, "Q": 1536, "BLOCK_Q": 2048, "FP8": fp8, "INDEX_FP8": fp8}, types)
for rows, warps in ((16, 4), (64, 4), (32, 8)):
    turn = {"H": 32, "ROWS": rows, "BLOCK_P": 32}
    for interleaved in (False, True):
        built = build(_query_rope_kernel, {**turn, "HALF": 32, "INTERLEAVED": interleaved}, warps=warps)
        assert "convert_layout" not in built.asm["ttgir"], "rows pass through shared memory"
    quantise = {**turn, "E": 128, "HALF": 32, "INTERLEAVED": warps == 8, "BLOCK_R": 64}
    build(_index_query_kernel, quantise, warps=warps)
for fp8 in (False, True):
    step = {**index, "H": 32, "HI": 32, "FP8": fp8, "ROWS": 16, "BLOCK_P": 32, "BLOCK_R": 64, "ABSORBING": 4,
            "K": 128, "N": 512, "BLOCK_T": 16, "BLOCK_K": 128, "BLOCK_N": 128}
    del step["BLOCK_E"]
    build(_query_step_kernel, step, () if fp8 else {"codes_ptr": "*bf16"})
build(_few_kernel, {"D": 7168, "BLOCK_T": 4, "BLOCK_D": 1024}, {"out_ptr": "*fp32"})
for block_t in (16, 64):
    shape = {"D": 7168, "BLOCK_T": block_t, "BLOCK_N": 64, "BLOCK_D": 128, "WIDE": False}
    assert build(_many_kernel, shape, {"out_ptr": "*fp32"}).metadata.shared <= LIMIT
for x, groups, block_g, block_s in ((64, 1, 1, 64), (256, 8, 8, 32)):
    build(_moe_route_kernel, {"X": x, "G": groups, "TOPK_GROUPS": min(groups, 4), "K": 8, "NORM": True, "SHARED": 1,
                              "BLOCK_G": block_g, "BLOCK_S": block_s, "BLOCK_K": 16}, warps=1)
many = {"X": 257, "BLOCK_X": 512}
for block in (256, 4096):
    build(sorting._sort_kernel, {**many, "BLOCK_P": block, "ROWS": 16, "BLOCK_I": 128}, warps=8)
for n, d in ((1728, 2048), (65536, 2048)):
    rows, depth, warps = row_linear.tiles(2)
    build(row_linear._row_kernel, {"N": n, "D": d, "ROWS": rows, "DEPTH": depth, "AHEAD": 2}, warps=warps)
build(_silu_mul_kernel, {"BLOCK": 2048}, warps=8)
plans = {plan_for(tokens, 9, 65, torch.bfloat16) for tokens in (4, 16, 64, 256, 512, 1024, 8192)}
for plan in plans:
    for tiles in (plan.up, plan.down):
        sizes = {"W": 1024, "D": 2048, "ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth}
        fn = experts._down_kernel
        if tiles is plan.up:
            fn, sizes = experts._up_kernel, {**sizes, "K": 9}
        partial = {"partial_ptr": "*fp32"} if plan.rows <= 32 else ()
        built = build(fn, sizes, partial, tiles.warps, tiles.stages)
        assert built.metadata.shared <= LIMIT, (tiles, built.metadata.shared)
        text = built.asm["ttgir"]
        assert "async_copy_global_to_local" in text, "loads of the product are not pipelined"
        assert ("warp_group_dot" in text) == (tiles.rows >= 64), "the product is not the tensor cores' widest"
up, down = plan_for(1, 9, 65, torch.bfloat16).single
build(single._up_kernel, {"W": 1024, "D": 2048, "ROWS": up.rows, "DEPTH": up.depth}, warps=up.warps)
build(single._down_kernel, {"W": 1024, "D": 2048, "K": 9, "ROWS": down.rows, "DEPTH": down.depth}, warps=down.warps)
for partial in ("*fp32", "*bf16"):
    build(_sum_kernel, {"K": 9, "BLOCK_D": 1024}, {"partial_ptr": partial})
    build(_sum_norm_kernel, {"K": 9, "D": 2048, "BLOCK_D": 2048}, {"partial_ptr": partial}, warps=8)
products = {"narrow_out_ptr": "*fp32"}
for n, m, rows in ((1728, 32, 4), (0, 64, 1)):
    build(_norm_row_kernel, {"N": n, "M": m, "D": 2048, "ROWS": rows, "BLOCK_D": 2048}, products)
build(_norm_rows_kernel, {"M": 64, "D": 2048, "BLOCK_T": 2, "BLOCK_O": 4, "BLOCK_D": 2048}, products)
for k, n in ((128, 512), (512, 128)):
    for tokens in (1, 16, 64):
        shape = {"K": k, "N": n, "BLOCK_T": tokens, "BLOCK_K": k, "BLOCK_N": 16384 // k}
        assert build(_head_kernel, shape).metadata.shared <= LIMIT
build(experts._activate_kernel, {"BLOCK_W": 1024})
print("built")
"""


def test_every_kernel_compiles() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "built", done.stderr[-4000:]

"""The interpreter accepts what the compiler may not: compile the kernels for Hopper and Ampere, which needs no GPU."""

import os
import subprocess
import sys

PROGRAM = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from benthic.kernels.paged_decode.kernel import _combine_kernel, _decode_kernel
from benthic.kernels.paged_prefill.kernel import _prefill_kernel
from benthic.kernels.paged_write.kernel import _paged_write_kernel
from benthic.kernels.rms_norm.kernel import _rms_norm_kernel
from benthic.kernels.rope.kernel import _rope_kernel
from benthic.kernels.split_merge.kernel import _merge_kernel
from benthic.kernels.tiles import decode_tiles, prefill_tiles

TYPES = {"table_ptr": "*i32", "lens_ptr": "*i32", "cu_ptr": "*i32", "slots_ptr": "*i64", "positions_ptr": "*i64",
         "part_ptr": "*fp32", "lse_ptr": "*fp32", "total_ptr": "*fp32", "scale_log2": "fp32", "eps": "fp32"}

def build(target, fn, tiles=None, **constants):
    constants |= {"PDL": target >= 90} if "PDL" in fn.arg_names else {}
    types = {**TYPES, "table_ptr": "*fp32"} if fn is _rope_kernel else TYPES
    signature = {a: types.get(a, "*bf16" if a.endswith("_ptr") else "i32") for a in fn.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages} if tiles else {}
    source = ASTSource(fn=fn, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options).metadata.shared

cpu = torch.device("cpu")
for target, limit in ((90, 227 << 10), (80, 163 << 10)):
    for head_dim, page in ((64, 16), (128, 64)):
        d, p = decode_tiles(head_dim, 2, 4, cpu), prefill_tiles(head_dim, 2, cpu)
        shape = {"GROUP": 4, "HEAD_DIM": head_dim, "PAGE_SIZE": page}
        blocks = {"BLOCK_H": d.rows, "BLOCK_N": d.keys}
        for splits, part in ((8, False), (1, True)):
            assert build(target, _decode_kernel, d, SPLITS=splits, PART=part, **blocks, **shape) <= limit
        assert build(target, _prefill_kernel, p, BLOCK_M=p.rows, BLOCK_N=p.keys, **shape) <= limit
    build(target, _combine_kernel, HEAD_DIM=64, SPLITS=8)
    for splits in (1, 8):
        build(target, _merge_kernel, SIZE=64, BLOCK=64, SPLITS=splits)
    build(target, _paged_write_kernel, PAGE_SIZE=64, HEAD_DIM=64, BLOCK_G=4, BLOCK_D=64)
    build(target, _rms_norm_kernel, D=576, BLOCK_D=1024, RESIDUAL=True)
    build(target, _rope_kernel, HALF=32, BLOCK_H=16, BLOCK_G=4, BLOCK_R=32)
print("built")
"""


def test_every_kernel_compiles() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "built", done.stderr

"""The latent kernels, compiled for Hopper and Ampere at real sizes, which needs no GPU."""

import os
import subprocess
import sys

PROGRAM = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from benthic.kernels.latent_decode.kernel import _decode_kernel, _merge_kernel
from benthic.kernels.latent_hopper.decode import kernel as hopper_decode
from benthic.kernels.latent_hopper.pair import kernel as hopper_pair
from benthic.kernels.latent_hopper.prefill import kernel as hopper_prefill
from benthic.kernels.latent_prefill.kernel import _prefill_kernel
from benthic.kernels.latent_unpack.kernel import _unpack_kernel
from benthic.kernels.latent_tiles import dense_tiles, has_gluon, sparse_tiles

TYPES = {"table_ptr": "*i32", "lens_ptr": "*i32", "selected_ptr": "*i32", "part_ptr": "*fp32", "lse_ptr": "*fp32",
         "scales_ptr": "*fp32", "scale_log2": "fp32"}

def build(target, fn, warps, stages, source=ASTSource, codes="*bf16", **constants):
    types = {**TYPES, "codes_ptr": codes}
    signature = {a: types.get(a, "*bf16" if a.endswith("_ptr") else "i32") for a in fn.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    attributes = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(fn.arg_names)
                  if a not in constants and (a.endswith("_ptr") or a.startswith("stride"))}
    made = source(fn=fn, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": constants.get("PDL", False)}
    return triton.compile(made, target=GPUTarget("cuda", target, 32), options=options).metadata.shared

cpu = torch.device("cpu")
sizes = {"RANK": 512, "BLOCK_R": 512, "ROPE": 64, "BLOCK_P": 64, "PAGE_SIZE": 64, "BLOCK_K": 2048}
for target, limit in ((90, 227 << 10), (80, 163 << 10)):
    for heads, fp8 in ((32, False), (128, False), (32, True)):
        s, d = sparse_tiles(heads, 512, 2, cpu), dense_tiles(512, 2, cpu)
        if target == 80:  # as latent_tiles does where shared memory is smaller
            s = d = type(d)(s.rows, 16, 4, 2)
        given = {**sizes, "HEADS": heads, "FP8": fp8, "codes": "*fp8e4nv" if fp8 else "*bf16"}
        if fp8 and target == 80:
            continue  # e4m3 needs sm_89
        for tiles, sparse in ((s, True), (d, False)):
            blocks = {"BLOCK_M": tiles.rows, "BLOCK_N": tiles.keys, "SPARSE": sparse, "TURNED": tiles.turned}
            assert build(target, _prefill_kernel, tiles.warps, tiles.stages, **given, **blocks) <= limit
        blocks = {"BLOCK_M": s.rows, "BLOCK_N": s.keys, "TURNED": s.turned}
        forms = [{"SPARSE": False, "SPLITS": 8, "PART": False}, {"SPARSE": True, "SPLITS": 1, "PART": True}]
        given["PDL"] = target == 90
        for form in forms if heads == 32 else forms[:1]:
            assert build(target, _decode_kernel, s.warps, s.stages, **given, **blocks, **form) <= limit
for splits, group, block in ((2, 2, 512), (32, 1, 128)):
    build(90, _merge_kernel, 4, 1, HEADS=32, RANK=512, GROUP=group, BLOCK=block, SPLITS=splits, PDL=True)
sizes = {k: v for k, v in sizes.items() if k != "BLOCK_K"}
build(90, _unpack_kernel, 4, 1, FP8=True, BLOCK_N=16, codes="*fp8e4nv", **sizes)
for rows in (32, 64) if has_gluon() else ():
    shape = {"HEADS": rows, "BLOCK_H": rows, "BLOCK_N": 64, "RANK": 512, "ROPE": 64, "PAGE_SIZE": 64, "BLOCK_K": 2048}
    for form in ({"SPLITS": 8, "PART": False}, {"SPLITS": 1, "PART": True}):
        for fp8 in (False, True):
            given = {**hopper_decode.warps_and_buffers(rows, fp8=fp8), "FP8": fp8, "codes": "*i32" if fp8 else "*bf16"}
            warps = given.pop("num_warps")
            given |= {**shape, **form, "PDL": True, "source": GluonASTSource}
            assert build(90, hopper_decode._decode_kernel, warps, 1, **given) <= 227 << 10
    given = {"HEAD_BLOCKS": 1, "source": GluonASTSource}
    if rows == 64:
        assert build(90, hopper_prefill._prefill_kernel, 8, 1, **shape, **given) <= 227 << 10
    else:
        del shape["BLOCK_H"]
        assert build(90, hopper_pair._pair_kernel, 4, 1, **shape, **given) <= 227 << 10
print("built")
"""


def test_the_latent_kernels_compile() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "built", done.stderr

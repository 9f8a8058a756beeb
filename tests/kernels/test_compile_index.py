"""The interpreter accepts what the compiler may not: compile the indexer's scores and the selection for Hopper."""

import os
import subprocess
import sys

PROGRAM = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from benthic.kernels.index_scores.kernel import _decode_kernel, _prefill_kernel
from benthic.kernels.index_scores.tiles import decode_tiles, prefill_tiles
from benthic.kernels.topk_select.kernel import _select_kernel
from benthic.kernels.topk_select.plan import sizes_of

LIMIT = 227 << 10
TYPES = {**dict.fromkeys(("table_ptr", "lens_ptr", "origin_ptr", "kept_ptr"), "*i32")}
UNALIGNED = "table_ptr", "lens_ptr", "origin_ptr", "out_ptr", "stride_table", "stride_kept"

def build(fn, constants, types, warps, stages):
    known = {**TYPES, **types}
    signature = {a: known.get(a, "*fp32" if a.endswith("_ptr") else "i32") for a in fn.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(fn.arg_names)
               if (a.endswith("_ptr") or a.startswith("stride") or a == "part_size") and a not in UNALIGNED}
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

cpu = torch.device("cpu")
for fp8, element in ((True, "*fp8e4nv"), (False, "*bf16"), (False, "*fp32")):
    size = {"*fp8e4nv": 1, "*bf16": 2, "*fp32": 4}[element]
    types = {"q_ptr": element, "keys_ptr": element, "scales_ptr": "*fp32" if fp8 else element}
    for heads, head_dim, page in ((32, 128, 64), (64, 128, 16))[: 1 if size == 4 else 2]:
        shape = {"NUM_HEADS": heads, "HEAD_DIM": head_dim, "BLOCK_E": head_dim, "PAGE_SIZE": page, "FP8": fp8}
        p, d = (t(heads, head_dim, size, cpu) for t in (prefill_tiles, decode_tiles))
        prefill = {"HEADS": heads, "QUERIES": p.columns // heads, "BLOCK_N": p.keys, "AHEAD": p.ahead}
        decode = {"HEADS": d.columns, "BLOCK_N": d.keys, "AHEAD": d.ahead, "PDL": True}
        built = build(_prefill_kernel, {**shape, **prefill}, types, p.warps, p.stages)
        other = build(_decode_kernel, {**shape, **decode}, types, d.warps, d.stages)
        assert max(built.metadata.shared, other.metadata.shared) <= LIMIT
        for text in (built.asm["ttgir"], other.asm["ttgir"]) if size < 4 else ():
            assert "warp_group_dot" in text, "the product is not the tensor cores' widest"
            assert "async_copy_global_to_local" in text, "keys are not loaded ahead"
        loop = built.asm["ttgir"].split("scf.for", 1)[1].split("scf.yield", 1)[0]
        assert "async_wait" in loop and not (fp8 and "{num = 0 : i32}" in loop), "a tile's keys are awaited at once"
        if heads == 32 and size < 4:  # four queries side by side
            assert "shfl" not in built.asm["ptx"], "heads are summed between threads"
for rows, width, stages in ((1, 8192, (0,)), (1, 131072, (1, 2)), (4096, 8192, (0,)), (4096, 131072, (0,))):
    s = sizes_of(rows, width, cpu)
    for stage in stages:
        constants = {"LANES": s.lanes, "DEPTH": s.depth, "VECTOR": 4, "SAMPLE": s.sample, "CANDIDATES": s.candidates,
                     "DEVIATIONS": s.deviations, "STAGE": stage, "PDL": True}
        built = build(_select_kernel, constants, {"out_ptr": "*i32"}, s.warps, 1)
        code = built.asm["ptx"]
        assert "ld.global.v4" in code, "scores are not loaded in fours"
        moved = [line for line in built.asm["ttgir"].splitlines() if "convert_layout" in line]
        assert not any(f"<{s.depth}x{s.lanes}x" in line for line in moved), "a pass exchanges between threads"
        assert "st.global.v" not in code, "stores of chosen positions were joined"
        assert "setp.ge.ftz" not in code and "setp.lt.ftz" not in code, "denormal scores equal zero"
print("built")
"""


def test_every_kernel_compiles() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "built", done.stderr[-4000:]

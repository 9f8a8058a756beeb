"""paged_decode and paged_prefill on a CUDA device beside the device's own limits, measured in the same run.

Decode (bf16, 32 query heads over 8, head_dim 128, 8k context, batches 1, 16 and 64): GB/s of K and V read, beside a
device copy. Calls are captured in a CUDA graph over so many separate pools that no call finds its KV in the L2 cache.
Prefill (the last 2k … 8k tokens of an 8k context): TFLOP/s of the causal half, beside F.scaled_dot_product_attention
over contiguous K and V and an 8192^3 matrix product.
`python -m benchmarks.attention_gpu [--json] [--tune]`; --tune tries other tiles and prints the best ones.
"""

from collections.abc import Callable, Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from benchmarks.common import Timing, arguments, report
from benchmarks.gpu_time import time_cuda, time_graph
from benthic.kernels.paged_decode import paged_decode_reference
from benthic.kernels.paged_decode.kernel import paged_decode_triton
from benthic.kernels.paged_prefill.kernel import paged_prefill_triton
from benthic.kernels.tiles import Tiles, decode_tiles, prefill_tiles

HEADS, KV_HEADS, HEAD_DIM, PAGE, CONTEXT = 32, 8, 128, 64, 8192
SCALE = HEAD_DIM**-0.5
DTYPE = torch.bfloat16
CACHE_BYTES = 512 << 20  # several times any L2 cache
BATCHES, CHUNKS = (1, 16, 64), (2048, 4096, 8192)


class Pools:
    """Pools with `batch` contexts of random KV each, enough to overflow the L2 cache, and a shuffled page table."""

    def __init__(self, batch: int) -> None:
        pages = batch * CONTEXT // PAGE
        self.bytes_read = pages * 2 * PAGE * KV_HEADS * HEAD_DIM * DTYPE.itemsize
        count = max(2, -(-CACHE_BYTES // self.bytes_read))
        self.kv = [
            torch.randn(pages + 1, 2, PAGE, KV_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE) for _ in range(count)
        ]
        order = torch.randperm(pages, device="cuda").to(torch.int32)
        self.table = order.view(batch, CONTEXT // PAGE)
        self.lens = torch.full((batch,), CONTEXT, dtype=torch.int32, device="cuda")


def decode(batch: int, repeats: int, tune: bool) -> tuple[float, str]:
    """GB/s of KV read, and the tiles if they were searched for."""
    pools = Pools(batch)
    q = torch.randn(batch, HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
    out = torch.empty_like(q)

    def run(tiles: Tiles | None = None, splits: int | None = None) -> None:
        for kv in pools.kv:
            paged_decode_triton(q, kv, pools.table, pools.lens, SCALE, CONTEXT, out, tiles, splits)

    paged_decode_triton(q, pools.kv[0], pools.table, pools.lens, SCALE, CONTEXT, out)
    exact = paged_decode_reference(q, pools.kv[0], pools.table, pools.lens, SCALE, CONTEXT, torch.empty_like(q))
    torch.testing.assert_close(out, exact, atol=1e-2, rtol=2e-2)
    amount = len(pools.kv) * pools.bytes_read / 1e9
    note = ""
    if tune:
        base = decode_tiles(HEAD_DIM, DTYPE.itemsize, HEADS // KV_HEADS, q.device)
        found = {}
        for keys, warps, stages, splits in product((32, 64, 128), (2, 4, 8), (2, 3, 4), (1, 2, 4, 8, 16, 32, 64, 128)):
            tiles = Tiles(base.rows, keys, warps, stages)
            found[tiles, splits] = _rate(lambda t=tiles, s=splits: run(t, s), amount, time_graph)  # type: ignore[misc]
        note = _best(found)
    return time_graph(run, repeats).per_second(amount), note


def prefill(chunk: int, repeats: int, tune: bool) -> tuple[float, float, str]:
    """TFLOP/s of the kernel and of SDPA for the last `chunk` tokens of a context, and the best tiles."""
    pools = Pools(1)
    kv = pools.kv[0]
    q = torch.randn(chunk, HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
    out = torch.empty_like(q)
    cu = torch.tensor([0, chunk], dtype=torch.int32, device="cuda")

    def run(tiles: Tiles | None = None) -> None:
        paged_prefill_triton(q, kv, pools.table, pools.lens, cu, SCALE, chunk, out, tiles)

    k, v = kv[pools.table[0].long()].transpose(0, 1).flatten(1, 2).transpose(1, 2)  # [G, S, d] each
    wide_k, wide_v = (x.repeat_interleave(HEADS // KV_HEADS, 0)[None].contiguous() for x in (k, v))
    wide_q = q.transpose(0, 1)[None].contiguous()

    def sdpa() -> torch.Tensor:
        if chunk == CONTEXT:
            return F.scaled_dot_product_attention(wide_q, wide_k, wide_v, is_causal=True, scale=SCALE)
        bias = causal_lower_right(chunk, CONTEXT)
        return F.scaled_dot_product_attention(wide_q, wide_k, wide_v, attn_mask=bias, scale=SCALE)

    run()
    torch.testing.assert_close(out, sdpa()[0].transpose(0, 1), atol=1e-2, rtol=2e-2)
    pairs = chunk * (CONTEXT - chunk) + chunk * (chunk + 1) / 2
    amount = 4 * HEADS * HEAD_DIM * pairs / 1e12
    note = ""
    if tune:
        found = {}
        for rows, keys, warps, stages in product((64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4)):
            tiles = Tiles(rows, keys, warps, stages)
            found[tiles, 0] = _rate(lambda t=tiles: run(t), amount, time_cuda)  # type: ignore[misc]
        note = _best(found)
    return time_cuda(run, repeats).per_second(amount), time_cuda(sdpa, repeats).per_second(amount), note


def limits(repeats: int) -> tuple[float, float]:
    """GB/s of a device copy (read and written), TFLOP/s of a bf16 8192^3 product."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = time_cuda(lambda: target.copy_(source), repeats).per_second(2 * source.numel() / 1e9)
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=DTYPE)
    return copied, time_cuda(lambda: a @ b, repeats).per_second(2 * 8192**3 / 1e12)


def _rate(run: Callable[[], object], amount: float, timer: Callable[[Callable[[], object], int], Timing]) -> float:
    from triton.runtime.errors import OutOfResources  # needs a driver only once a kernel was launched

    try:
        return timer(run, 5).per_second(amount)
    except OutOfResources:  # these tiles want more shared memory than there is
        return 0.0


def _best(found: dict[tuple[Tiles, int], float]) -> str:
    ranked: Iterator[tuple[Tiles, int]] = iter(sorted(found, key=lambda key: -found[key])[:3])
    return "\n".join(f"{tiles}{f' splits={s}' if s else ''}: {found[tiles, s]:.0f}" for tiles, s in ranked)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "", repeats=20)
    parser.add_argument("--tune", action="store_true", help="search tiles as well (minutes)")
    chosen = parser.parse_args()
    copied, multiplied = limits(chosen.repeats)
    rows = [
        ("device", torch.cuda.get_device_name()),
        ("tiles", f"decode {decode_tiles(HEAD_DIM, 2, 4, torch.device('cuda'))}"),
        ("", f"prefill {prefill_tiles(HEAD_DIM, 2, torch.device('cuda'))}"),
        ("device copy", f"{copied:.0f} GB/s"),
        ("product 8192^3", f"{multiplied:.0f} TFLOP/s"),
    ]
    figures: dict[str, object] = {"copy_gb_s": copied, "product_tflop_s": multiplied}
    for batch in BATCHES:
        rate, note = decode(batch, chosen.repeats, chosen.tune)
        figures[f"decode_b{batch}_gb_s"] = rate
        rows.append((f"paged_decode batch {batch}", f"{rate:.0f} GB/s, {rate / copied:.0%} of the copy"))
        rows += [("", note)] if note else []
    for chunk in CHUNKS:
        rate, peer, note = prefill(chunk, chosen.repeats, chosen.tune)
        figures[f"prefill_c{chunk}_tflop_s"], figures[f"sdpa_c{chunk}_tflop_s"] = rate, peer
        rows.append((f"paged_prefill chunk {chunk}", f"{rate:.0f} TFLOP/s; SDPA {peer:.0f}"))
        rows += [("", note)] if note else []
    report("attention kernels", rows, figures, as_json=chosen.json)


if __name__ == "__main__":
    main()

"""The kernels of MLA and DSA models beside the device's own limits, measured in the same run.

Shapes of `data/glm_dsa_8b.json`: index scores, top-k, sparse and dense attention over latents, experts, cache writes
and query kernels; and what the score step allocates at a context of 128k tokens. Each result is compared with the torch
reference on a part before it is timed. Decode-sized work runs in a CUDA graph over separate inputs, so that none is in
the L2 cache (but for the small kernels, whose inputs were just written in a real step as well).

`python -m benchmarks.kernels [--json] [--only NAME] [--small]`; --only takes the beginning of a case's name or
`memory`; --small runs tiny shapes, on a CPU too. Keys: `<case>_us`, `<case>_tflop_s` or `<case>_tb_s`,
`<case>_of_limit`, `<case>_beside_us`, `limit_copy_tb_s`, `limit_bf16_tflop_s`, `limit_fp8_tflop_s`,
`score_memory_q<queries>_bytes`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import arguments, report
from benchmarks.gpu_time import time_calls
from benchmarks.kernel_cases import attention, experts, index, writes
from benchmarks.kernel_cases.case import Case, Limit, Sizes, e4m3
from benchmarks.kernel_cases.memory import CONTEXT, QUERIES, score_memory
from benthic.attention.latent import LatentBackend

GROUPS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "index_scores topk_select": index.cases,
    "sparse_ dense_": attention.cases,
    "experts_": experts.cases,
    "latent_ index_write index_query query_ moe_route narrow_linear": writes.cases,
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A case's result, without its tensors."""

    name: str
    us: float
    rate: float
    unit: str  # TFLOP/s or TB/s
    of_limit: float
    limit: Limit
    aim: str
    beside: tuple[str, float] | None  # who, µs


def limits(device: torch.device, repeats: int, small: bool) -> dict[Limit, float]:
    """TB/s of a copy (read and written), TFLOP/s of a bf16 and of an fp8 product."""
    size = 256 if small else 8192
    source = torch.empty((1 << 20) if small else (2 << 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def rate(call: Callable[[], object], amount: float) -> float:
        return time_calls([call], repeats, graph=False, device=device).per_second(amount) / 1e12

    a, b = torch.randn(2, size, size, device=device, dtype=torch.float32 if small else torch.bfloat16)
    found: dict[Limit, float] = {
        "copy": rate(lambda: target.copy_(source), 2 * source.numel()),
        "bf16": rate(lambda: a @ b, 2 * size**3),
    }
    if device.type != "cuda":
        return {**found, "fp8": found["bf16"]}
    x, y = e4m3(a), e4m3(b.T.contiguous()).T
    one = torch.ones((), device=device)

    def scaled() -> torch.Tensor:
        return torch._scaled_mm(x, y, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return {**found, "fp8": rate(scaled, 2 * size**3)}


def figure(case: Case, limit: dict[Limit, float], repeats: int, device: torch.device) -> Figure:
    """Check, then time. Raises AssertionError for a wrong result."""
    case.check()
    timing = time_calls(case.calls, repeats, graph=case.graph, device=device)
    beside = None
    if case.beside is not None:
        who, calls = case.beside
        beside = who, time_calls(calls, repeats, graph=case.graph, device=device).median_s * 1e6
    rate = timing.per_second(case.flop or case.num_bytes) / 1e12
    unit = "TFLOP/s" if case.flop else "TB/s"
    return Figure(case.name, timing.median_s * 1e6, rate, unit, rate / limit[case.limit], case.limit, case.aim, beside)


def wanted_cases(sizes: Sizes, only: str) -> Iterator[Case]:
    """Cases whose names begin with `only`; groups that have none are not built."""
    for names, cases in GROUPS.items():
        if any(name.startswith(only) or only.startswith(name) for name in names.split()):
            for case in cases(sizes):
                if case.name.startswith(only):
                    yield case


def latent_backend(device: torch.device) -> type[LatentBackend]:
    """The backend whose score step is looked at."""
    if device.type == "cuda":
        from benthic.attention.latent_triton import TritonLatentBackend  # triton is optional

        return TritonLatentBackend
    from benthic.attention.latent_torch import TorchLatentBackend

    return TorchLatentBackend


def show(figures: list[Figure]) -> None:
    """A line a case."""
    table = Table(title="kernels", title_justify="left")
    for column in ("case", "time", "rate", "of the limit", "aim", "beside"):
        table.add_column(column, justify="left" if column in ("case", "aim") else "right")
    for f in figures:
        beside = "" if f.beside is None else f"{f.beside[0]} {f.beside[1]:,.1f} µs"
        of_limit = f"{f.of_limit:.0%} of {f.limit}"
        table.add_row(f.name, f"{f.us:,.1f} µs", f"{f.rate:,.3g} {f.unit}", of_limit, f.aim, beside)
    Console(width=150).print(table)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "", repeats=20)
    parser.add_argument("--only", default="", help="cases whose names begin so, or `memory`")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the benchmark out, on a CPU too")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = Sizes.small(device) if args.small else Sizes(device=device, dtype=torch.bfloat16)
    torch.manual_seed(0)
    limit = limits(device, args.repeats, args.small)
    values: dict[str, object] = {
        "limit_copy_tb_s": limit["copy"], "limit_bf16_tflop_s": limit["bf16"], "limit_fp8_tflop_s": limit["fp8"],
    }  # fmt: skip
    figures, wrong = [], []
    for case in wanted_cases(sizes, args.only):
        try:
            figures.append(figure(case, limit, args.repeats, device))
        except AssertionError as error:  # a wrong result gets no time; the others still do
            wrong.append(f"{case.name}: {error}")
            continue
        values |= _values(figures[-1])
    if figures:
        show(figures)
    rows = [
        ("device", torch.cuda.get_device_name() if device.type == "cuda" else "cpu"),
        ("limits", f"copy {limit['copy']:.2f} TB/s, bf16 {limit['bf16']:.0f}, fp8 {limit['fp8']:.0f} TFLOP/s"),
    ]
    if args.only in ("", "memory"):
        context, counts = (512, (32, 64)) if args.small else (CONTEXT, QUERIES)
        for count, num_bytes in score_memory(latent_backend(device), sizes, context, counts):
            label, whole = f"score step, {count} x {context}", f"all scores at once: {count * context / 2**18:,.1f} MiB"
            if device.type == "cuda":
                values[f"score_memory_q{count}_bytes"] = num_bytes
                rows.append((label, f"{num_bytes / 2**20:,.0f} MiB  ({whole})"))
            else:
                rows.append((label, f"right; its memory is only told on a GPU  ({whole})"))
    report("limits and memory", rows, values, as_json=args.json)
    if wrong:
        raise SystemExit("wrong results:\n" + "\n".join(wrong))


def _values(found: Figure) -> dict[str, object]:
    unit = "tflop_s" if found.unit == "TFLOP/s" else "tb_s"
    rated: dict[str, object] = {
        f"{found.name}_us": found.us,
        f"{found.name}_{unit}": found.rate,
        f"{found.name}_of_limit": found.of_limit,
    }
    return rated if found.beside is None else {**rated, f"{found.name}_beside_us": found.beside[1]}


if __name__ == "__main__":
    main()

"""From a start order to an engine that has warmed up. The only place that knows all the parts."""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from benthic.attention.choice import Pair, Spec, choose_pair, make_pair
from benthic.attention.interface import AttentionSpec
from benthic.attention.payload import Payload
from benthic.common.errors import ConfigError
from benthic.common.layout import ceil_div
from benthic.common.units import format_size
from benthic.config import EngineConfig
from benthic.engine.core import EngineCore
from benthic.engine.derive import GPU_CHUNK_TOKENS, Machine, Sizes, derive
from benthic.engine.plan import SchedulerLimits
from benthic.engine.tier_workers import TierWorkers
from benthic.engine.tiers import LowerTiers, core_config, open_tiers, start_workers
from benthic.kvcache import CacheCore
from benthic.messages import Derived, Ready
from benthic.models.dtype import choose_dtype
from benthic.models.kv_layout import KVFormats, attention_spec, choose_kv_formats, kv_payloads
from benthic.models.rank_shape import local_shape
from benthic.models.registry import Checkpoint, Namespace, load_model, model_namespace, open_checkpoint
from benthic.parallel.launch import ALONE, Ranks, compare, versions
from benthic.parallel.layout import ParallelLayout
from benthic.runner.interface import RunnerInfo
from benthic.runner.model_runner import ModelRunner
from benthic.tiers.device.pool import allocate_pools, available_memory, bytes_per_page, demand_room
from benthic.tiers.disk.io import DiskIO
from benthic.tiers.host.layout import FrameLayout, PayloadLayout
from benthic.weights.locate import Source
from benthic.weights.model_config import LlamaConfig, ModelShape

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # what, done, total

WORK_COPIES = 3  # of a layer's context pages at once: gathered, in the work pool's order, and in the work pool


def build_engine(
    config: EngineConfig,
    source: Source,
    progress: Progress = lambda what, done, total: None,
    disk_io: DiskIO | None = None,
    ranks: Ranks = ALONE,
) -> tuple[EngineCore, Ready]:
    """Load the model, size the tiers, warm up. Raises BenthicError where the model or the machine does not allow it.

    `disk_io` stands in for the system's (faults in tests). With several `ranks` each calls this at the same time.
    """
    return assemble(config, open_checkpoint(source), progress, disk_io, ranks)


def assemble(
    config: EngineConfig,
    checkpoint: Checkpoint,
    progress: Progress,
    disk_io: DiskIO | None = None,
    ranks: Ranks = ALONE,
) -> tuple[EngineCore, Ready]:
    """`build_engine` for a checkpoint that is open already (random weights, for example)."""
    place = ranks.layout
    device, device_reason = pick_device(config.model.device, place)
    if device.type == "cpu":
        _prepare_cpu(place)
    else:
        torch.cuda.set_device(device)  # this thread's, too: kernels, and the registration of L2, go to the current one
    dtype, dtype_reason = choose_dtype(config.model.dtype, device)
    shape, page_size = local_shape(checkpoint.config, place), config.cache.page_size
    formats, formats_reason = choose_kv_formats(config.model.kv_dtype, shape, dtype, device)
    kv = _KV(device, formats, kv_payloads(shape, page_size, formats))
    namespace = model_namespace(checkpoint, formats, page_size, place)
    compare(ranks, _facts(config, namespace, device))
    # Sizes are settled twice: before the weights load, so that what can't fit is refused at once, and with what they
    # leave.
    machine = _machine(config, kv, shape, ranks)
    sizes = derive(config, machine)
    demand_room(sizes.l1_pages, kv.page_bytes, device, machine.available_bytes)
    names = config.runner.attention_backend
    backend = choose_pair(names.prefill, names.decode, kv.attention_spec(shape, page_size, sizes))
    layout = FrameLayout(tuple(PayloadLayout(p.name, p.layers, p.slice_bytes) for p in kv.payloads))
    tiers = open_tiers(config.cache, layout, namespace, device, progress, disk_io=disk_io, ranks=ranks)
    try:
        runner, pools, sizes = _load(config, checkpoint, kv, backend, namespace.digest, progress, ranks)
        workers = start_workers(tiers, config.cache, pools, place)
    except BaseException:
        tiers.close()  # a caller that goes on, with less L1 say, must find memory and files free
        raise
    head = (
        Derived("--device", str(device), device_reason),
        *_rank_rows(ranks),
        Derived("--dtype", str(dtype).removeprefix("torch."), dtype_reason),
        Derived("--kv-dtype", formats.words(shape).replace(",", ", "), formats_reason),
        *_runner_rows(config, runner, backend.name, device, place),
        Derived("page", f"{page_size} tokens = {format_size(kv.page_bytes)}", "--page-size"),
    )
    return _engine(config, sizes, tiers, runner, workers, ranks), _ready(runner.info, config, sizes, head, tiers.rows)


def _prepare_cpu(place: ParallelLayout) -> None:
    # oneDNN keeps half a megabyte for each shape of a product, 1,024 of them by default: batches of ever new sizes
    # would let the process grow for days. Steps come in some twenty sizes of six products (`runner.execution`).
    # Read at the first product, so it is not too late here.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    if place.local_size > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_size))


def _facts(config: EngineConfig, namespace: Namespace, device: torch.device) -> dict[str, str]:
    """What all ranks must have alike: programs, weights, and every setting that a decision depends on."""
    words = {name: text for name, text in namespace.words.items() if name != "tensor_parallel"}
    settings = {
        name: json.dumps(asdict(getattr(config, name)), default=str, sort_keys=True)
        for name in ("cache", "scheduler", "parallel")
    }
    sizes = {"device": device.type, "--max-context": str(config.model.max_context or "the model's own")}
    return versions() | words | settings | sizes


@dataclass(frozen=True, slots=True)
class _KV:
    """What is kept of each token, and where."""

    device: torch.device
    formats: KVFormats
    payloads: tuple[Payload, ...]

    @property
    def page_bytes(self) -> int:
        return bytes_per_page(self.payloads)

    def attention_spec(self, shape: ModelShape, page_size: int, sizes: Sizes) -> Spec:
        return attention_spec(
            shape,
            page_size=page_size,
            formats=self.formats,
            device=self.device,
            max_seq_len=sizes.max_request_tokens,
        )


def _load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    kv: _KV,
    backend: Pair,
    namespace: bytes,
    progress: Progress,
    ranks: Ranks,
) -> tuple[ModelRunner, dict[str, torch.Tensor], Sizes]:
    """Weights, the L1 pools and a runner that has warmed up."""
    place, device, page_size = ranks.layout, kv.device, config.cache.page_size
    shape = local_shape(checkpoint.config, place)

    def weights_progress(done: int, total: int) -> None:
        progress("weights", done, total)

    model = load_model(checkpoint, device, kv.formats.dtype, weights_progress, place, ranks.group)
    sizes = derive(config, _machine(config, kv, shape, ranks))
    pools = allocate_pools(kv.payloads, sizes.l1_pages, device)
    spec = kv.attention_spec(shape, page_size, sizes)
    info = RunnerInfo(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        max_position=shape.max_position,
        eos_token_ids=shape.eos_token_ids,
        namespace=namespace,
    )
    runner = ModelRunner(
        model=model,
        attention=make_pair(backend, spec, pools, ranks.group if place.cp_size > 1 else None),
        num_pages=sizes.l1_pages,
        config=config.runner,
        max_running=sizes.max_running,
        max_seq_len=sizes.max_request_tokens,
        page_size=page_size,
        chunk_tokens=sizes.chunk_tokens,
        device=device,
        info=info,
        warm_contexts=() if isinstance(spec, AttentionSpec) or spec.index is None else (spec.index.topk,),
        layout=place,
        group=ranks.group,
    )
    runner.warmup(progress)
    return runner, pools, sizes


def _engine(
    config: EngineConfig, sizes: Sizes, tiers: LowerTiers, runner: ModelRunner, workers: TierWorkers, ranks: Ranks
) -> EngineCore:
    limits = SchedulerLimits(
        page_size=config.cache.page_size,
        max_running=sizes.max_running,
        max_request_tokens=sizes.max_request_tokens,
        chunk_tokens=sizes.chunk_tokens,
        l1_free_pages=sizes.l1_free_pages,
        queue_timeout_us=int(config.scheduler.queue_timeout_s * 1e6),
        step_context_tokens=sizes.max_request_tokens if ranks.layout.cp_size > 1 else 0,
    )
    if config.cache.placement_assert:
        logger.warning("BENTHIC_PLACEMENT_ASSERT: comparing the ranks' states costs two collectives a tick")
    core = CacheCore(core_config(config.cache, limits, tiers, sizes.l1_pages, ranks.layout.cp_size))
    engine = EngineCore(
        limits,
        core,
        runner,
        workers=workers,
        control=ranks.control,
        placement_assert=config.cache.placement_assert,
    )
    if core.config.disk:  # the same on all ranks, whose steps go together
        engine.note_prefill(*runner.time_chunk())
    return engine


def _rank_rows(ranks: Ranks) -> tuple[Derived, ...]:
    place = ranks.layout
    if place.world_size == 1:
        return ()
    name, size = ("--cp", place.cp_size) if place.cp_size > 1 else ("--tp", place.tp_size)
    how = "experts spread" if place.expert_parallel else "experts whole on each, where there are any"
    return (Derived(name, f"{size} ranks", how),)


def _runner_rows(
    config: EngineConfig, runner: ModelRunner, backend: str, device: torch.device, place: ParallelLayout
) -> tuple[Derived, Derived, Derived]:
    wish = config.runner.attention_backend
    given = " and ".join(use for use, name in (("prefill", wish.prefill), ("decode", wish.decode)) if name)
    return (
        Derived("--attention-backend", backend, f"given for {given}" if given else f"best for {device.type}"),
        Derived(
            "decode graphs",
            _sizes_text(runner.graph_sizes),
            _graph_reason(device, place),
        ),
        Derived("--seed", str(config.model.seed), "of requests that bring none"),
    )


def _graph_reason(device: torch.device, place: ParallelLayout) -> str:
    if place.world_size > 1:
        return "exchanges between ranks are not captured"
    return "captured" if device.type == "cuda" else "replayed eagerly on static buffers"


def _ready(
    info: RunnerInfo, config: EngineConfig, sizes: Sizes, head: tuple[Derived, ...], tiers: tuple[Derived, ...]
) -> Ready:
    return Ready(
        namespace=info.namespace,
        page_size=config.cache.page_size,
        max_request_tokens=sizes.max_request_tokens,
        limit_reason=sizes.limit_reason,
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        max_running=sizes.max_running,
        table=head + sizes.table + tiers,
    )


def _machine(config: EngineConfig, kv: _KV, shape: ModelShape, ranks: Ranks) -> Machine:
    """What the rank that has least can give; all call it together."""
    place = ranks.layout
    ranks.barrier()  # all have loaded what they load
    available = available_memory(kv.device)
    if kv.device.type == "cpu":
        available //= place.local_size
    else:
        available //= ceil_div(place.local_size, torch.cuda.device_count())  # ranks that share the device
    available -= unpacked_bytes(config, kv.formats, shape, kv.device)
    if place.cp_size > 1:
        available -= _work_bytes(config, kv, shape.max_position)
    return Machine(
        on_gpu=kv.device.type == "cuda",
        available_bytes=ranks.least(max(0, available)),
        bytes_per_page=kv.page_bytes,
        model_max_position=shape.max_position,
        num_lanes=place.cp_size,
    )


def _work_bytes(config: EngineConfig, kv: _KV, max_position: int) -> int:
    """What context parallelism takes beside L1: a layer's pages of the contexts that a step's prefill may stand on, as
    they come from the ranks, put in order, and in the work pool."""
    tokens = (config.model.max_context or max_position) + (config.scheduler.chunk_tokens or GPU_CHUNK_TOKENS)
    pages = ceil_div(tokens, config.cache.page_size)
    return WORK_COPIES * pages * sum(payload.slice_bytes for payload in kv.payloads)


def unpacked_bytes(config: EngineConfig, formats: KVFormats, shape: ModelShape, device: torch.device) -> int:
    """What prefill over fp8 latents takes beside L1 on a GPU: those of one layer and context, as numbers."""
    if isinstance(shape, LlamaConfig) or not formats.target_fp8 or device.type != "cuda":
        return 0
    size = config.cache.page_size
    tokens = ceil_div(config.model.max_context or shape.max_position, size) * size
    return tokens * (shape.kv_lora_rank + shape.qk_rope_head_dim) * formats.dtype.itemsize


def pick_device(wanted: str, place: ParallelLayout) -> tuple[torch.device, str]:
    """The device of this rank and the reason in words. Raises ConfigError."""
    if wanted == "cpu":
        return torch.device("cpu"), "given"
    if torch.cuda.is_available():
        index = place.local_rank % torch.cuda.device_count()
        name = torch.cuda.get_device_name(index)
        return torch.device("cuda", index), name if wanted == "auto" else f"given; {name}"
    if wanted == "cuda":
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} sees no GPU; `benthic doctor` says more, --device cpu works here"
        )
    return torch.device("cpu"), "no GPU found"


def _sizes_text(sizes: tuple[int, ...]) -> str:
    if len(sizes) <= 8:
        return ", ".join(map(str, sizes)) or "none"
    return f"{len(sizes)} batch sizes from {sizes[0]} to {sizes[-1]}"

"""From options to an engine that is ready for its first request: load, size, warm up.

Knows: which part needs what, and in which order. Does not know: argv, the environment, other ranks' addresses.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from models.config import DTYPES, ModelConfig, for_length
from models.expert_load import clear_load, start_counting
from models.fp8_load import quantised_at_load
from models.kernels.interface import NO_SWITCHES, FlashInferSwitches
from models.layers.decoder import Decoder
from models.ops.select import fp8_path, select_kernels
from models.registry import config_from_folder
from models.row_buckets import token_ladder
from models.weights import Progress, load_model
from parallel.comm.collectives import Collectives
from parallel.comm.symmetric_exchange import TokenExchange
from parallel.control.interface import ControlPlane
from parallel.layers.experts import ExpertSplit
from runtime.chain_depth import DEEPEST, agree_depth_and_horizon
from runtime.config import EngineConfig
from runtime.engine import Engine, ServedModel
from runtime.execute.cache.pool import give_back
from runtime.execute.cache.sizing import require_share
from runtime.execute.device.cpu_twin import open_device
from runtime.execute.device.protocol import Device
from runtime.execute.executor import Executor
from runtime.execute.launch_spec import exchange_buckets
from runtime.execute.result_reader import StepTiming
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.step.memory import ExecutorConfig
from runtime.frontend.tokenizer import tokenizer_json
from runtime.gc_freeze import freeze_heap
from runtime.grammar import Grammars
from runtime.grammar_check import GrammarChecker
from runtime.grammar_tables.maker import TableMaker
from runtime.groups.expert_placement import expert_split, load_report
from runtime.groups.load_balancer import LoadBalancer
from runtime.groups.request_router import RequestRouter
from runtime.groups.step_sync import DpStepSync
from runtime.model_checks import check_fp8, check_model, check_prefill, check_windows, kv_dtype, served_model
from runtime.observe.observer import Ranges, StepObserver, around, open_ranges
from runtime.observe.timeline import Timeline
from runtime.plan_late import PlanLate
from runtime.schedule.config import SchedulerConfig, SnapshotPolicy, StepLimits
from runtime.schedule.scheduler import Scheduler
from runtime.speculate.methods import proposer_for
from runtime.step_budget import mixed_steps
from runtime.watchdog.watchdog import Watchdog
from runtime.window_costs import speculation

log = logging.getLogger(__name__)

CAPTURE_SECONDS = 300.0  # patience with a variant that is captured late: its kernels may have to be compiled
WARM_VARIANTS = {
    "greedy": SamplingVariant(),
    "random": SamplingVariant(random=True),
    "filtered": SamplingVariant(random=True, filters=True),
    "penalised": SamplingVariant(random=True, filters=True, penalties=True),
    "constrained": SamplingVariant(random=True, filters=True, edits=True, grammars=True),
}


def build_engine(
    config: EngineConfig,
    *,
    control: ControlPlane,
    collectives: Collectives,
    agree_min: Callable[[int], int],
    device: str,
    exchange: TokenExchange | None = None,
    share: Callable[[Callable[[], str]], str] | None = None,
    kernel_cache: Path | None = None,
    local_rank: int = 0,
    local_world: int = 1,
    flashinfer: FlashInferSwitches = NO_SWITCHES,
    progress: Progress | None = None,
    compiling: Progress | None = None,
    on_timing: Callable[[StepTiming], None] | None = None,
    watchdog: Watchdog | None = None,
) -> Engine:
    """Load this rank's share of the model, size its memory, capture its graphs.

    ``collectives``: of this rank's tensor-parallel group. ``exchange``: with the other groups, where
    ``config.data_parallel`` is more than 1. ``agree_min`` gives the least of a number over all ranks, ``share(make)``
    what ``make()`` returned on rank 0: with it, kernels are chosen by measurement, and ``kernel_cache`` remembers them.
    ``local_rank`` of ``local_world``: the ranks of a node share what there is to compile.
    ``flashinfer``: what FlashInfer's environment variables say. ``progress``: of tensors that are loaded;
    ``compiling``: of kernels, each time from 0.
    ``device`` is ``cpu`` or ``cuda:N``. ``on_timing`` gets each step's device times, from the landing worker. Raises
    ConfigError, models.config.ModelConfigError, models.weights.WeightsError or sizing.CacheMemoryError, each saying
    what to change.
    """
    model_config = quantised_at_load(config_from_folder(Path(config.model)), config.quantization)
    served = served_model(config, model_config)
    model_config = for_length(model_config, served.max_model_len)
    limits = config.step_limits(served.max_model_len, DEEPEST)
    split = expert_split(config, model_config, agree_min, exchange)
    ranges = open_ranges(config.nvtx)
    observe = _observer(config, control, ranges, on_timing)
    gc.collect()  # only reference cycles may still hold a closed engine of this process, and its memory
    opened = open_device(device)
    opened.release_unused()
    try:
        model = _load(config, model_config, limits, opened, collectives, flashinfer, split, progress)
        if model.cache_layout.has_slot_state:
            limits = config.with_few_slots(limits)
        check_model(config, model, limits)
        sizes = _executor_config(config, limits, agree_min, share, kernel_cache, exchange, collectives.size)
        sizes = replace(sizes, local_rank=local_rank, local_world=local_world)
        grammars = _grammars(config, served, leads=control.rank == 0)
        executor = _executor(config, sizes, opened, model, observe, ranges, compiling, grammars)
    except BaseException:
        opened.close()
        raise
    try:
        return _engine(config, served, limits, executor, model, split, control, observe, exchange, share, watchdog)
    except BaseException:
        if watchdog is None:  # else this process ends, and the other ranks learn of it before anything is waited for
            executor.close()
        raise


def _observer(
    config: EngineConfig, control: ControlPlane, ranges: Ranges | None, on_timing: Callable[[StepTiming], None] | None
) -> StepObserver:
    timeline = None
    if config.timeline is not None:
        offset_ns = control.clock_offset_ns
        timeline = Timeline(Path(config.timeline), control.rank, control.world, clock_offset_ns=offset_ns)
    return StepObserver(ranges=ranges, timeline=timeline, on_timing=on_timing)


def _load(
    config: EngineConfig,
    model_config: ModelConfig,
    limits: StepLimits,
    opened: Device,
    collectives: Collectives,
    flashinfer: FlashInferSwitches,
    split: ExpertSplit,
    progress: Progress | None,
) -> Decoder:
    """Choose the ops and load this rank's weights."""
    began, dtype = time.perf_counter(), _dtype(config, model_config)
    if config.num_blocks is None:
        require_share(opened.memory_info(), config.memory_fraction)
    fp8_cache = config.kv_cache_dtype.startswith("fp8")
    check_prefill(config, model_config)
    kernels = select_kernels(
        opened.torch_device,
        dtype,
        model_config.head_dim,
        "triton" if fp8_cache or model_config.attention else config.prefill_attention,  # FlashInfer's takes neither
        flashinfer,
        deterministic=config.deterministic,
        depth=limits.depth,
        fp8_activations=_fp8_activations(config),
    )
    traits = getattr(kernels, "traits", None)
    of_cache = kv_dtype(config, dtype, traits)
    check_windows(limits, model_config, collectives.size, kernels, of_cache)
    check_fp8(config, traits)
    model = load_model(
        model_config,
        config.model,
        load_format=config.load_format,
        dtype=dtype,
        kv_dtype=of_cache,
        device=opened.torch_device,
        collectives=collectives,
        kernels=kernels,
        experts=split,
        seed=config.seed,
        progress=progress,
    )
    if config.expert_load is not None:
        start_counting(model)
    stored = ""
    if model_config.quantization is not None:
        stored = f", {model_config.quantization.text}"
        if model_config.quantization.fp8:
            stored += f", activations {fp8_path(kernels)} (--fp8-activations)"
    log.info("weights: %s, %s%s, in %.1f s", model_config.architecture, dtype, stored, time.perf_counter() - began)
    return model


def _grammars(config: EngineConfig, served: ServedModel, *, leads: bool) -> Grammars:
    of = partial(tokenizer_json, config.model), served.vocab_size, served.eos_token_ids
    grammars = Grammars(*of)
    if not Path(config.model, "tokenizer.json").is_file():
        grammars.places = 0
    elif leads:
        grammars.maker, grammars.checker = TableMaker(*of), (checker := GrammarChecker(*of))
        if config.device == "cuda":
            checker.start()
    if config.device == "cuda":
        grammars.warm()  # in a thread; else the first request with a grammar would wait for it
    return grammars


def _executor(
    config: EngineConfig,
    sizes: ExecutorConfig,
    opened: Device,
    model: Decoder,
    observe: StepObserver,
    ranges: Ranges | None,
    compiling: Progress | None,
    grammars: Grammars,
) -> Executor:
    """Load the drafter, size the memory, capture the graphs."""
    began, proposer = time.perf_counter(), None
    if config.speculation is not None:
        folder = Path(config.model)
        proposer = proposer_for(
            config.speculation, target_folder=folder, load_format=config.load_format, seed=config.seed
        )
    executor = Executor(
        opened,
        model,
        sizes,
        proposer=proposer,
        compiling=compiling,
        grammars=grammars,
        on_timing=observe.on_timing if observe.timed else None,
        stage_range=around(ranges, "stage"),
        land_range=partial(around, ranges),
        part_range=partial(around, ranges),
    )
    log.info(
        "ready: kernels, memory and %d graphs in %.1f s (kernels are compiled once and kept on disk)",
        executor.device.captures,
        time.perf_counter() - began,
    )
    return executor


def _engine(
    config: EngineConfig,
    served: ServedModel,
    limits: StepLimits,
    executor: Executor,
    model: Decoder,
    split: ExpertSplit,
    control: ControlPlane,
    observe: StepObserver,
    exchange: TokenExchange | None,
    share: Callable[[Callable[[], str]], str] | None,
    watchdog: Watchdog | None,
) -> Engine:
    """Time the steps, and set what depends on it: mixed steps, speculation, chain depth, horizon."""
    served = replace(served, widest=executor.widest)
    mixed = mixed_steps(config, model, executor, share)
    schedule = _schedule(config, limits, executor)
    plain = replace(schedule, widths=(1,))  # what is timed for the chain: a window only leaves the host more time
    depth, horizon = agree_depth_and_horizon(config, executor, plain, control.agree_horizon, share)
    # Together: without speculation, draft windows would have to fit in mixed steps with all their tokens.
    schedule = replace(schedule, mixed=mixed, speculation=speculation(config, executor, schedule, share))
    clear_load(model)  # both have timed steps
    executor.count_from_here()
    config = replace(config, chain_depth=depth, horizon=horizon)
    scheduler = Scheduler(replace(schedule, limits=replace(limits, depth=depth), horizon=horizon))
    if watchdog is not None:
        watchdog.attend(scheduler.digest, observe.recent)
        executor.surround_captures(lambda: watchdog.phase("capture", CAPTURE_SECONDS))
    at_end, release = load_report(config, model, split), partial(_release, executor, model)
    groups, router = _groups(config, control, exchange)
    thaw = freeze_heap()  # last: the model, its graphs and every package that they need are there
    late = PlanLate(depth) if config.plan_late and control.rank == 0 else None
    return Engine(
        config, served, scheduler, executor, control, observe, watchdog, at_end, groups, router, thaw, late, release
    )


def _release(executor: Executor, model: Decoder) -> None:
    """What is done when the device is at rest. A closed engine that a program still refers to holds no memory: another
    engine may want it.
    """
    executor.pool.release()
    give_back(model.parameters())


def _fp8_activations(config: EngineConfig) -> str:
    """Plain decoding steps and verification steps of a request must compute alike, however many rows they have."""
    speculates = config.speculation is not None
    return "always" if config.fp8_activations == "auto" and speculates else config.fp8_activations


def _dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    """ "auto" is the checkpoint's dtype on a GPU, and float32 on a CPU, where it is both exact and faster."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return torch.float32 if config.device == "cpu" else model.dtype


def _executor_config(
    config: EngineConfig,
    limits: StepLimits,
    agree_min: Callable[[int], int],
    share: Callable[[Callable[[], str]], str] | None,
    kernel_cache: Path | None,
    exchange: TokenExchange | None,
    ranks: int,
) -> ExecutorConfig:
    steps = config.decode_buckets, limits.max_prefill_tokens, _tokens_beside(config, limits), limits.window
    return ExecutorConfig(
        limits=limits,
        decode_buckets=config.decode_buckets,
        memory_fraction=config.memory_fraction,
        num_blocks=config.num_blocks,
        agree_min=agree_min,
        share=share,
        kernel_cache=kernel_cache,
        warm_variants=warm_variants(config.warm, ranks),
        exchanges=() if exchange is None else exchange_buckets(*steps),
        prefill_buckets=_prefill_buckets(config),
        mixed=_mixes(config, limits),
        mixed_windows=_windows_beside(config),
        windows=config.speculation is not None and config.speculation.disable_by_batch_size != 0,
        narrower=config.narrower,
        snapshots=config.num_snapshots if config.prefix_caching else 0,
        slower={} if exchange is None or exchange.slower is None else {"nccl_exchange": exchange.slower},
    )


def warm_variants(kinds: Sequence[str], ranks: int) -> tuple[SamplingVariant, ...]:
    """What is captured for ``kinds``. Edits are made in two forms: see ``biases``; and ranks that share a row's
    vocabulary filter it in two: see ``unbounded``."""
    named = [WARM_VARIANTS[kind] for kind in kinds]
    bounded = (form for variant in named for form in (variant, replace(variant, biases=variant.edits)))
    both = (form for variant in bounded for form in (variant, replace(variant, unbounded=variant.filters)))
    return tuple(dict.fromkeys(form.on_ranks(ranks) for form in both))


def _prefill_buckets(config: EngineConfig) -> tuple[int, ...]:
    """Captured on GPUs; a CPU would compute the padding and gain nothing."""
    return token_ladder(config.max_prefill_tokens) if config.device == "cuda" and config.prefill_graphs else ()


def _mixes(config: EngineConfig, limits: StepLimits) -> bool:
    """Where all rows of a full batch, a token each, would fill a step, none is left for a prompt."""
    return config.mixed_steps and limits.max_prefill_tokens > limits.rows


def _tokens_beside(config: EngineConfig, limits: StepLimits) -> int:
    """Tokens of decode requests in a mixed step with the most prompt tokens. Captured steps hold them in any case."""
    if not _mixes(config, limits):
        return 0
    wide = _windows_beside(config) and not _prefill_buckets(config)
    return limits.rows * (limits.window if wide else 1)


def _windows_beside(config: EngineConfig) -> bool:
    """Whether decode requests of mixed steps may have draft windows; the executor says if this model's can. Groups
    launch captured mixed steps together, so a group without prefill has its windows in one of them."""
    wanted = config.speculation
    if wanted is None or wanted.disable_by_batch_size == 0:
        return False
    return wanted.mixed_step_percent > 0 or config.data_parallel > 1


def _groups(
    config: EngineConfig, control: ControlPlane, exchange: TokenExchange | None
) -> tuple[DpStepSync | None, RequestRouter | None]:
    """What several groups need to step together and to share out requests; nothing where there is one."""
    if exchange is None:
        return None, None
    assignment = LoadBalancer(exchange.index, exchange.groups, prefix_caching=config.prefix_caching)
    return DpStepSync(control, assignment), RequestRouter(control, assignment)


def _schedule(config: EngineConfig, limits: StepLimits, executor: Executor) -> SchedulerConfig:
    """But for what is measured of steps: mixed ones, and speculation."""
    if config.prefix_caching and not executor.restores_prefixes:
        log.info("prefix caching is off: the model keeps state of fixed size, and there is no room for snapshots of it")
    return SchedulerConfig(
        limits=limits,
        blocks=executor.sizing.num_blocks,
        prefill_burst=config.prefill_burst,
        prefix_caching=config.prefix_caching and executor.restores_prefixes,
        max_waiting=config.max_waiting,
        max_sessions=config.max_sessions,
        session_policy=config.session_policy,
        snapshots=_snapshot_policy(config, executor.snapshots),
        windows=executor.sizing.windows,
    )


def _snapshot_policy(config: EngineConfig, count: int) -> SnapshotPolicy | None:
    if not count:
        return None
    usual = max(1, config.max_prefill_tokens // config.block_size)
    return SnapshotPolicy(count, usual if config.snapshot_interval is None else config.snapshot_interval)

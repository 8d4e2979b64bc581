"""The executor: launches steps on this rank's device and returns their results.

Knows: the path of a step (stage, apply, run, copy home), which kinds of steps exist, and how memory is sized and warmed
up. Does not know: what a step computes (step/), why a plan is what it is (runtime/schedule), requests' text.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch

from models.layers.decoder import Decoder
from parallel.comm.quantised import SEPARATE
from runtime.execute.cache.pool import CachePool
from runtime.execute.cache.sizing import CacheShape, CacheSizing, WindowDemand, size_cache, snapshots_that_fit
from runtime.execute.device.protocol import Device, Work
from runtime.execute.fallbacks import Fallbacks
from runtime.execute.launch_spec import GREEDY, BucketSizes, LaunchNeeds, LaunchResolver, LaunchSpec
from runtime.execute.proposer import MakeProposer, ProposerParts
from runtime.execute.result_reader import ResultCounters, ResultReader, StepTiming
from runtime.execute.result_ring import ResultRing
from runtime.execute.sampling.inputs import EVERY_FEATURE, NARROWER_FEATURES, SamplingVariant
from runtime.execute.sampling.kernels import kernels_for
from runtime.execute.sampling.logprobs import PromptLogprobRing
from runtime.execute.slot_state import SlotTables
from runtime.execute.staging import Staging, StagingCounters
from runtime.execute.step import step_io_kernels as step_kernels
from runtime.execute.step.drafts import DraftTokens
from runtime.execute.step.graphs import RowGraphs
from runtime.execute.step.memory import ExecutorConfig, MakeRole, Role, StepParts, Trial
from runtime.execute.step.packed_step import PackedStep
from runtime.execute.step.row_step import RowStep
from runtime.grammar import Grammars
from runtime.schedule.plan import PADDING_SLOT, StepKind, StepPlan, StepResult

log = logging.getLogger(__name__)

LATE_TABLES_SHARE = 0.02  # of device memory: larger tables of a slot feature wait for the first request with it
_ALL_COSTS_UP_TO = 1024  # tokens: beyond, a step's time is proportional to them
_COST_RUNS = 2
_READ_BYTES = 1 << 30  # of KV, to measure a rate; a multiple of 8
CPU_KV_BYTES = 896 << 20  # of the 1 GiB that the twin counts; a CPU shares its memory with everything else


def _with_draft_tokens(config: ExecutorConfig, model: Decoder, widths: Sequence[int]) -> ExecutorConfig:
    """``config``, whose mixed steps take draft windows only if this model's can; ``widths``: of those, none without a
    drafter."""
    limits = config.limits
    # Kernels of recurrent layers take a step's rows as trees, or as chunks, not both (StateRows.tree).
    drafts = bool(widths) and config.mixed_windows and config.mixed
    drafts = drafts and not (limits.tree and model.cache_layout.has_slot_state)
    config = replace(config, mixed_windows=drafts)
    if widths and not drafts and config.windows and config.exchanges and config.prefill_buckets:
        # All groups replay packed steps together, and here a group with draft windows could not.
        slower = {**config.slower, "eager_prefill_groups": "no captured prefill has room for windows beside it"}
        config = replace(config, prefill_buckets=(), slower=slower)
    return config


class Executor:
    """One rank's device side. ``launch`` never blocks; ``take`` blocks until that step's result is on the host.

    ``further_roles`` are asked first whether they run a plan. With a ``proposer``, decode steps may have the limits'
    width and the config's narrower ones, and the tables keep the tokens of every slot. ``compiling`` is called with the
    number of kernels that are compiled and of those that will be, several times from 0. ``grammars``: None: requests
    with one end with an error.
    """

    def __init__(
        self,
        device: Device,
        model: Decoder,
        config: ExecutorConfig,
        *,
        further_roles: Sequence[MakeRole] = (),
        proposer: MakeProposer | None = None,
        compiling: Callable[[int, int], None] | None = None,
        grammars: Grammars | None = None,
        on_timing: Callable[[StepTiming], None] | None = None,
        stage_range: AbstractContextManager[object] | None = None,
        land_range: Callable[[str], AbstractContextManager[object]] = nullcontext,
        part_range: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.device = device
        self._part_range = part_range
        self._stage_range = stage_range or nullcontext()
        self._model, limits = model, config.limits
        self._make_proposer = proposer
        self.grammars = grammars
        self._compiling = compiling
        self._further_roles = further_roles
        self._widths = widths = () if proposer is None else (limits.width, *config.narrower)
        self._config = config = _with_draft_tokens(config, model, widths)
        self.fallbacks = Fallbacks()
        self._allocate()
        roles = self._make_roles(self.pool)
        self._roles = {role.name: role for role in roles}
        self._packed = [role for role in roles if isinstance(role, PackedStep)]
        self._rows = {role.tokens: role for role in roles if isinstance(role, RowStep)}  # by tokens of a row
        self.decode, self.prefill = self._rows[1], self._packed[-1]
        self._warm_up(roles)
        self.pool.warm_up_copies()
        sizes = BucketSizes(config.decode_buckets, self.prefill.buckets, self.prefill.split_buckets, config.exchanges)
        self._resolver = LaunchResolver(
            sizes, limits.slots + 1, roles, model.collectives.size, config.warm_variants, self._drafts
        )
        self.prompt_scores = PromptLogprobRing(device, entries=self._ring.entries, max_tokens=limits.max_prefill_tokens)
        self.results = ResultReader(
            device, self._ring, on_timing=on_timing, prompt_scores=self.prompt_scores, land_range=land_range
        )
        self.widest = self._widest_variant()
        self._count_standing_fallbacks()
        self.count_from_here()

    def _allocate(self) -> None:
        """Tables, staging, the result ring and, from what memory is left, the caches."""
        device, config, limits = self.device, self._config, self._config.limits
        max_rows = max(limits.rows, config.decode_buckets[-1])
        self.tables = SlotTables(
            device,
            max_requests=limits.slots,
            max_blocks=limits.max_blocks,
            vocab_size=self._model.config.vocab_size,
            late_bytes=int(device.memory_info().total * LATE_TABLES_SHARE),
            history=0 if self._make_proposer is None else limits.max_model_len + limits.width,
            grammars=self.grammars,
            groups=1 + len(self._model.cache_layout.windows),
        )
        decode_tokens = (max_rows * limits.window if config.mixed_windows else max_rows) if config.mixed else 0
        # A captured step computes all tokens of its bucket, also where no plan has as many.
        most_tokens = max((limits.max_prefill_tokens + decode_tokens, *config.prefill_buckets))
        entries = limits.depth + 3  # of every ring: each step in flight, the one being made, and a free one after it
        self.staging = Staging(device, self.tables, max_prefill_tokens=most_tokens, max_rows=max_rows, entries=entries)
        self._ring = ResultRing(
            device,
            entries=entries,
            rows=max_rows,
            width=limits.width,
            reported=EVERY_FEATURE.reported,
            direct=step_kernels.kernels_for(self.tables.columns.records) is not None,
        )
        self.sizing = self._size()
        self.pool = CachePool(
            device,
            block_size=limits.block_size,
            blocks=self.sizing.num_blocks,
            slots=limits.slots,
            snapshots=self.sizing.shape.snapshots,
            windows=self.sizing.windows,
        )
        self.staging.on_seated, self.staging.on_restored = self.pool.reset, self.pool.copy_states
        self.staging.on_forked = self.pool.fork

    def _warm_up(self, roles: Sequence[Role]) -> None:
        """Packed steps first, and of these the one without draft tokens: the memory that all graphs share is cut for
        the largest tensors, and the others fit in between. Each captures its widest all-to-all first.

        In groups: if packed steps are captured, and the largest holds all rows of a group that only decodes, no group
        replays a decode graph while another one prefills, and decode graphs need no wider all-to-alls than their own.
        """
        packed, config = [self.prefill, *self._packed[:-1]], self._config
        self._compile_ahead(*(rehearse for step in packed for rehearse in step.rehearsals()))
        self.prefill.warm_up()
        captured, most = self.prefill.buckets, config.decode_buckets[-1] * config.limits.window
        for step in self._rows.values():
            step.widens = not (config.exchanges and captured and captured[-1] > most)
        first: list[Role] = [*packed, self.decode]
        for role in [*first[1:], *(role for role in roles if role not in first)]:
            role.warm_up()
        self.device.release_unused()  # of the rehearsals

    def count_from_here(self) -> None:
        """Count allocations and captures from now on: those before belong to the start."""
        self.allocations_at_warmup = self.device.allocations()
        self.captures_at_warmup = self.device.captures
        self.quantising_at_warmup = SEPARATE.count

    @property
    def prefill_attention(self) -> str:
        """The name of the kernel, for records of measurements."""
        return self._model.kernels.prefill_name

    @property
    def late_captures(self) -> dict[str, int]:
        """Number of graphs captured after start-up, by sampling variant."""
        found: Counter[str] = Counter()
        for graphs in self._row_graphs:
            found.update(graphs.late)
        return found

    @property
    def _row_graphs(self) -> list[RowGraphs]:
        """All graphs that may be captured late."""
        decoding = [step.graphs for step in self._rows.values()]
        return [*decoding, *(graphs for step in self._packed for graphs in step.row_graphs)]

    def surround_captures(self, around: Callable[[], AbstractContextManager[object]]) -> None:
        """Have every late capture run inside ``around()``."""
        for graphs in self._row_graphs:
            graphs.around_capture = around

    @property
    def restores_prefixes(self) -> bool:
        """Whether a sequence can begin after a cached prefix; with slot state, from a snapshot."""
        return not self._model.cache_layout.has_slot_state or self.snapshots > 0

    @property
    def snapshots(self) -> int:
        """Number of snapshots of slot state; 0 for a model without it."""
        return self.sizing.shape.snapshots

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    @property
    def group(self) -> int:
        """Number of this rank's data-parallel group; 0 for one group."""
        exchange = self._model.expert_split.exchange
        return 0 if exchange is None else exchange.index

    @property
    def mixes(self) -> bool:
        """Whether packed steps may have decode requests. On GPUs only if these steps are captured: otherwise their
        launches would take the host longer than a decode step takes the device."""
        captured = bool(self.prefill.buckets) or self.device.torch_device.type == "cpu"
        return self._config.mixed and captured

    @property
    def mixes_windows(self) -> bool:
        """Whether these may have draft windows."""
        return self.mixes and any(step.decode.proposes for step in self._packed)

    @property
    def captured_tokens(self) -> tuple[int, ...]:
        """Token counts of captured packed steps, ascending."""
        return self.prefill.buckets

    def kv_read_ms(self) -> float:
        """Milliseconds to read the KV of one token in all layers, at the rate of one large read."""
        if not self.pool.paged:
            return 0.0
        words = self.pool.paged[0].view(torch.uint8).view(-1)[:_READ_BYTES].view(torch.int64)
        words.sum()  # of this size once before, for its memory
        took = min(self._milliseconds_of(lambda: self.device.compute.submit(words.sum)) for _ in range(_COST_RUNS))
        return took / (words.numel() * 8) * self.pool.layout.bytes_per_token

    def step_costs(self) -> dict[int, float]:
        """Milliseconds of captured packed steps, by tokens: all of them up to 1024, beyond that each doubling and the
        largest, but no more tokens than all rows together can have.

        For start-up; all ranks must call it. Tokens are padding, arranged as prompts that recurrent layers and experts
        compute.
        """
        found: dict[int, float] = {}
        buckets, limits = self.prefill.buckets, self._config.limits
        buckets = buckets[: 1 + bisect_left(buckets, limits.rows * limits.max_model_len)]
        with self.staging.real_padding(self._model.config.vocab_size, block=1, group=self.group) as prompts:
            for tokens in buckets:
                if tokens <= _ALL_COSTS_UP_TO or tokens & (tokens - 1) == 0 or tokens == buckets[-1]:
                    took = []
                    for _ in range(_COST_RUNS):
                        prompts(self.prefill.rows_of(tokens).query)
                        took.append(self._milliseconds_of(partial(self.prefill.replay_padding, tokens)))
                    found[tokens] = min(took)
        return found

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Steps launched and taken inside, before the engine's first one, are neither counted nor timed."""
        taken = dict(self.fallbacks.counts)
        with self.results.untimed():
            yield
        self.fallbacks.counts = taken
        self.staging.counters = StagingCounters()
        self.results.counters = ResultCounters()
        self.count_from_here()

    def replay_ms(self, spec: LaunchSpec, replays: int) -> float:
        """Milliseconds of one replay, of ``replays`` in a row, of the graph of decode step ``spec``. Nothing may be in
        flight. Running rows append tokens that are not reported, so the caller cancels them.
        """
        shape = spec.shape
        step = self._rows[self._config.limits.row_tokens(shape.width)]
        graph = step.graphs[shape.rows, shape.variant, shape.exchange]

        def work() -> None:
            for _ in range(replays):
                graph.replay()

        took = self._milliseconds_of(work)
        for _ in range(replays):
            self.device.compute.submit(self._ring.undo)
        self.device.compute.synchronize()
        return took / replays

    def _milliseconds_of(self, work: Callable[[], object]) -> float:
        self.device.compute.synchronize()
        began = time.perf_counter()
        work()
        self.device.compute.synchronize()
        return (time.perf_counter() - began) * 1e3

    # ---- each step ----

    def needs(self, plan: StepPlan | None) -> LaunchNeeds:
        """What the plan needs of a step that several groups launch together; to be called once per plan."""
        return self._resolver.needs(plan)

    def resolve(self, plan: StepPlan | None, agreed: LaunchNeeds | None = None, *, step: int = -1) -> LaunchSpec:
        """How the plan is launched. ``agreed``: the maximum of all groups' needs, None for one group. A group without a
        plan launches ``step`` without rows, since the other groups' all-to-alls need it."""
        if plan is None:
            plan = StepPlan(step, StepKind.DECODE, (), (), width=1)
        return self._resolver.resolve(plan, agreed)

    def launch(self, spec: LaunchSpec) -> None:
        """Put one step on the device, after everything launched before it."""
        compute = self.device.compute
        if spec.shared_bucket:  # a capture runs the step, and its all-to-alls need all groups, also those that prefill
            key = spec.shared_bucket, spec.shape.variant, spec.shape.exchange
            for tokens in (1, spec.shared_width):
                self._rows[tokens].graphs[key]
        ticket = self.results.reserve(spec)
        with self._stage_range:
            staged = self.staging.stage(spec)
        if self.results.timed:
            compute.record(ticket.start)
        if staged is not None:
            self.staging.apply(staged)
        self._roles[spec.role].launch(spec, ticket.scores)
        if self.pool.banks and (spec.plan.forks or spec.plan.saved):
            self._copy_after(spec)
        compute.record(ticket.ready)
        self.results.submit(ticket)

    def _copy_after(self, spec: LaunchSpec) -> None:
        """State from which forked answers continue, and snapshots. Blocks of forks: packed_step.py."""
        states_2C = self.staging.kept_states(spec)
        self.device.compute.submit(lambda: self.pool.copy_states(states_2C))

    def take(self, spec: LaunchSpec) -> StepResult:
        """The result of a launched step, oldest first."""
        return self.results.take(spec.plan.step)

    @property
    def landed_at(self) -> float:
        """When the step that was taken last was done, on time.perf_counter's clock."""
        return self.results.landed_at

    def close(self) -> None:
        """Finish what is in flight and release threads and graphs."""
        try:
            self.results.close()
        finally:
            self.device.close()
            if self.grammars is not None:
                self.grammars.close()

    # ---- before the first step ----

    def _make_roles(self, pool: CachePool) -> list[Role]:
        """All steps, in the order in which they are asked whether they run a plan; decode and prefill are the last."""
        caches, proposer = pool.allocate(self._model.cache_layout), None
        if self._make_proposer is not None:
            of_it = ProposerParts(self.device, self._model, pool, self.tables, self._config.limits)
            proposer = self._make_proposer(of_it)
        self._drafts = proposer is not None
        memory = self.tables, self._ring, self.staging
        parts = StepParts(
            self.device, self._model, caches, pool, *memory, self._config, self.fallbacks, proposer, self._part_range
        )
        made = [make(parts) for make in self._further_roles]
        made += [RowStep(parts, width) for width in self._widths]
        if self._config.mixed_windows:
            made += [PackedStep(parts, DraftTokens(parts, width)) for width in self._widths]
        return [*made, RowStep(parts), PackedStep(parts)]

    def _size(self) -> CacheSizing:
        """Run the largest step of every kind over padding, measure it, and divide what is left by the block size."""
        config, limits = self._config, self._config.limits
        windows = self._model.cache_layout.windows
        no_blocks = [(window, 0) for window in windows]
        pool = CachePool(self.device, block_size=limits.block_size, blocks=0, slots=0, windows=no_blocks)  # for padding
        *further, decode, prefill = self._make_roles(pool)
        assert isinstance(decode, RowStep)
        assert isinstance(prefill, PackedStep)
        of_rows = [decode.rehearse, *(role.rehearse for role in further if not isinstance(role, PackedStep))]
        of_chunks = [*(role.rehearse for role in further if isinstance(role, PackedStep)), prefill.rehearse]
        # Packed steps last: the other kernels are compiled here while those of prefill attention may be on their way,
        # and no rank may use it before all have agreed which one runs.
        self._compile_ahead(*of_rows)
        peaks = [self.device.peak_of(rehearse) for rehearse in of_rows]
        self._model.kernels.agree_on_kernels(config.agree_min)
        of_sampling = [role.compile_sampling for role in (*further, decode) if isinstance(role, RowStep)]
        self._compile_ahead(*of_chunks, prefill.compile_shorter, *of_sampling)
        peaks += [self.device.peak_of(rehearse) for rehearse in of_chunks]
        self._tune()
        for compile_rest in (prefill.compile_shorter, *of_sampling):
            compile_rest()
        demands = tuple([WindowDemand.of(window, limits) for window in windows])
        shape = CacheShape(pool.layout, limits.block_size, limits.slots, windows=demands)
        shape = replace(shape, snapshots=self._snapshots_of(shape, max(peaks)))
        num_blocks = config.num_blocks
        if num_blocks is None and self.device.torch_device.type == "cpu":
            all_rows = limits.slots * self.tables.max_blocks
            left = max(0, CPU_KV_BYTES - shape.state_bytes)
            of_all = shape.block_bytes + sum(shape.bytes_of(window) for window in windows)
            num_blocks = min(all_rows, left // max(1, of_all))
        sizing = size_cache(
            self.device.memory_info(),
            max(peaks),
            shape,
            max_model_len=limits.max_model_len,
            reserve_tokens=limits.tokens_ahead,
            memory_fraction=config.memory_fraction,
            num_blocks=num_blocks,
            history_bytes=0 if self.tables.history_SL is None else self.tables.history_SL.nbytes,
        )
        agreed = tuple([config.agree_min(blocks) for blocks in sizing.window_blocks])
        sizing = sizing.with_blocks(config.agree_min(sizing.num_blocks), agreed)
        log.info("%s", sizing)
        return sizing

    def _compile_ahead(self, *rehearsals: Callable[[], None]) -> None:
        """Compile the kernels that ``rehearsals`` launch, in several threads, at start-up; nothing on a CPU."""
        if self.device.torch_device.type == "cpu":
            return
        from models.kernels.compile_ahead import compile_ahead, threads_here  # it imports Triton

        # With log-probabilities torch commits a step: records that no kernel has filled, live and of no token.
        each = (work for rehearse in rehearsals for work in (rehearse, self.tables.reset_padding))
        with self._model.few_layers():
            works = (partial(self.device.compute.submit, work) for work in each)
            compile_ahead(
                works,
                threads=threads_here(),
                local_rank=self._config.local_rank,
                local_world=self._config.local_world,
                bind_thread=self.device.bind_thread,
                progress=self._compiling,
            )
        self.device.compute.submit(self._ring.start_over)  # appends were undone that no kernel had made

    def _snapshots_of(self, shape: CacheShape, peak: int) -> int:
        """Number of snapshots: the configured one, or as many as a share of the memory for caches holds; the same on
        every rank. 0 for a model without slot state, whatever state a drafter has: after a cached prefix it observes
        the rest of the prompt.
        """
        config, limits = self._config, self._config.limits
        if not self._model.cache_layout.has_slot_state:
            return 0
        if config.snapshots is not None:
            return config.snapshots
        left = CPU_KV_BYTES - shape.state_bytes
        if self.device.torch_device.type != "cpu":
            memory = self.device.memory_info()
            left = int(memory.total * config.memory_fraction) - memory.used - peak - shape.state_bytes
        blocks = config.num_blocks or -(-(limits.max_model_len + limits.tokens_ahead) // limits.block_size)
        return config.agree_min(snapshots_that_fit(left, shape, limits.rows, blocks))

    def _count_standing_fallbacks(self) -> None:
        """Count the fallbacks that every step takes, once; prefill attention is counted in each step."""
        kernels = self._model.kernels
        standing = {**self._config.slower, **kernels.slower_kernels, "torch_kernels": kernels.slower}
        standing["nccl_all_reduce"] = self._model.collectives.slower
        for name, reason in standing.items():
            if reason is not None:
                self.fallbacks.take(name, reason)
        if self._config.mixed and not self.mixes:
            self.fallbacks.take("separate_prefill", "steps with prompt chunks are not captured: no row decodes in them")
        if self.device.torch_device.type == "cuda" and kernels_for(self.tables.columns.records) is None:
            self.fallbacks.take("torch_sampling", "Triton cannot be imported: pip install triton")

    def _widest_variant(self) -> SamplingVariant:
        """The widest sampling variant whose late graphs fit into memory on every rank; wider ones are refused.

        A variant that was not warmed up is captured when its first request comes, and a capture that fails then would
        end the job. So the candidates are tried now, over padding, widest first.
        """
        warmed = GREEDY
        for variant in self._config.warm_variants:
            warmed |= variant
        candidates = [EVERY_FEATURE, *(warmed | variant for variant in NARROWER_FEATURES)]
        return next((candidate for candidate in candidates if self._has_room_for(candidate)), warmed)

    def _has_room_for(self, variant: SamplingVariant) -> bool:
        """Whether every rank has memory for all graphs that may be captured late in it, for the largest bucket: a draft
        window has W times the logits of a decode step.

        Its kernels are compiled ahead for the smallest bucket, which takes little memory: those of the sampler are the
        same for any number of rows, and those of the layers are compiled already."""
        if self.device.torch_device.type == "cpu":
            return True
        buckets = self._config.decode_buckets
        with self.tables.trial(slots=PADDING_SLOT + 1):
            self._compile_ahead(*self._trials(buckets[0], variant))
            self.device.compute.synchronize()  # a stream may run its work later, and the tables are temporary
        late = [feature for feature in self.tables.features_of(variant) if feature.tables is None]
        rows = sorted({buckets[0], buckets[len(buckets) // 2], buckets[-1]})
        try:
            with self.tables.trial():
                for feature in late:
                    if not self._config.agree_min(self._peak_of(feature.need) < math.inf):
                        return False
                each_role = zip(*(self._trials(bucket, variant) for bucket in rows), strict=True)
                return all(self._all_hold(trials, rows) for trials in each_role)
        finally:
            self.device.release_unused()

    def _trials(self, bucket: int, variant: SamplingVariant) -> list[Trial]:
        """Of every kind of step, the same on all ranks."""
        return [trial for role in self._roles.values() for trial in role.trials(bucket, variant)]

    def _all_hold(self, trials: Sequence[Trial], rows: Sequence[int]) -> bool:
        """Whether every rank can run ``trials``, one for each number of ``rows``, ascending, if graphs keep as much
        memory as a trial takes, in addition to the trial or to the largest step.

        Ranks agree after each on what the last one is expected to take: a rank that runs out of memory inside a trial
        would leave out collectives in which the others wait.
        """
        before, peak = 0.0, 0.0
        for index, trial in enumerate(trials):
            before, peak = peak, self._peak_of(trial)
            expected = peak
            if index:
                grown = max(0.0, peak - before) / (rows[index] - rows[index - 1])
                expected += grown * (rows[-1] - rows[index])
            needed = expected + max(expected, self.sizing.activation_peak)
            if not self._config.agree_min(needed <= self.device.memory_info().free):
                return False
        return True

    def _peak_of(self, trial: Work) -> float:
        """Bytes that it takes on this rank; infinite if memory runs out."""
        try:
            return self.device.peak_of(trial)
        except torch.OutOfMemoryError:
            self.device.compute.submit(self._ring.start_over)  # it may have failed after its append
            return math.inf

    def _tune(self) -> None:
        """Choose kernels for the GEMMs that ran, while there is room for copies of weights."""
        if self._config.share is None:
            return
        began = time.perf_counter()
        measured = self._model.kernels.tune_seen(self._config.kernel_cache, self._config.share)
        if measured:
            took = time.perf_counter() - began
            log.info("%d GEMMs have no tuned kernel: measured quickly, in %.1f s (see launch tune)", measured, took)

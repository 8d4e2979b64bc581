"""What steps are made from: configuration, shared parts, and the memory that the parts of a step hand over.

Knows: the interface of a step, what every step may use. Does not know: what a step computes (row_step.py,
packed_step.py), or when one runs (launch_spec.py).

Steps share the slot tables, the result ring, the device's streams, and ``StepMemory``, of which nothing outlives a
step. So alternating between steps captures and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from models.cache_layout import CacheView
from models.inputs import RepeatedPrefill
from models.layers.decoder import Decoder
from runtime.execute.cache.pool import CachePool
from runtime.execute.device.protocol import Device
from runtime.execute.fallbacks import Fallbacks
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.proposer import DrawingProposer, Proposer
from runtime.execute.result_ring import ResultRing
from runtime.execute.sampling.draft_tree import DraftTree
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.logprobs import StepPromptLogprobs
from runtime.execute.sampling.rejection import Drafted
from runtime.execute.slot_state import SlotTables
from runtime.execute.staging import Staging
from runtime.schedule.config import StepLimits
from runtime.schedule.plan import StepKind, StepPlan


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """What memory and graphs are sized for.

    ``agree_min`` returns the minimum of a number over all ranks. ``share(make)`` returns rank 0's ``make()`` on every
    rank; without it no kernel is chosen by measurement. ``kernel_cache``: folder for those choices. ``local_rank``,
    ``local_world``: this rank's number on its node, and how many ranks run there. ``snapshots``: of slot state; None: a
    share of the memory for caches. ``warm_variants``: captured at start-up. ``exchanges``: rows, ascending, of expert
    all-to-alls while a group prefills; empty for one group. ``prefill_buckets``: token counts, ascending, of captured
    packed steps; may be empty. ``mixed``: packed steps may have decode requests; ``mixed_windows``: these may have
    draft windows. ``windows``: decode steps may have draft windows; ``narrower``: their W besides the limits'.
    ``slower``: reasons for fallbacks that were decided outside the executor, by name.
    """

    limits: StepLimits
    decode_buckets: tuple[int, ...]
    memory_fraction: float
    num_blocks: int | None
    agree_min: Callable[[int], int]
    warm_variants: tuple[SamplingVariant, ...] = (SamplingVariant(),)
    exchanges: tuple[int, ...] = ()
    prefill_buckets: tuple[int, ...] = ()
    mixed: bool = False
    mixed_windows: bool = False
    windows: bool = True
    narrower: tuple[int, ...] = ()
    snapshots: int | None = 0
    share: Callable[[Callable[[], str]], str] | None = None
    kernel_cache: Path | None = None
    local_rank: int = 0
    local_world: int = 1
    slower: Mapping[str, str] = field(default_factory=dict)


class DraftTables(NamedTuple):
    """Draft tokens by slot, from the propose part of a packed step to its tail. tokens_SQ int64; kept_S int32: draft
    tokens that are accepted whatever is sampled (Proposed.scripted_B); ``tree``: None for chains."""

    tokens_SQ: Tensor
    kept_S: Tensor
    tree: DraftTree | None


class PassBuffers(NamedTuple):
    """What captured forward passes of packed steps read, and what they hand to tails.

    page_table_BP int32: of the step's rows, or of every group. ``attention``: over it, planned before each replay.
    hidden_XN: final hidden states of the sampled tokens; features_XF: what a proposer reads of their layers. ``split``:
    passes with split keys can be captured.
    """

    page_table_BP: Tensor
    attention: RepeatedPrefill
    hidden_XN: Tensor
    features_XF: Tensor | None
    split: bool


class StepMemory:
    """What the parts of a packed step hand over, one for steps of all widths: each buffer is made when a step first
    needs it, for the widest step, and narrower ones use the beginning of it."""

    def __init__(self) -> None:
        self._made: dict[object, Tensor] = {}
        self._drafted: Drafted | None = None
        self._tables: DraftTables | None = None
        self._passes: PassBuffers | None = None
        self._asked = False

    def made(self, parts: StepParts, width: int) -> dict[object, Tensor]:
        """By recurrent layer, [rows * width, X] of the model's dtype: what it made of the draft windows' tokens."""
        rows, dtype = parts.staging.max_rows, parts.model.dtype
        for mixer in parts.model.slot_mixers.values():
            if mixer not in self._made:
                self._made[mixer] = parts.device.zeros(rows * parts.limits.width, mixer.made_size, dtype=dtype)
        return {mixer: made_XX[: rows * width] for mixer, made_XX in self._made.items()}

    def drafted(self, parts: StepParts, drafts: int) -> Drafted | None:
        """What ``drafts`` draft tokens of each row were sampled from; None if the proposer samples none."""
        if not isinstance(parts.proposer, DrawingProposer):
            return None
        if self._drafted is None:
            self._drafted = parts.proposer.room(parts.staging.max_rows, parts.limits.window - 1)
        rows, _, ids = self._drafted.probs_BQD.shape
        probs_BQD = self._drafted.probs_BQD.view(-1)[: rows * drafts * ids].view(rows, drafts, ids)
        index_BQ = self._drafted.index_BQ.view(-1)[: rows * drafts].view(rows, drafts)
        return self._drafted._replace(probs_BQD=probs_BQD, index_BQ=index_BQ)

    def tables(self, parts: StepParts, drafts: int) -> DraftTables:
        """Of ``drafts`` draft tokens a row; a tree has as many as the limits say."""
        slots, zeros, tree = parts.tables.slots, parts.device.zeros, parts.limits.tree
        if self._tables is None:
            nodes = None
            if tree:
                parents_SN, depth_SN = (zeros(slots, tree, dtype=torch.int64) for _ in range(2))
                nodes = DraftTree(parents_SN, depth_SN, zeros(slots, tree, dtype=torch.int32))
            tokens_SQ = zeros(slots, parts.limits.window - 1, dtype=torch.int64)
            self._tables = DraftTables(tokens_SQ, zeros(slots, dtype=torch.int32), nodes)
        tokens_SQ, kept_S, nodes = self._tables
        tokens_SQ = tokens_SQ.view(-1)[: slots * drafts].view(slots, drafts)
        return DraftTables(tokens_SQ, kept_S, nodes if drafts + 1 == tree else None)

    def passes(self, parts: StepParts, feature_size: int) -> PassBuffers | None:
        """None if packed steps are not captured: no buckets, or the attention of some rank cannot be captured. To be
        called on all ranks alike: they agree on it when it is first asked."""
        buckets, model, zeros = parts.config.prefill_buckets, parts.model, parts.device.zeros
        if not buckets or self._asked:
            return self._passes
        self._asked, rows = True, parts.staging.max_rows
        groups, _, most = parts.tables.block_tables_GSP.shape
        page_table_BP = zeros(*((groups,) if groups > 1 else ()), rows, most, dtype=torch.int32)
        of_all = page_table_BP[0] if groups > 1 else page_table_BP
        attention = model.repeat_prefill(of_all, buckets[-1], parts.caches)
        # A rank that pads and one that does not would exchange all-reduces of unlike sizes.
        if not parts.config.agree_min(int(attention is not None)) or attention is None:
            return None
        tokens = rows * (parts.limits.window if parts.config.mixed_windows else 1)
        self._passes = PassBuffers(
            page_table_BP,
            attention,
            zeros(tokens, model.config.hidden_size, dtype=model.dtype),
            zeros(tokens, feature_size, dtype=model.dtype) if feature_size else None,
            bool(parts.config.agree_min(int(model.splits_chunks(parts.caches)))),
        )
        return self._passes


@dataclass(frozen=True, slots=True)
class StepParts:
    """What a step is made from. ``caches``: a view a layer of ``model``, of what it declares.

    A step with another model allocates that one's caches from ``pool``. Every step is made twice: first over a
    pool without blocks, whose layout gives the cost of blocks and slots. ``proposer``: of draft tokens, over the same
    pool. ``part_range(name)``: a reusable context around each launch of a step with several. ``memory``: of all steps
    made from these parts.
    """

    device: Device
    model: Decoder
    caches: Sequence[CacheView]
    pool: CachePool
    tables: SlotTables
    ring: ResultRing
    staging: Staging
    config: ExecutorConfig
    fallbacks: Fallbacks = field(default_factory=Fallbacks)
    proposer: Proposer | None = None
    part_range: Callable[[str], AbstractContextManager[object]] = nullcontext
    memory: StepMemory = field(default_factory=StepMemory)

    @property
    def limits(self) -> StepLimits:
        return self.config.limits

    @property
    def has_slot_state(self) -> bool:
        """Whether the model's forward passes need StateRows."""
        return self.model.cache_layout.has_slot_state


Trial = Callable[[], None]  # runs uncaptured, over padding, what a capture would: nothing is reported or kept


class Role(Protocol):
    """One kind of step. ``rehearse``, ``warm_up`` and ``trials`` are for start-up, ``launch`` for every step."""

    @property
    def name(self) -> str:
        """In launch specs, timelines and errors."""
        ...

    def serves(self, plan: StepPlan, kind: StepKind) -> bool:
        """Whether it runs such a plan, launched as a step of ``kind``."""
        ...

    def rehearse(self) -> None:
        """Run the largest step over padding, uncaptured, so that its memory can be measured."""
        ...

    def warm_up(self) -> None:
        """Capture the graphs. CaptureError names the graph and the option to change."""
        ...

    def trials(self, bucket: int, variant: SamplingVariant) -> Sequence[Trial]:
        """What is captured by (bucket, variant) when requests ask for it: a trial of each kind, in the same order on
        every rank. A kind that is missing here may end the job if its capture finds no memory."""
        ...

    def launch(self, spec: LaunchSpec, scores: StepPromptLogprobs | None) -> None:
        """Put the step on the compute stream; its changes are staged and applied. ``scores`` receives the
        log-probabilities of prompt tokens; None if none are asked for.
        """
        ...


MakeRole = Callable[[StepParts], Role]

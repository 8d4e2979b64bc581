"""A role: one kind of step, with its model, its view of the caches, its row maps and its graphs.

Knows: what every role is asked for, and what it is made from. Does not know: any particular role (step/decode.py,
step/prefill.py), or when one runs (launch_spec.py decides that).

Roles share the slot tables, the result ring and the device's streams, and nothing that one of them could change under
another: no graph or row map belongs to two roles, and no buffer that outlives a step. So alternating between roles
captures and allocates nothing, and a new role touches no other one's file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from models.cache_layout import CacheView
from models.layers.decoder import Decoder
from runtime.execute.cache.pool import CachePool
from runtime.execute.device.protocol import Device
from runtime.execute.fallbacks import Fallbacks
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.proposer import Proposer
from runtime.execute.result_ring import ResultRing
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.prompt_logprobs import StepPromptLogprobs
from runtime.execute.sampling.rejection import Drafted
from runtime.execute.slot_state import SlotTables
from runtime.execute.staging import Staging
from runtime.schedule.config import StepLimits
from runtime.schedule.plan import StepKind, StepPlan


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """What memory and graphs are sized for. ``agree_min`` returns the least of a number over all ranks.

    ``share(make)`` returns what ``make()`` returned on rank 0, on every rank; without it no kernel is chosen by
    measurement. ``kernel_cache``: folder in which those choices are kept.
    ``local_rank``, ``local_world``: this rank's number on its node, and how many run there.
    ``snapshots``: of slot state; None takes a share of the memory for caches (executor.py).
    ``exchanges``: row counts, ascending, of exchanges with other groups while one of them prefills; empty where there
    is one group. ``prefill_buckets``: token counts, ascending, of steps with chunks that are captured; none where
    empty. ``mixed``: rows may decode in these steps; ``mixed_windows``: in windows, where there are some. ``windows``:
    with a proposer rows have some, now and then.
    ``narrower``: W of windows beside the limits', which have fewer tokens and are captured, too. ``slower``:
    why a way that all steps take is not the usual one, by what takes its place, as far as it was decided outside the
    executor.
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


@dataclass(slots=True)
class BesideChunks:
    """Memory of windows beside chunks, of as many rows as there may be, as wide as can be: one for roles of all widths,
    because none of it outlives a step (step/mixed_window.py). Made by the first of them. ``made``: by layer with slot
    state. ``drafted``: what guesses were drawn from."""

    made: dict[object, Tensor] = field(default_factory=dict)
    drafted: Drafted | None = None


@dataclass(frozen=True, slots=True)
class RoleParts:
    """What a role is made from. ``caches``: a view a layer of ``model``, of what it declares.

    A role that runs a model of its own takes that one's caches from ``pool`` when it is made. Every role is made twice:
    first over a pool without blocks, whose layout tells what blocks and slots will cost. ``proposer``: who guesses the
    tokens of windows, over the same pool; roles show it what they compute (step/proposer_feed.py).
    ``part_range(name)``: a context, for use again and again, around each launch of a step that is several.
    ``beside_chunks``: of all roles that are made from these parts.
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
    beside_chunks: BesideChunks = field(default_factory=BesideChunks)

    @property
    def limits(self) -> StepLimits:
        """What every step keeps to."""
        return self.config.limits

    @property
    def has_slot_state(self) -> bool:
        """Whether the model's steps must say whose state each row continues."""
        return self.model.cache_layout.has_slot_state


Trial = Callable[[], None]  # runs what a capture would, uncaptured and over padding: nothing of it is reported or kept


class Role(Protocol):
    """One kind of step. ``rehearse``, ``warm_up`` and ``trials`` are for start-up, ``launch`` for every step that the
    role serves."""

    @property
    def name(self) -> str:
        """Of the role, in launch specs, timelines and errors."""
        ...

    def serves(self, plan: StepPlan, kind: StepKind) -> bool:
        """Whether such a plan, launched as a step of ``kind``, is this role's."""
        ...

    def rehearse(self) -> None:
        """Run the role's largest step over padding, uncaptured, so that its memory can be measured."""
        ...

    def warm_up(self) -> None:
        """Capture the role's graphs. CaptureError names the graph and the option to change."""
        ...

    def trials(self, bucket: int, variant: SamplingVariant) -> Sequence[Trial]:
        """What the role captures by (bucket, variant) as requests ask for it, once it is warm: a trial of each kind, in
        the same order on every rank. A kind that is not here may end the job where its capture finds no memory."""
        ...

    def launch(self, spec: LaunchSpec, scores: StepPromptLogprobs | None) -> None:
        """Put the step, whose changes are staged and applied, on the compute stream.

        ``scores`` receives the log-probabilities of prompt tokens; None where nobody asked.
        """
        ...


MakeRole = Callable[[RoleParts], Role]

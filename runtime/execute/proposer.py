"""The interface of drafters (proposers): the draft tokens that they return, and the accepted tokens that they observe.

Knows: the interface between roles (runtime/execute/step) and proposers, and what a proposer is made from.
Does not know: any particular proposer, when a step has a window (runtime/schedule), what becomes of a draft (sampling).

One captured verification step of width W, for B rows:

    propose   ``propose(rows, columns, W - 1)``     draft tokens, from what the proposer keeps by slot and caches
    verify    the target's forward pass over the last token and the draft tokens
    accept    the target draws at every position; a row gains 1..W tokens (acceptance.py)
    observe   ``observe(Observed)``                 the true hidden states of the tokens that count, whose successors
                                                    are known now; the proposer brings its caches up to date

Each token of a sequence is observed exactly once while it holds a slot, in order, as soon as its successor is known:
the tokens of a prompt's chunk in the forward part of the step that computes it, the newest token of every row (of a
prompt, of a decode step of width 1, of a window) after the sample that gave its successor. So a round needs no draft
stage for prompts, and steps of width 1 and W may alternate. Tokens that a prefix hit restored are not observed: what
belongs to them lies in blocks of the proposer's own caches, which come back with the target's blocks. After an
eviction all tokens are observed again.

Everything is graph-safe: fixed shapes, no host value, no synchronisation, and no memory beyond what is allocated when
the proposer is made. Every rank of a tensor-parallel group must propose the same tokens: they come from the same bits,
or from an exchange (``model.collectives``), as draws do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeGuard, runtime_checkable

from torch import Tensor

from models.inputs import StepInputs
from models.layers.decoder import Decoder
from runtime.execute.cache.pool import CachePool
from runtime.execute.device.protocol import Device
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.rejection import Drafted
from runtime.execute.sampling.token_tables import forced_drafts
from runtime.execute.slot_state import SlotColumns, SlotTables
from runtime.schedule.config import StepLimits


class Candidates(NamedTuple):
    """The best tokens at each of Q places after a row's last one. ids_BQC int64, ids of the vocabulary, at one
    place all different; logprobs_BQC float32, what the proposer gives them, none larger than the one before it.
    """

    ids_BQC: Tensor
    logprobs_BQC: Tensor


class Proposed(NamedTuple):
    """What may follow each row's last token. tokens_BQ int64, ids of the vocabulary (any id without a draft token).

    ``parents_BQ`` (int64) or None: drafts are the nodes 1 to Q of a tree whose root, node 0, is the last token; each
    has a smaller number than its children, which are different tokens. None: each draft follows the one before it.

    ``limit_B`` (integers) or None: most tokens that each row may gain, drafts or not. Proposers leave it None; a role
    sets it where only some of its rows have drafts. ``scripted_B`` (integers, 0..Q) or None: so many drafts are kept
    whatever the target draws. That changes the text, so only benchmarks ask for it.
    ``drafted`` or None: what the drafts were drawn from, for rejection sampling; without it they are compared with the
    target's own draws.
    """

    tokens_BQ: Tensor
    limit_B: Tensor | None = None
    scripted_B: Tensor | None = None
    parents_BQ: Tensor | None = None
    drafted: Drafted | None = None


class Advanced(NamedTuple):
    """Rows whose newest tokens are among those observed. rows_B int64: their slots (slot 0: padding). ``last_B`` int64:
    where in T each row's newest observed token is; the token after it is the slot's last token now. gained_B bool: the
    row gained a token; of others nothing may be kept. ``width``: T = B * width, row-major.
    """

    rows_B: Tensor
    last_B: Tensor
    gained_B: Tensor
    width: int


@dataclass(frozen=True, slots=True)
class Observed:
    """T tokens of a step as the target saw them. Only those with ``kept_T`` count.

    inputs: of the target's forward pass: token_ids_T, positions_T, kv_slots_T (int64) and the page tables and lengths
    of its attention, which are right for caches that the proposer took from the same pool. A layer of the proposer may
    be run over them as they are: what it writes for tokens that do not count is written again when they do.
    slots_T int64: whose they are; 0 for padding. next_ids_T int64: the tokens that follow, at positions_T + 1.
    kept_T bool: part of the sequence for good, with a known successor, and observed for the first time. False for
    rejected draft tokens, ghosts and padding, and where the successor comes with a later call.
    kept_kv_slots_T int64: where the tokens' entries go in paged caches; those that do not count write into the trash
    block.
    hidden_TN: the target's final-normed hidden states, where the proposer ``reads_hidden``. features_TF: the residual
    streams after ``layers``, side by side, where it names any.
    ``advanced``: the rows that gained their newest tokens in this call; None for the tokens within a prompt's chunk.
    """

    inputs: StepInputs
    slots_T: Tensor
    next_ids_T: Tensor
    kept_T: Tensor
    kept_kv_slots_T: Tensor
    hidden_TN: Tensor | None
    features_TF: Tensor | None
    advanced: Advanced | None = None


@dataclass(frozen=True, slots=True)
class ProposerParts:
    """What a proposer is made from, on every rank. ``model``: the target. ``limits.width``: W; ``limits.window``:
    tokens of a row that are verified at once, more than W where they are a tree.

    It takes its caches from ``pool`` when it is made: ``pool.allocate(CacheLayout(...))``, one view a declared layer.
    Planes have the target's blocks by the target's page tables, so prefix hits, forks and evictions hold for them;
    ``SlotState`` is zeroed when a request gets a slot, and copied where an answer forks. ``tables.history``: the tokens
    of every slot (slot_state.py). A proposer is made twice: first over a pool without blocks, whose layout says what
    blocks and slots will cost; weights are loaded before that by the MakeProposer's maker.
    """

    device: Device
    model: Decoder
    pool: CachePool
    tables: SlotTables
    limits: StepLimits


class Proposer(Protocol):
    """Draft tokens by slot. One an engine and pool; roles of all widths show it what they computed."""

    @property
    def name(self) -> str:
        """As ``method`` of --speculative-config says it; in names of roles, logs and errors."""
        ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the target whose residual streams it reads, numbers from 0, ascending; () for none."""
        ...

    @property
    def reads_hidden(self) -> bool:
        """Whether it reads final hidden states. With neither these nor ``layers`` it is never shown anything."""
        ...

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        """``count`` drafts for every row. rows_B int64 [B]: their slots, padding slot 0 included; ``columns``: their
        records. Ghosts and padding get any ids of the vocabulary. What it writes into paged caches for drafts must lie
        at positions length - 1 to length - 2 + ``limits.window``, whose blocks the row holds (ghosts and padding: the
        trash block).
        """
        ...

    def observe(self, observed: Observed) -> None:
        """See above: bring caches and slot state up to date."""
        ...


class BranchingProposer(Proposer, Protocol):
    """One that can say more than one token a place, from which a tree is grown (runtime/speculate/tree.py)."""

    def candidates(self, rows_B: Tensor, columns: SlotColumns, count: int, top_k: int) -> Candidates:
        """The ``top_k`` most probable tokens at each of ``count`` places; otherwise as ``propose``."""
        ...


@runtime_checkable
class DrawingProposer(Proposer, Protocol):
    """One that can sample its drafts, and say from what. Never trees: rejection sampling goes along a chain."""

    def draw(self, rows_B: Tensor, columns: SlotColumns, count: int, variant: SamplingVariant) -> Proposed:
        """As ``propose``, for a step whose rows are served by ``variant``: random, masked if it has grammars."""
        ...

    def room(self, rows: int, count: int) -> Drafted:
        """Memory for ``drafted`` of so many rows and drafts, where that must outlive the launch that draws."""
        ...


@runtime_checkable
class MaskingProposer(Proposer, Protocol):
    """One that can leave out draft tokens that may not follow by the table of a row's grammar."""

    def allowed(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        """As ``propose``, for a step some of whose rows may have a table."""
        ...


MakeProposer = Callable[[ProposerParts], Proposer]


def draws(proposer: Proposer | None, variant: SamplingVariant) -> TypeGuard[DrawingProposer]:
    """Whether drafts for a step of such rows are sampled. Greedy steps have nothing to draw."""
    return variant.random and isinstance(proposer, DrawingProposer)


def masks(proposer: Proposer | None, variant: SamplingVariant) -> TypeGuard[MaskingProposer]:
    """Whether draft tokens for a step of such rows are masked by tables of grammars."""
    return variant.grammars and isinstance(proposer, MaskingProposer)


def guesses_for(
    proposer: Proposer, tables: SlotTables, rows_B: Tensor, columns: SlotColumns, count: int, variant: SamplingVariant
) -> Proposed:
    """``count`` draft tokens for each row of a step served by ``variant``, drawn or not, or forced by its grammar."""
    if draws(proposer, variant):
        proposed = proposer.draw(rows_B, columns, count, variant)
    elif masks(proposer, variant):
        proposed = proposer.allowed(rows_B, columns, count)
    else:
        proposed = proposer.propose(rows_B, columns, count)
    if not variant.grammars:
        return proposed
    # Where a token is forced its probability is 1: rejection sampling keeps it, whatever the one before was drawn from.
    return proposed._replace(tokens_BQ=forced_drafts(tables.grammar_tables, rows_B, proposed.tokens_BQ))


def observes(proposer: Proposer | None) -> bool:
    """Whether roles must show it what they compute."""
    return proposer is not None and (proposer.reads_hidden or bool(proposer.layers))

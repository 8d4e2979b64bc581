"""Plants mutants, call recorders and replacements for kernel ops and for parts of a device step.

It is the only file of tests that names classes of kernels and of the device step. What is planted is a function. Its
first argument is the op or part that it replaces, bound, so that it can call it:

    A wrong op in one set of kernels, derived from the reference or from another set (``rig``: an engine for tests,
    tests/runtime/engine/rig.py):

        def depends_on_batch(linear: Op, x_TN: Tensor, *given: Any) -> Tensor:
            return linear(x_TN, *given) * (1 + 1e-3 * len(x_TN))

        with rig(kernels=kernels_with(linear=depends_on_batch)) as engine: ...

    A wrong op in the reference kernels, until the test ends; for tests that do not make the kernels themselves:

        plant(monkeypatch, depends_on_batch, op="linear")

    A wrong part of a step, by its name in PARTS, until the test ends:

        def of_another_row(keep: Op, undecided: Undecided) -> None:
            keep(replace(undecided, made_TX=undecided.made_TX.roll(width_of(keep), 0)))

        plant(monkeypatch, of_another_row, part="mixed.keep")

    A recorder of calls, which changes nothing:

        proposals = Noting()
        plant(monkeypatch, proposals, part="mixed.propose")
        ...
        assert len(proposals.calls) == 3

For a mutant with state, plant the methods of an object: ``kernels_with(gated_delta=mutant.gated_delta)``. A value that
is not callable replaces an attribute: ``kernels_with(slower="Triton is not installed")``,
``plant(monkeypatch, 0, part="prefill.large_step")``. ``monkeypatch.context()`` ends a plant before the test ends.

Unit tests make steps with ``make_decode_step`` and the functions after it, kernels with ``reference_kernels`` and the
functions after it.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from models.ops import rows_reference
from models.ops.contract import Ops
from models.ops.select import reference_ops
from models.ops.table import INVARIANT, Row, TableOps
from runtime.execute.proposer import Proposer
from runtime.execute.sampling.logprobs import LogprobFeature, StepPromptLogprobs
from runtime.execute.step import commit, drafts, gather, packed_pass, row_step, step_io_kernels
from runtime.execute.step.drafts import DraftTokens
from runtime.execute.step.graphs import RowGraphs
from runtime.execute.step.memory import StepParts
from runtime.execute.step.packed_pass import PackedPass
from runtime.execute.step.packed_step import PackedStep
from runtime.execute.step.row_step import RowStep
from runtime.execute.step.tail import Tail

if TYPE_CHECKING:  # ranks that tests start have no use for it
    import pytest

    from runtime.engine import Engine

Kernels = Ops
Op = Callable[..., Any]  # the replaced op or part, bound to its kernels or step
Owner = type | types.ModuleType

# Parts of a step. "mixed": a step with prefill chunks whose decode requests have draft windows or trees.
PARTS: dict[str, tuple[Owner, str]] = {
    # propose(rows, variant): draft tokens of the first rows, kept for the two parts that follow
    "mixed.propose": (DraftTokens, "propose"),
    # gather_packed(tables, chunks, block_size, guesses_SQ, depth_SN) -> Packed: all tokens of the forward pass
    "mixed.gather": (drafts, "gather_packed"),
    # tree(slots_B) -> tree_BQ: the nodes that each node attends to; None: all before it
    "mixed.tree_mask": (DraftTokens, "tree"),
    # state_rows(chunks, packed) -> StateRows of the forward pass
    "mixed.state_rows": (DraftTokens, "state_rows"),
    # keep(undecided): stores a recurrent layer's state updates of the draft tokens
    "mixed.keep": (DraftTokens, "keep"),
    # take_in(rows, positions_X): updates recurrent state with the accepted tokens
    "mixed.take_in": (DraftTokens, "_update_state"),
    # sampled(chunks) -> int64 [X]: the tokens after which one is sampled
    "mixed.drawing": (DraftTokens, "sampled"),
    # proposed(emitting_R, decodes_R, variant) -> Proposed, as the tail verifies it
    "mixed.proposed": (DraftTokens, "proposed"),
    # Proposed(tokens_BQ, ...): the same, as it is made
    "mixed.Proposed": (drafts, "Proposed"),
    # of_paged(caches, layout) -> the mover of an accepted path's KV entries; None: chains move none
    "mixed.mover": (drafts, "EntryMover.of_paged"),
    # make_memory(): buffers shared by steps of all widths
    "mixed.make_memory": (DraftTokens, "_make_memory"),
    # gather_decode(tables, rows_B, block_size) -> Rows
    "decode.gather": (row_step, "gather_decode"),
    # slot_state(slots_B, undecided=, tree=) -> StateRows of a step without chunks
    "window.state_rows": (RowStep, "slot_state"),
    # lay_out(parents_BQ, depth) -> DraftTree; shown(...) -> Shown: the tokens of a window that the proposer observes
    "window.lay_out": (gather, "lay_out"),
    "window.shown": (commit, "_shown"),
    # copy_forked(spec): copies the blocks in whose middle prompts end, before the tail
    "prefill.copy_forked": (PackedStep, "copy_forked"),
    # attention_of_sampled(chunks, packed, longest) -> DecodeAttention of the last layer's sampled tokens alone; None
    "prefill.last_attention": (PackedPass, "_attention_of_sampled"),
    # numbers: tokens from which a step is large; tokens a sample from which the last layer computes only those
    "prefill.large_step": (packed_pass, "LARGE_STEP"),
    "prefill.tokens_a_draw": (packed_pass, "_TOKENS_A_SAMPLE"),
    # replay(spec): of a captured step with chunks
    "prefill.replay": (PackedStep, "replay"),
    # rehearse(): the largest step over padding. try_variant(bucket, variant, exchange_rows): one of decode requests
    "rows.rehearse": (RowStep, "rehearse"),
    "rows.try_variant": (RowStep, "try_variant"),
    "prefill.rehearse": (PackedStep, "rehearse"),
    "mixed.rehearse": (PackedStep, "rehearse"),
    # draw(local_TV, sampling, variant, view, drafted) -> (Draw, Verdict, what is reported)
    "tail.draw": (Tail, "_draw"),
    # report(logits_TV, tokens_T, variant) -> TokenLogprobs of sampled tokens
    "tail.logprobs": (LogprobFeature, "report"),
    # fill(hidden_TN, scored_2S, logits_of): those of a step's prompt tokens
    "prompt.logprobs": (StepPromptLogprobs, "fill"),
    # kernels_for(tensor) -> StepKernels (gather, commit, what a proposer observes); None: torch
    "step.kernels": (step_io_kernels, "kernels_for"),
}


def plant(monkeypatch: pytest.MonkeyPatch, fn: object, *, op: str = "", part: str = "") -> None:
    """Replace ``op`` of the reference kernels, or ``part`` of a step (a key of PARTS), by ``fn`` for this test."""
    if bool(op) == bool(part):
        raise ValueError("plant an op or a part")
    if any(row.op == op for row in rows_reference.ROWS):
        monkeypatch.setattr(rows_reference, "ROWS", (planted_row(op, fn, rows_reference.ROWS), *rows_reference.ROWS))
        return
    owner, path = (TableOps, op) if op else PARTS[part]
    name, _, of_name = path.partition(".")
    usual = inspect.getattr_static(owner, name)
    if not callable(fn):
        monkeypatch.setattr(owner, name, fn)
    elif of_name:
        monkeypatch.setattr(owner, name, types.SimpleNamespace(**{of_name: partial(fn, getattr(usual, of_name))}))
    elif isinstance(owner, types.ModuleType):
        monkeypatch.setattr(owner, name, partial(fn, usual))
    else:
        monkeypatch.setattr(owner, name, _method(fn, lambda one: usual.__get__(one), usual))


def planted_row(op: str, fn: Any, rows: Sequence[Row]) -> Row:
    """A row before ``rows`` that calls ``fn`` with what they would have run."""

    def bind(ops: Any) -> Op:
        rest = [row for row in rows if row.op == op and (not ops.invariant or INVARIANT in row.form)]
        return partial(fn, ops.bound(rest))

    return Row(op, bind, frozenset((INVARIANT,)))


def plant_replay(engine: Engine, fn: Op) -> None:
    """Replace the replays of captured steps with chunks by ``fn(replay, spec)``, for the life of ``engine``."""
    step = engine.executor.prefill
    step.replay = partial(fn, step.replay)  # type: ignore[method-assign]


def _method(fn: Op, usual_of: Callable[[Any], Op], usual: Op) -> Op:
    @wraps(usual)
    def method(one: Any, *given: Any, **named: Any) -> Any:
        return fn(usual_of(one), *given, **named)

    return method


def width_of(usual: Op) -> int:
    """W of the step that a planted part belongs to: maximum tokens that a row appends."""
    width: int = usual.__self__.width  # type: ignore[attr-defined]  # a bound method
    return width


def name_of(usual: Op) -> str:
    """The name of that step, as in launch specs and errors."""
    return str(usual.__self__.name)  # type: ignore[attr-defined]  # a bound method


class Noting:
    """Records the arguments of each call, and calls the op or part that it replaces."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, usual: Op, *given: Any, **named: Any) -> Any:
        self.calls.append((*given, *named.values()))
        return usual(*given, **named)


# ---- kernels ----


def reference_kernels() -> Kernels:
    """Every op in plain torch."""
    return reference_ops()


def invariant_kernels() -> Kernels:
    """Every op in plain torch, token by token: no result depends on the other tokens of the step."""
    return reference_ops(deterministic=True)


def kernels_with(over: Any = None, **planted: object) -> Kernels:
    """``over``, default the reference, with these ops and attributes replaced. AttributeError for unknown names.

    Ops of ``over`` that are composed of other ops use the planted ones.
    """
    over = reference_kernels() if over is None else over
    kind = types.new_class(type(over).__name__, (type(over),))
    rows = over.rows
    for name, what in planted.items():
        usual = getattr(kind, name)
        if any(row.op == name for row in rows):
            rows = (planted_row(name, what, rows), *rows)
        else:
            setattr(kind, name, _method(what, partial(_inherited, kind, name), usual) if callable(what) else what)
    made: TableOps = object.__new__(kind)
    vars(made).update({name: value for name, value in vars(over).items() if name not in planted})
    made.bind_rows(rows, over.keys, invariant=over.invariant)
    return made


def _inherited(kind: type, name: str, one: object) -> Op:
    found: Op = getattr(super(kind, one), name)
    return found


# ---- steps ----


def make_decode_step(parts: StepParts, name: str = "decode") -> RowStep:
    """One token for every decode request."""
    return RowStep(parts, name=name)


def make_window_step(parts: StepParts, width: int | None = None, proposer: Proposer | None = None) -> RowStep:
    """A verification step. Defaults: the width of the limits, the proposer of the parts."""
    return RowStep(parts, width or parts.limits.width, proposer)


def make_prefill_step(parts: StepParts) -> PackedStep:
    """Prefill chunks, and decode requests with one token each."""
    return PackedStep(parts)


def make_mixed_step(parts: StepParts, width: int | None = None) -> PackedStep:
    """Prefill chunks, and decode requests with draft windows of ``width``; default: that of the limits."""
    return PackedStep(parts, DraftTokens(parts, width or parts.limits.width))


def make_row_graphs(*given: Any, **named: Any) -> RowGraphs:
    """Graphs by bucket and sampling variant: of a name, a device, work, a result ring, and row maps by bucket."""
    return RowGraphs(*given, **named)

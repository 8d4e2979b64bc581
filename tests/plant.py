"""Plants wrong, counting and replaced ops and parts of a step. The only file of tests that names their classes.

Everything planted is a function whose first argument is what it replaces, ready to be called:

    A wrong op, in one set of kernels (over the reference, or over another set):

        def knows_its_rows(linear: Op, x_TN: Tensor, *given: Any) -> Tensor:
            return linear(x_TN, *given) * (1 + 1e-3 * len(x_TN))

        with rig(kernels=kernels_with(linear=knows_its_rows)) as engine: ...

    A wrong op, where a test does not make the kernels itself: in the reference, until the test ends.

        plant(monkeypatch, knows_its_rows, op="linear")

    A wrong part of a step, by its name in PARTS, until the test ends:

        def of_another_row(keep: Op, undecided: Undecided) -> None:
            keep(replace(undecided, made_TX=undecided.made_TX.roll(width_of(keep), 0)))

        plant(monkeypatch, of_another_row, part="mixed.keep")

    A counting op or part, which changes nothing:

        proposals = Noting()
        plant(monkeypatch, proposals, part="mixed.propose")
        ...
        assert len(proposals.calls) == 3

A mutant with state is an object whose methods are planted: ``kernels_with(gated_delta=mutant.gated_delta)``. What is
not callable takes the place of a fact: ``kernels_with(slower="Triton is not installed")``,
``plant(monkeypatch, 0, part="prefill.large_step")``. ``monkeypatch.context()`` ends a plant earlier.

Steps for unit tests are made by ``make_decode_step`` and those next to it, kernels by ``reference_kernels`` and those.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from models.kernels.deterministic_reference import DeterministicReferenceKernels
from models.kernels.interface import Kernels as Kernels
from models.kernels.reference import ReferenceKernels
from runtime.execute.proposer import Proposer
from runtime.execute.role import RoleParts
from runtime.execute.sampling import prompt_logprobs
from runtime.execute.step import decode, mixed_window, prefill, proposer_feed, step_io, tail, window, window_io
from runtime.execute.step.decode import DecodeRole
from runtime.execute.step.mixed_window import MixedWindowRole
from runtime.execute.step.prefill import PrefillRole
from runtime.execute.step.prefill_graphs import PrefillGraphs
from runtime.execute.step.row_graphs import RowGraphs
from runtime.execute.step.row_role import RowRole
from runtime.execute.step.tail import Tail
from runtime.execute.step.window import WindowRole

if TYPE_CHECKING:  # ranks that tests start have no use for it
    import pytest

    from runtime.engine import Engine

Op = Callable[..., Any]  # what is planted over, bound to its kernels or step
Owner = type | types.ModuleType

# What a step consists of. "mixed": a step with prefill chunks whose decode requests have draft windows or trees.
PARTS: dict[str, tuple[Owner, str]] = {
    # propose(rows, variant): draft tokens of the first rows, kept for the two parts that follow
    "mixed.propose": (MixedWindowRole, "propose"),
    # gather_packed(tables, chunks, block_size, guesses_SQ, depth_SN) -> Packed: all tokens of the forward pass
    "mixed.gather": (mixed_window, "gather_packed"),
    # tree(slots_B) -> tree_BQ, which nodes a node sees; None: all before it
    "mixed.tree_mask": (MixedWindowRole, "tree"),
    # state_rows(chunks, packed) -> StateRows of the forward pass
    "mixed.state_rows": (MixedWindowRole, "state_rows"),
    # keep(undecided): stores what a recurrent layer made of the draft tokens
    "mixed.keep": (MixedWindowRole, "keep"),
    # take_in(rows, positions_X): updates recurrent state with the accepted tokens
    "mixed.take_in": (MixedWindowRole, "_take_in"),
    # drawing(chunks) -> int64 [X], the tokens that are sampled after
    "mixed.drawing": (MixedWindowRole, "drawing"),
    # proposed(emitting_R, decodes_R, variant) -> Proposed, as the tail verifies it
    "mixed.proposed": (MixedWindowRole, "_proposed"),
    # Proposed(tokens_BQ, ...): the same, as it is made
    "mixed.Proposed": (mixed_window, "Proposed"),
    # of_paged(caches) -> what moves the KV entries of an accepted path; None: nothing does
    "mixed.mover": (mixed_window, "EntryMover.of_paged"),
    # make_memory(): what steps of all widths share
    "mixed.make_memory": (MixedWindowRole, "_make_memory"),
    # gather_decode(tables, rows_B, block_size) -> Gathered
    "decode.gather": (decode, "gather_decode"),
    # StateRows(slots_B, undecided=, tree=) of a verification step without chunks
    "window.state_rows": (window, "StateRows"),
    # lay_out(parents_BQ, depth) -> DraftTree; shown(...) -> Shown, what the proposer is shown of a window
    "window.lay_out": (window_io, "lay_out"),
    "window.shown": (window_io, "_shown"),
    # copy_forked(spec): copies the blocks in whose middle prompts end, before the tail
    "prefill.copy_forked": (PrefillRole, "copy_forked"),
    # attention_of_drawing(chunks, packed, longest) -> DecodeAttention of the last layer's sampled tokens alone; None
    "prefill.last_attention": (PrefillRole, "_attention_of_drawing"),
    # numbers: tokens from which a step is large; tokens a sample from which the last layer computes only those
    "prefill.large_step": (prefill, "LARGE_STEP"),
    "prefill.tokens_a_draw": (prefill, "_TOKENS_A_DRAW"),
    # launch(spec): of a captured step with chunks
    "prefill.replay": (PrefillGraphs, "launch"),
    # rehearse(): the largest step over padding. try_variant(bucket, variant, exchange_rows): one of decode requests
    "rows.rehearse": (RowRole, "rehearse"),
    "rows.try_variant": (RowRole, "try_variant"),
    "prefill.rehearse": (PrefillRole, "rehearse"),
    "mixed.rehearse": (MixedWindowRole, "rehearse"),
    # draw(local_BV, sampling, variant, seen, edits) -> (Draw, Verdict, log-probabilities)
    "tail.draw": (Tail, "_draw"),
    # token_logprobs(logits_BV, tokens_B, top) -> TokenLogprobs
    "tail.logprobs": (tail, "token_logprobs"),
    "prompt.logprobs": (prompt_logprobs, "token_logprobs"),
    # kernels_for(tensor) -> StepKernels of what a decode step gathers and commits, of what a proposer is shown; of a
    # window WindowKernels; None for torch
    "decode.kernels": (step_io, "kernels_for"),
    "proposer.kernels": (proposer_feed, "kernels_for"),
    "window.kernels": (window_io, "window_kernels_for"),
}


def plant(monkeypatch: pytest.MonkeyPatch, fn: object, *, op: str = "", part: str = "") -> None:
    """``fn`` in the place of ``op`` of the reference kernels, or of ``part`` of a step: one of PARTS."""
    if bool(op) == bool(part):
        raise ValueError("plant an op or a part")
    owner, path = (ReferenceKernels, op) if op else PARTS[part]
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


def plant_replay(engine: Engine, fn: Op) -> None:
    """``fn(replay, spec)`` in the place of the replays of captured steps with chunks, in this engine for good."""
    graphs = engine.executor.prefill.graphs
    graphs.launch = partial(fn, graphs.launch)  # type: ignore[method-assign]


def _method(fn: Op, usual_of: Callable[[Any], Op], usual: Op) -> Op:
    @wraps(usual)
    def method(one: Any, *given: Any, **named: Any) -> Any:
        return fn(usual_of(one), *given, **named)

    return method


def width_of(usual: Op) -> int:
    """W of the step that a planted part belongs to: the most tokens that a row of it gains."""
    width: int = usual.__self__.width  # type: ignore[attr-defined]  # a bound method
    return width


def name_of(usual: Op) -> str:
    """The name of that step, as in launch specs and errors."""
    return str(usual.__self__.name)  # type: ignore[attr-defined]  # a bound method


class Noting:
    """Notes what it is called with, and does what it is planted over."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, usual: Op, *given: Any, **named: Any) -> Any:
        self.calls.append((*given, *named.values()))
        return usual(*given, **named)


# ---- kernels ----


def reference_kernels() -> Kernels:
    """Every op in plain torch."""
    return ReferenceKernels()


def invariant_kernels() -> Kernels:
    """The same, token by token: no result depends on what shares a step."""
    return DeterministicReferenceKernels()


def kernels_with(over: Kernels | None = None, **planted: object) -> Kernels:
    """``over``, or the reference, with these ops and facts in the place of its own. AttributeError for unknown ones.

    An op that ``over`` composes of others finds the planted ones there, too.
    """
    over = reference_kernels() if over is None else over
    kind = types.new_class(type(over).__name__, (type(over),))
    for name, what in planted.items():
        usual = getattr(kind, name)
        setattr(kind, name, _method(what, partial(_inherited, kind, name), usual) if callable(what) else what)
    made: Kernels = object.__new__(kind)
    vars(made).update(vars(over))
    return made


def _inherited(kind: type, name: str, one: object) -> Op:
    found: Op = getattr(super(kind, one), name)
    return found


# ---- steps ----


def make_decode_step(parts: RoleParts, name: str = "decode") -> DecodeRole:
    """One token for every decode request."""
    return DecodeRole(parts, name)


def make_window_step(parts: RoleParts, width: int | None = None, proposer: Proposer | None = None) -> WindowRole:
    """A verification step; of the limits' width and the parts' proposer where others are not given."""
    if proposer is None:
        return WindowRole.of_proposer(parts, width)
    return WindowRole(parts, width or parts.limits.width, proposer)


def make_prefill_step(parts: RoleParts) -> PrefillRole:
    """Prefill chunks, and decode requests with one token each."""
    return PrefillRole(parts)


def make_mixed_step(parts: RoleParts, width: int | None = None) -> MixedWindowRole:
    """Prefill chunks, and decode requests with draft windows of ``width``, the limits' where it is not given."""
    return MixedWindowRole(parts, width)


def make_row_graphs(*given: Any, **named: Any) -> RowGraphs:
    """Graphs by bucket and sampling variant: of a name, a device, work, a result ring, and row maps by bucket."""
    return RowGraphs(*given, **named)


def make_prefill_graphs(step: PrefillRole, parts: RoleParts) -> PrefillGraphs:
    """Graphs of a step with prefill chunks, over other parts than its own; none is captured yet."""
    return PrefillGraphs(parts, step)

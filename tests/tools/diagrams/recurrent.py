"""Draws the tables of docs/recurrent-state.md from the code: banks, and what writes them in a step.

    python -m tests.tools.diagrams.recurrent           rewrites them (make diagram)
    python -m tests.tools.diagrams.recurrent --check   exit code 1 when they are not current

Knows: which functions make a step's StateRows, and what the fields of StateRows mean for the banks.
Does not know: the text around the tables.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

from models.cache_layout import SlotState, StateBanks
from models.inputs import StateRows
from models.layers.context import ModelContext
from models.layers.mixer import Mixer
from models.ops.select import reference_ops
from models.registry import config_from_folder, model_class
from parallel.comm.collectives import SingleRank
from runtime.execute.executor import Executor
from runtime.execute.staging import Chunks, Staging
from runtime.execute.step.drafts import DraftTokens
from runtime.execute.step.packed_pass import DecodeTokens
from runtime.execute.step.row_step import RowStep
from tests.tools.diagrams import drawn
from tests.tools.diagrams.drawn import DOCS

PAGE = DOCS / "recurrent-state.md"
SHAPES = DOCS.parent / "models" / "shapes"

# ---- what layers declare ----


@dataclass(frozen=True)
class Declared:
    """What ``layers`` recurrent layers of a shape keep, whole on one rank, in the dtype of its checkpoint."""

    shape: str
    layers: int
    mixer: Mixer[StateBanks]
    kind: SlotState
    itemsize: int

    @property
    def slot_bytes(self) -> int:
        """Of a sequence, and of each snapshot of its state."""
        return self.layers * self.kind.bytes_per_slot

    @property
    def kept_bytes(self) -> int:
        """Of a draft token, between verification and commit."""
        return self.layers * self.mixer.made_size * self.itemsize


def declared() -> Iterator[Declared]:
    """Of every shape with recurrent layers."""
    for path in sorted(SHAPES.glob("*/config.json")):
        config = config_from_folder(path.parent)
        with torch.device("meta"):
            context = ModelContext(SingleRank(), reference_ops(), config.dtype)
            model = model_class(config.architecture)(config, context)
        for state, layers in model.cache_layout.states:
            mixer = next(one for one in model.slot_mixers.values() if one.cache == state)
            yield Declared(path.parent.name, len(layers), mixer, state, config.dtype.itemsize)


def bank_table() -> str:
    rows = [
        "| shape | layers | mixer | banks: row of a layer | MiB a slot | per draft token |",
        "| --- | ---: | --- | --- | ---: | ---: |",
    ]
    for one in declared():
        banks = "; ".join(
            f"`{name}` {' x '.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
            for name, (shape, dtype) in one.kind.tensors.items()
        )
        kept = f"{one.kept_bytes / 2**10:,.0f} KiB" if one.mixer.replays else "no windows"
        mixer, size = type(one.mixer).__name__, f"{one.slot_bytes / 2**20:.1f}"
        rows.append(f"| {one.shape} | {one.layers} | `{mixer}` | {banks} | {size} | {kept} |")
    return "\n".join(rows)


# ---- what writes them ----

COPIES = {  # what Staging.apply calls, in its order
    "on_forked": ("fork of a parked session", "first in the step", "its row, from its parent's"),
    "on_seated": ("admission", "before the forward pass", "its row, with zeros"),
    "on_restored": ("prefix hit", "the same, after the zeros", "its row, from its snapshot's"),
}
AFTER = {  # what Executor._copy_after calls
    "copy_states": ("forked answer, snapshot", "after the step", "its row, from that of the prompt's slot"),
}
PASSES: tuple[tuple[tuple[str, ...], Callable[..., Any]], ...] = (  # functions, and the steps of their StateRows
    (("decode", "windows, trees", "windows, trees"), RowStep.decode),
    (("prefill chunks, with decode rows",), DecodeTokens.state_rows),
    (("mixed step with windows: forward",), DraftTokens.state_rows),
    (("mixed step with windows: tail",), DraftTokens.finish),
)


def writer_table() -> str:
    rows = ["| step | where | writes, of each bank |", "| --- | --- | --- |"]
    for function, meanings in ((Staging.apply, COPIES), (Executor._copy_after, AFTER)):
        called = [name for name, _ in _calls(function) if name in meanings]
        if missing := meanings.keys() - set(called):
            raise ValueError(f"{function.__qualname__} does not call {', '.join(sorted(missing))}")
        rows += [f"| {' | '.join(meanings[name])} |" for name in called]
    for steps, function in PASSES:
        for step, made in zip(steps, state_rows_of(function), strict=True):
            rows.append(f"| {step} | `{function.__qualname__}`: {_named(made)} | {writes(made)} |")
    return "\n".join(rows)


def state_rows_of(function: Callable[..., Any]) -> list[frozenset[str]]:
    """The fields of each StateRows that ``function`` makes, in the order of the text; of one that is made from another
    those of both. ValueError where it makes none."""
    every = [field.name for field in fields(StateRows)]
    found: list[frozenset[str]] = []
    for name, call in _calls(function):
        given = {keyword.arg or "" for keyword in call.keywords if not _is_none(keyword.value)}
        removed = {keyword.arg or "" for keyword in call.keywords if _is_none(keyword.value)}
        if name == "StateRows":
            found.append(frozenset([*every[: len(call.args)], *given]))
        elif name in ("state_rows", "slot_state"):
            found += state_rows_of(Chunks.state_rows if name == "state_rows" else RowStep.slot_state)
        elif name == "replace" and found and given <= set(every):
            made = (found[-1] | given) - removed
            found = [*found[:-1], made] if "kept_B" not in made else [*found, made]  # of one pass, or of a further one
    if not found:
        raise ValueError(f"{function.__qualname__} makes no StateRows")
    return found


def writes(made: frozenset[str]) -> str:
    """What the fields of a StateRows say of the banks."""
    if "kept_B" in made:
        path = ", along a tree's path" if "path_BW" in made else ""
        return f"each live row's, with the accepted tokens{path}"
    if "writes_B" in made:
        return "rows with chunks, with all new tokens; windows only read"
    if "undecided" in made:
        return "none: state is only read"
    return "each live row's, with all new tokens" if "ends_B" in made else "each live row's, with its token"


def _named(made: frozenset[str]) -> str:
    return ", ".join(f"`{field.name}`" for field in fields(StateRows) if field.name in made)


def _calls(function: Callable[..., Any]) -> list[tuple[str, ast.Call]]:
    """(name, call) of everything that ``function`` calls, in the order of the text."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = [
        (node.lineno, node.col_offset, node.func.id if isinstance(node.func, ast.Name) else node.func.attr, node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
    ]
    return [(name, node) for _, _, name, node in sorted(found, key=lambda one: one[:2])]


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


# ---- the page ----

TABLES = {"banks": bank_table, "writers": writer_table}


def redrawn(text: str) -> str:
    return drawn.redrawn(text, TABLES)


if __name__ == "__main__":
    sys.exit(drawn.keep(PAGE, redrawn, __doc__))

"""Draws the tables of docs/recurrent-state.md from the code: banks, who writes them in a step, and tests of lives.

    python -m tests.tools.diagrams.recurrent           rewrites them (make diagram)
    python -m tests.tools.diagrams.recurrent --check   exit code 1 when they are not current

Knows: which functions say whose state a step's rows continue, what the fields of StateRows mean for that, and where the
grid of tests is. Does not know: what the text around the tables says.
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
from models.config import ModelConfig
from models.inputs import StateRows
from models.kernels.reference import ReferenceKernels
from models.layers.context import ModelContext
from models.layers.mixer import Mixer
from models.registry import model_class
from parallel.comm.collectives import SingleRank
from runtime.execute.executor import Executor
from runtime.execute.staging import Chunks, Staging
from runtime.execute.step.decode import DecodeRole
from runtime.execute.step.mixed_window import MixedWindowRole
from runtime.execute.step.prefill import PrefillRole
from runtime.execute.step.window import WindowRole
from tests.runtime.engine import hybrid_grid
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
        """Of a token of a window, between verify and take in."""
        return self.layers * self.mixer.made_size * self.itemsize


def declared() -> Iterator[Declared]:
    """Of every shape with recurrent layers."""
    for path in sorted(SHAPES.glob("*/config.json")):
        config = ModelConfig.from_folder(path.parent)
        with torch.device("meta"):
            context = ModelContext(SingleRank(), ReferenceKernels(), config.dtype)
            model = model_class(config.architecture)(config, context)
        for kind, layers in model.cache_layout.kinds:
            if isinstance(kind, SlotState):
                mixer = next(one for one in model.slot_mixers.values() if one.cache == kind)
                yield Declared(path.parent.name, layers, mixer, kind, config.dtype.itemsize)


def bank_table() -> str:
    rows = [
        "| shape | layers | mixer | banks: a row of a layer | MiB a slot | kept of a token until it is decided |",
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


# ---- who writes them ----

COPIES = {  # what Staging.apply calls, in its order
    "on_forked": ("a fork of a parked session", "before everything else of the step", "its row, from its parent's"),
    "on_seated": ("a request that is seated", "before the forward pass", "its row, with zeros"),
    "on_restored": ("a prefix hit", "the same, behind the zeros", "its row, from its snapshot's"),
}
BEHIND = {  # what Executor._copy_behind calls
    "copy_states": ("a forked answer, a snapshot", "behind the step", "its row, from that of the prompt's slot"),
}
PASSES: tuple[tuple[str, Callable[..., Any]], ...] = (  # functions that make a step's StateRows
    ("one token a row", DecodeRole.decode),
    ("chunks, with rows of one token beside them", PrefillRole.state_rows),
    ("windows and trees", WindowRole.decode),
    ("windows beside chunks, forward pass", MixedWindowRole.state_rows),
    ("windows beside chunks, tail", MixedWindowRole.finish),
)


def writer_table() -> str:
    rows = ["| who | where | writes, of each bank |", "| --- | --- | --- |"]
    for function, meanings in ((Staging.apply, COPIES), (Executor._copy_behind, BEHIND)):
        called = [name for name, _ in _calls(function) if name in meanings]
        if missing := meanings.keys() - set(called):
            raise ValueError(f"{function.__qualname__} does not call {', '.join(sorted(missing))}")
        rows += [f"| {' | '.join(meanings[name])} |" for name in called]
    for step, function in PASSES:
        for made in state_rows_of(function):
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
        elif name == "state_rows":
            found += state_rows_of(Chunks.state_rows)
        elif name == "replace" and found and given <= set(every):
            made = (found[-1] | given) - removed
            found = [*found[:-1], made] if "kept_B" not in made else [*found, made]  # of one pass, or of a further one
    if not found:
        raise ValueError(f"{function.__qualname__} makes no StateRows")
    return found


def writes(made: frozenset[str]) -> str:
    """What the fields of a StateRows say of the banks."""
    if "kept_B" in made:
        path = ", along the path of a tree" if "path_BW" in made else ""
        return f"each live row's, with the tokens that are kept{path}"
    if "writes_B" in made:
        return "those of rows with chunks, with all new tokens; windows' rows are read only"
    if "undecided" in made:
        return "none: state is read only"
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


# ---- which lives are compared ----

FAMILIES = {
    "qwen3.5": "Qwen3.5 (gated delta nets)",
    "qwen3-next": "Qwen3-Next (gated delta nets)",
    "qwen3.5-moe": "Qwen3.5, sparse (gated delta nets)",
    "nemotron-h": "Nemotron-H (Mamba-2)",
}
PROPOSERS = {
    "ngram": "n-gram",
    "mtp": "MTP",
    "dflash": "DFlash",
    "eagle3": "EAGLE-3",
    "replay": "replay",
    "tree": "DFlash, trees",
}


def life_table() -> str:
    """What `make test` has of the grid."""
    every = hybrid_grid.lives()
    cells: dict[tuple[str, str], list[str]] = {}
    for family, proposer, mode, depth, _ in (one.values for one in every if not one.marks):
        cells.setdefault((family, proposer), []).append(f"{mode}, D {depth}")
    families, proposers = ([*dict.fromkeys(one.values[axis] for one in every)] for axis in (0, 1))
    rows = [
        f"| in `make test` | {' | '.join(PROPOSERS[name] for name in proposers)} |",
        f"| --- |{' --- |' * len(proposers)}",
    ]
    for family in families:
        has = [" and ".join(cells.get((family, proposer), ["none"])) for proposer in proposers]
        rows.append(f"| {FAMILIES[family]} | {' | '.join(has)} |")
    short, depths = sum(map(len, cells.values())), hybrid_grid.DEPTHS
    grid = {one.values[:4] for one in every}
    whole = f"{len(families)} families x {len(proposers)} proposers x {len(hybrid_grid.MODES)} kinds of sampling"
    whole += f" x D {min(depths)}..{max(depths)}"
    return "\n".join([*rows, "", f"The whole grid is {whole}: {len(grid)} lives. `make test` has {short} of them."])


# ---- the page ----

TABLES = {"banks": bank_table, "writers": writer_table, "lives": life_table}


def redrawn(text: str) -> str:
    return drawn.redrawn(text, TABLES)


if __name__ == "__main__":
    sys.exit(drawn.keep(PAGE, redrawn, __doc__))

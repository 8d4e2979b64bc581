"""Draws the stages of a verification step in docs/speculation.md from the calls of the code that runs it.

    python -m tests.tools.diagrams.speculation           rewrites it (make diagram)
    python -m tests.tools.diagrams.speculation --check   exit code 1 when it is not current

Knows: which calls are stages, and what each is for. Does not know: what the text around the drawing says.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from runtime.execute.proposer import guesses_for
from runtime.execute.step.row_step import RowStep
from runtime.execute.step.tail import Tail
from tests.tools.diagrams import drawn
from tests.tools.diagrams.drawn import DOCS

DOCUMENT = DOCS / "speculation.md"
_PARTS: dict[str, Callable[..., object]] = {  # calls that contain stages
    "guesses_for": guesses_for,
    "_gather": RowStep._gather,
    "finish": Tail.finish,
}
STAGES = {  # by the call: the stage, and what it does
    "propose": ("propose", "W - 1 draft tokens per row, from the drafter's state by slot"),
    "gather_window": ("gather", "last token and draft tokens, positions, KV slots"),
    "forward": ("verify", "target forward pass over W tokens of every row"),
    "_draw": ("sample", "the target's token at every position"),
    "commit": (
        "accept",
        "draft tokens that equal the samples, and one more token; write token, length, end and history by slot; append "
        "to the result ring",
    ),
    "move_path": ("compact", "draft trees: move the KV of the accepted path to a chain's positions"),
    "show": ("observe", "hidden states of the accepted tokens, to the drafter"),
}


def calls(function: Callable[..., Any]) -> list[str]:
    """The names of everything that ``function`` calls, in the order of the text."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            found.append((node.lineno, node.col_offset, name))
    return [name for _, _, name in sorted(found)]


def stages() -> list[str]:
    """Stages of one verification step, in order. ValueError if the code lacks the call of a stage."""

    def expanded(function: Callable[..., Any]) -> Iterator[str]:
        for name in calls(function):
            yield from expanded(_PARTS[name]) if name in _PARTS else [name]

    found = [name for name in expanded(RowStep.decode) if name in STAGES]
    if missing := STAGES.keys() - set(found):
        raise ValueError(f"no verification step calls {', '.join(sorted(missing))}")
    return found


def diagram() -> str:
    """The stages as a Mermaid diagram."""
    lines = ["```mermaid", "flowchart TB", '    slot[("by slot: last token, length, history, drafter state")]']
    before = "slot"
    for name in stages():
        stage, what = STAGES[name]
        lines.append(f'    {before} --> {stage}["{stage}: {what}"]')
        before = stage
    return "\n".join([*lines, f"    {before} -->|next step, of any width| slot", "```"])


def redrawn(text: str) -> str:
    return drawn.redrawn(text, {"round": diagram})


if __name__ == "__main__":
    sys.exit(drawn.keep(DOCUMENT, redrawn, __doc__))

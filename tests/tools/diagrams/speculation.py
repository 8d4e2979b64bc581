"""Draws the round of docs/speculation.md from the code that runs it: the calls of a window's step, in their order.

    python -m tests.tools.diagrams.speculation           rewrites it (make diagram)
    python -m tests.tools.diagrams.speculation --check   exit code 1 when it is not current

Knows: which calls are stages, and what each is for. Does not know: what the text around the drawing says.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from runtime.execute.proposer import guesses_for
from runtime.execute.step.tail import Tail
from runtime.execute.step.window import WindowRole
from tests.tools.diagrams import drawn
from tests.tools.diagrams.drawn import DOCS

DOCUMENT = DOCS / "speculation.md"
_PARTS: dict[str, Callable[..., object]] = {  # calls of a round that have stages of their own
    "guesses_for": guesses_for,
    "finish_window": Tail.finish_window,
}
STAGES = {  # by the call: the stage, and what it does
    "propose": ("propose", "W - 1 guesses a row, from what the proposer keeps by slot"),
    "gather_window": ("gather", "last token and guesses, positions, KV places, by slot"),
    "forward": ("verify", "the target over all W tokens of every row"),
    "_draw": ("draw", "the target's own token at every position"),
    "commit_window": (
        "accept",
        "guesses that are what was drawn before them, and one token more; last token, length, end and history by slot; "
        "the result ring",
    ),
    "move_path": ("compact", "of a tree: the KV of its accepted path, to where a chain's would be"),
    "show_window": ("observe", "true hidden states of the tokens kept, to the proposer"),
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
    """Of one round. ValueError where the code has none of the calls that a stage stands for."""
    names: list[str] = []
    for name in calls(WindowRole.decode):
        names += calls(_PARTS[name]) if name in _PARTS else [name]
    found = [name for name in names if name in STAGES]
    if missing := STAGES.keys() - set(found):
        raise ValueError(f"no window calls {', '.join(sorted(missing))}")
    return found


def diagram() -> str:
    """The stages of a round as a Mermaid diagram."""
    lines = ["```mermaid", "flowchart TB", '    slot[("by slot: last token, length, history, the proposer\'s state")]']
    before = "slot"
    for name in stages():
        stage, what = STAGES[name]
        lines.append(f'    {before} --> {stage}["{stage}: {what}"]')
        before = stage
    return "\n".join([*lines, f"    {before} -->|the next round, of any width| slot", "```"])


def redrawn(text: str) -> str:
    return drawn.redrawn(text, {"round": diagram})


if __name__ == "__main__":
    sys.exit(drawn.keep(DOCUMENT, redrawn, __doc__))

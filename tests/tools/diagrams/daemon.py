"""Draws the protocol's tables into docs/daemon.md: ``python -m tests.tools.diagrams.daemon`` (``--check`` looks).

Knows: the verbs, the options of START and the frames, as the code has them. Does not know: the prose around them.
"""

from __future__ import annotations

import sys

from runtime.daemon.frames import PAYLOADS
from runtime.daemon.verbs import OPTIONS, VERBS
from tests.tools.diagrams import drawn
from tests.tools.diagrams.drawn import DOCS

PAGE = DOCS / "daemon.md"


def verb_table() -> str:
    rows = ["| verb | arguments | what it does | what follows the ACK |", "| --- | --- | --- | --- |"]
    for name, verb in VERBS.items():
        arguments = f"`{verb.arguments}`".replace("|", "\\|") if verb.arguments else ""
        rows.append(f"| `{name}` | {arguments} | {verb.effect} | {verb.reply or '-'} |")
    return "\n".join(rows)


def frame_table() -> str:
    rows = ["| number | kind | payload | when |", "| ---: | --- | --- | --- |"]
    rows += [f"| {int(kind)} | {kind.name} | {payload} | {when} |" for kind, (payload, when) in PAYLOADS.items()]
    return "\n".join(rows)


def option_table() -> str:
    rows = ["| option of START | what it is |", "| --- | --- |"]
    rows += [f"| `{name}` | {meaning or 'as in `SamplingParams`'} |" for name, (_, meaning) in OPTIONS.items()]
    return "\n".join(rows)


def seed_table() -> str:
    """Verbs that have another form in the daemons that the protocol comes from."""
    rows = ["| here | there |", "| --- | --- |"]
    rows += [f"| `{name}` | {verb.seed} |" for name, verb in VERBS.items() if verb.seed not in ("none", f"`{name}`")]
    return "\n".join(rows)


TABLES = {"verbs": verb_table, "frames": frame_table, "options": option_table, "seeds": seed_table}


def redrawn(text: str) -> str:
    return drawn.redrawn(text, TABLES)


if __name__ == "__main__":
    sys.exit(drawn.keep(PAGE, redrawn, __doc__))

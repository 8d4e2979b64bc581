"""What the doctor has to say: facts, and findings with what to do about them.

Knows: how both look as text and as JSON. Does not know: what is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """``ERROR`` alone means that the runtime cannot run here."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """``text`` says what is the case, ``advice`` what to type or change; an OK needs none."""

    level: Level
    text: str
    advice: str = ""


@dataclass(slots=True)
class Section:
    """One subject. ``facts`` are plain JSON values, numbers in the unit that their name ends with."""

    title: str
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def ok(self, text: str) -> None:
        self.findings.append(Finding(Level.OK, text))

    def note(self, text: str, advice: str = "") -> None:
        self.findings.append(Finding(Level.NOTE, text, advice))

    def warn(self, text: str, advice: str) -> None:
        self.findings.append(Finding(Level.WARNING, text, advice))

    def error(self, text: str, advice: str) -> None:
        self.findings.append(Finding(Level.ERROR, text, advice))

    def as_json(self) -> dict[str, Any]:
        findings = [{"level": f.level.value, "text": f.text, "advice": f.advice} for f in self.findings]
        return {"title": self.title, "facts": self.facts, "findings": findings}

    def as_text(self) -> str:
        lines = [self.title]
        width = max((len(name) for name in self.facts), default=0)
        for name, value in self.facts.items():
            shown = _shown(value)
            lines.append(f"  {name:<{width}}  {shown[0]}" if len(shown) == 1 else f"  {name}")
            lines += [f"    {line}" for line in shown[1:]] if len(shown) > 1 else []
        for finding in self.findings:
            lines.append(f"  {_MARKS[finding.level]} {finding.text}")
            if finding.advice:
                lines.append(f"          -> {finding.advice}")
        return "\n".join(lines)


_MARKS = {Level.OK: "     ok", Level.NOTE: "   note", Level.WARNING: "WARNING", Level.ERROR: "  ERROR"}


def worst(sections: Sequence[Section]) -> Level:
    levels = [finding.level for section in sections for finding in section.findings]
    return max(levels, key=list(Level).index, default=Level.OK)


def _shown(value: Any) -> list[str]:
    """One line for a plain value; for a table an empty first line, and one line a row."""
    if isinstance(value, Mapping):
        return [", ".join(f"{key} {_plain(each)}" for key, each in value.items())]
    if isinstance(value, list) and value and all(isinstance(row, list) for row in value):
        cells = [[_plain(cell) for cell in row] for row in value]
        widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
        return ["", *("  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in cells)]
    if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
        return ["", *(_shown(row)[0] for row in value)]
    if isinstance(value, list):
        return [", ".join(map(_plain, value)) or "none"]
    return [_plain(value)]


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)

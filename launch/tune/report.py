"""What a run of `tune` found, as a table: every shape, its old and new choice, microseconds before and after.

Knows: how choices are written for a reader. Does not know: how anything was measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from hashlib import blake2b

from launch.tune.journal import AnyChoice, Measured
from models.kernels.attention.decode_variant import DecodeVariant
from models.kernels.matmul.choice_table import Blas, CublasLt

HEADER = ("shape", "before", "after", "us before", "us after", "gain")


def shown(choice: AnyChoice) -> str:
    """A choice in a few characters: its kind, and its block sizes in the order of its fields."""
    match choice:
        case None:
            return "built-in rule"
        case Blas():
            return "cuBLAS"
        case CublasLt():
            return f"cuBLASLt {blake2b(choice.algorithm.encode(), digest_size=3).hexdigest()}"
        case DecodeVariant():
            return f"{'TMA' if choice.tma else 'splits'} {choice.block_n},{choice.stages},{choice.warps}"
    values = [str(int(value)) for value in dataclasses.asdict(choice).values()]
    return f"{type(choice).__name__} {','.join(values)}"


def row_of(measured: Measured) -> tuple[str, ...]:
    before = measured.us_before
    gain = "" if before is None else f"{100 * (1 - measured.us_after / before):.1f}%"
    return (
        measured.key,
        shown(measured.before),
        shown(measured.after) if measured.changed else "the same",
        "does not run" if before is None else f"{before:.2f}",
        f"{measured.us_after:.2f}",
        gain,
    )


def table(found: Sequence[Measured]) -> str:
    """Markdown, also legible as it is: columns are as wide as their widest cell."""
    rows = [HEADER, *map(row_of, found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines)


def summary(found: Sequence[Measured], failed: int) -> str:
    """One line: how many, how many changed, and what that gains where each stands for one launch."""
    changed = [one for one in found if one.changed]
    before = sum(one.us_before for one in changed if one.us_before is not None)
    after = sum(one.us_after for one in changed if one.us_before is not None)
    gain = f", {100 * (1 - after / before):.1f}% less time in these" if before else ""
    left_out = f"; {failed} candidates did not run, the journal says why" if failed else ""
    return f"{len(found)} measured, {len(changed)} with another choice{gain}{left_out}"

"""Tables that `launch tune` made, on one GPU or on several side by side, taken over into the table that is shipped.

    python3 -m tests.bench.merge_choices FOLDER [FOLDER ...]      # into models/kernels/tuned/<name of the GPU>.json
    python3 -m tests.bench.merge_choices FOLDER --into TABLE --dry-run

FOLDER: what --out of `launch tune` was, or a folder above several. Every *.tuned.json in it is read. What the shipped
table holds of other products stays as it is; a GPU that has none yet gets one.

Knows: tables. Does not know: GPUs, or which choice is the better one: where two files chose differently for one
product, nothing is written, and both are named.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from models.kernels.matmul import choice_table
from models.kernels.matmul.choice_table import SHIPPED_CHOICES, ChoiceTable


def found_under(folders: Sequence[Path]) -> ChoiceTable:
    """All that the *.tuned.json in ``folders`` and below hold.

    Raises ValueError for a folder without one, for tables of different GPUs, and for two that chose differently.
    """
    found, source = ChoiceTable(), dict[tuple[str, object], tuple[object, Path]]()
    for folder in folders:
        paths = sorted(folder.rglob("*.tuned.json"))
        if not paths:
            raise ValueError(f"{folder} holds no *.tuned.json: name what launch tune wrote to with --out")
        for path in paths:
            table = choice_table.load(path)
            if table.gpu is None:
                raise ValueError(f"{path} does not say on which GPU it was measured: it is no table of launch tune")
            if found.gpu is not None and found.gpu.name != table.gpu.name:
                raise ValueError(f"{path} is of a {table.gpu.name}, others are of a {found.gpu.name}: name one of them")
            found.gpu = table.gpu
            for (section, key), choice in entries(table).items():
                held, first = source.setdefault((section, key), (choice, path))
                if held != choice:
                    raise ValueError(f"{path} and {first} chose differently for {key}: name only one of them")
            found.update(table)
    return found


def entries(table: ChoiceTable) -> dict[tuple[str, object], object]:
    """Every choice by its section and key."""
    found: dict[tuple[str, object], object] = {("choices", key): choice for key, choice in table.choices.items()}
    found |= {("attention", key): form for key, form in table.attention.items()}
    return found | {("all_reduce", ranks): limits for ranks, limits in table.all_reduce.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--into", type=Path, metavar="TABLE", help="default: the table of that GPU that is shipped")
    parser.add_argument("--dry-run", action="store_true", help="say what would change, write nothing")
    args = parser.parse_args(argv)
    try:
        found = found_under(args.folders)
        assert found.gpu is not None
        into = args.into or SHIPPED_CHOICES / f"{choice_table.file_name(found.gpu.name)}.json"
        table = choice_table.load(into)
        if table.gpu is not None and table.gpu.name != found.gpu.name:
            raise ValueError(f"{into} is of a {table.gpu.name}, what was found of a {found.gpu.name}")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    before = entries(table)
    for entry, choice in sorted(entries(found).items(), key=str):
        if before.get(entry) != choice:
            was = f", was {before[entry]}" if entry in before else ""
            print(f"{entry[1]}: {choice}{was}")
    table.update(found)
    table.gpu = found.gpu
    if not args.dry_run:
        choice_table.save(into, table)
        print(f"{into}: {len(entries(table))} choices")
    return 0


if __name__ == "__main__":
    sys.exit(main())

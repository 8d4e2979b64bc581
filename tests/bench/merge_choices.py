"""Choices that tune.py found, on one GPU or on several side by side, taken over into a table of all.

    python3 -m tests.bench.merge_choices FOLDER [FOLDER ...]      # into models/kernels/tuned/nvidia-h200.json
    python3 -m tests.bench.merge_choices FOLDER --into TABLE --dry-run

Reads every choices.json under the folders. What the table holds of other products stays as it is.

Knows: tables. Does not know: GPUs, or which choice is the better one: where two files chose differently for one
product, nothing is written, and both are named.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from models.kernels.matmul import choice_table
from models.kernels.matmul.choice_table import ChoiceTable

SHIPPED = Path(__file__).resolve().parents[2] / "models" / "kernels" / "tuned" / "nvidia-h200.json"


def found_under(folders: Sequence[Path]) -> ChoiceTable:
    """All choices in the choices.json of ``folders`` and below. Raises ValueError for none, and for two that differ."""
    found, source = ChoiceTable(), dict[str, Path]()
    for folder in folders:
        paths = sorted(folder.rglob("choices.json"))
        if not paths:
            raise ValueError(f"{folder} holds no choices.json: name what tune.py wrote to with --out")
        for path in paths:
            for key, choice in choice_table.load(path).choices.items():
                if found.choices.setdefault(key, choice) != choice:
                    raise ValueError(f"{path} and {source[key]} chose differently for {key}: name only one of them")
                source.setdefault(key, path)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--into", type=Path, default=SHIPPED, metavar="TABLE")
    parser.add_argument("--dry-run", action="store_true", help="say what would change, write nothing")
    args = parser.parse_args(argv)
    try:
        table, found = choice_table.load(args.into), found_under(args.folders)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for key, choice in sorted(found.choices.items()):
        held = table.choices.get(key)
        if held != choice:
            print(f"{key}: {choice}" + (f", was {held}" if held else ""))
    table.update(found)
    if not args.dry_run:
        choice_table.save(args.into, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

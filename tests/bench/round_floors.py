"""Floors of rounds of speculation beside those of plain steps, without a GPU: ``python -m tests.bench.round_floors``.

One line a kind of round, as docs/lab/measurements/speculation.md times them: bytes and FLOPs that it needs on one rank,
their time (at an H200's rates, as `bench latency --roofline`), and that over the floor of a step of one token a row.

Knows: which rounds are measured. Does not know: what a floor is made of (launch/bench/roofline.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.bench.options import H200_BYTES_PER_S, H200_FLOP_PER_S
from launch.bench.roofline import Ceilings, Floor, Shape, drafter_shape, round_floor, target_floor
from models.config import ModelConfig
from runtime.speculative_config import speculative_config

SHAPES = Path(__file__).parents[2] / "models/shapes"
_BESIDE = SHAPES / "qwen3-8b"  # whose folder has drafters' shapes
_DFLASH, _MTP = ({"method": name, "model": str(_BESIDE / name)} for name in ("dflash", "mtp"))
ROUNDS: dict[str, dict[str, Any]] = {
    "DFlash, block 16": {**_DFLASH, "num_speculative_tokens": 15},
    "DFlash, block 4": {**_DFLASH, "num_speculative_tokens": 3},
    "MTP, k = 3": {**_MTP, "num_speculative_tokens": 3},
    "MTP, k = 3, 32,768 ids": {**_MTP, "num_speculative_tokens": 3, "token_map": 32768},
    "MTP, k = 4": {**_MTP, "num_speculative_tokens": 4},
    "EAGLE-3, k = 3, 32,000 ids": {
        "method": "eagle3",
        "model": str(_BESIDE / "eagle3"),
        "num_speculative_tokens": 3,
    },
    "DFlash, tree of 32, depth 15": {**_DFLASH, "num_speculative_tokens": 15, "tree_size": 32},
}
OWN = {"own MTP, k = 3": {"method": "mtp", "num_speculative_tokens": 3}}  # of models that bring their own layer


def rounds_of(model: str) -> Mapping[str, Mapping[str, Any]]:
    """Those that the shapes have drafters for."""
    if model == _BESIDE.name:
        return ROUNDS
    beside = SHAPES / model / "dflash"
    block = {"method": "dflash", "model": str(beside), "num_speculative_tokens": 15}
    own = OWN if ModelConfig.from_folder(SHAPES / model).mtp_layers else {}
    return {**own, "DFlash, block 16": block} if beside.is_dir() else own


def floors(
    model: str, rounds: Mapping[str, Mapping[str, Any]], batch: int, length: float, device: Ceilings
) -> tuple[Floor, list[Floor]]:
    """Of a plain step, and of each of ``rounds``."""
    shape, target = Shape.from_folder(SHAPES / model), ModelConfig.from_folder(SHAPES / model)
    found = []
    for keys in rounds.values():
        config = speculative_config(keys)
        assert config is not None
        drafter, guesses = drafter_shape(config, target), config.num_speculative_tokens
        tree = config.tree_size
        found.append(round_floor(shape, drafter, device, batch=batch, length=length, guesses=guesses, tree=tree))
    return target_floor(shape, device, batch=batch, length=length), found


def table(
    model: str, rows: Sequence[int], length: float, ranks: int, bytes_per_s: float = H200_BYTES_PER_S
) -> list[str]:
    """Lines of a Markdown table; bfloat16."""
    rounds = rounds_of(model)
    device = Ceilings(ranks=ranks, value_bytes=2, bytes_per_s=bytes_per_s, flop_per_s=H200_FLOP_PER_S)
    columns = [floors(model, rounds, batch, length, device) for batch in rows]
    what = f"{model}, {length:g} tokens, {ranks} rank{'s' * (ranks > 1)}"
    at = f"{' / '.join(map(str, rows))} row{'s' * (rows[-1] > 1)}"
    lines = [
        f"| {what} | GB at {at} | TFLOP | floor, ms | over that of a step |",
        "| --- | --- | --- | --- | --- |",
        _line("plain step", [step for step, _ in columns], None),
    ]
    for number, name in enumerate(rounds):
        lines.append(_line(name, [found[number] for _, found in columns], [step for step, _ in columns]))
    return lines


def _line(name: str, found: Sequence[Floor], steps: Sequence[Floor] | None) -> str:
    cells = [
        " / ".join(f"{floor.bytes / 1e9:.1f}" for floor in found),
        " / ".join(f"{floor.flop / 1e12:.2f}" for floor in found),
        " / ".join(f"{floor.seconds * 1e3:.2f}" for floor in found),
        ""
        if steps is None
        else " / ".join(f"{floor.seconds / step.seconds:.2f}" for floor, step in zip(found, steps, strict=True)),
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", help="a folder of models/shapes [qwen3-8b]")
    parser.add_argument("--rows", default="1,8,32", help="rows that decode together [1,8,32]")
    parser.add_argument("--length", type=float, default=1152, help="average tokens of KV a row [1152]")
    parser.add_argument("--ranks", type=int, default=1, help="a tensor-parallel group [1]")
    parser.add_argument("--bytes-per-s", type=float, default=H200_BYTES_PER_S, help="bandwidth of a device [4.29e12]")
    options = parser.parse_args()
    rows = [int(part) for part in options.rows.split(",")]
    print("\n".join(table(options.model, rows, options.length, options.ranks, options.bytes_per_s)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

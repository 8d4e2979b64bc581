"""What starts of an engine do to the gaps between the kernels of its decode steps: one start a variant, side by side.

Run on one GPU:  python3 -m tests.bench.launch_gaps --out FOLDER [--variants usual tails] [--batch-size 32 ...]
Each variant is ``launch bench latency --profile`` in a process of its own; further options are that command's. Prints
TPOT, and of each kernel the gap before it (launch/bench/kernel_tables.py). FOLDER/VARIANT has each run's files.

Decode steps of 8B may have gaps 0.32 us longer where steps with chunks are captured; with the options here they have
none since graphs are captured on the compute stream (docs/lab/measurements/launch-specs-and-roles.md). The variants
leave out what such a start does, one thing each.

Knows: which parts of warming up there are. Does not know: what a gap is made of.
"""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runtime.execute.device.cuda import CudaDevice
from runtime.execute.executor import Executor
from runtime.execute.step.prefill_graphs import PrefillGraphs

USUAL = (
    *("--model", "qwen3-8b", "--load-format", "dummy", "--prefill-attention", "triton", "--batch-size", "32"),
    *("--decode-buckets", "32", "--max-num-seqs", "32", "--max-num-batched-tokens", "512", "--input-len", "512"),
    *("--output-len", "129", "--num-iters", "1", "--num-warmups", "0"),
)
SHOWN = 8  # kernels, those that take longest


def _prepared() -> None:
    """What steps with chunks share is made, and nothing is captured."""

    def warm_up(self: PrefillGraphs) -> None:
        assert self._prepared

    PrefillGraphs.warm_up = warm_up  # type: ignore[method-assign]


def _tails() -> None:
    """Their second halves are captured, and no first one."""

    def warm_up(self: PrefillGraphs) -> None:
        if self._prepared:
            self.tails.warm_up(self._config.warm_variants)

    PrefillGraphs.warm_up = warm_up  # type: ignore[method-assign]


def _decode_first() -> None:
    """Decode steps are captured before all others."""
    usual = Executor._warm_up

    def warm_up(self: Executor, further_roles: Any) -> None:
        self.decode.warm_up()
        usual(self, further_roles)

    Executor._warm_up = warm_up  # type: ignore[method-assign]


def _memory_kept() -> None:
    """Nothing is given back to the driver between captures."""
    CudaDevice.release_unused = CudaDevice.synchronize  # type: ignore[method-assign]


def _nothing() -> None:
    pass


VARIANTS: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "usual": (_nothing, ()),
    "no-prefill-graphs": (_nothing, ("--no-prefill-graphs",)),
    "tails": (_tails, ()),
    "prepared": (_prepared, ()),
    "memory-kept": (_memory_kept, ()),
    "decode-first": (_decode_first, ()),
}


def run(variant: str, folder: Path, options: Sequence[str]) -> dict[str, Any]:
    """{"tpot_ms", "gaps": {kernel: us}} of one start, in a process of its own. CalledProcessError if it fails."""
    command = [sys.executable, "-m", "tests.bench.launch_gaps", "--inside", variant, "--out", str(folder), *options]
    subprocess.run(command, check=True)
    (path,) = folder.glob("*.profile.json")
    found = json.loads(path.read_text())
    if found["refused"] is not None:
        raise ValueError(f"{path}: {found['refused']}")
    decode = found["decode"]
    return {"tpot_ms": decode["measured"] / 1e3, "gaps": {row["name"]: row["gap_us"] for row in decode["kernels"]}}


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown: a line a kernel, the longest first, a column a variant."""
    first = next(iter(found.values()))
    lines = [f"| gap before, us | {' | '.join(found)} |", f"| --- |{' ---: |' * len(found)}"]
    for name in list(first["gaps"])[:SHOWN]:
        gaps = [one["gaps"].get(name) for one in found.values()]
        lines.append(f"| {name[:60]} | {' | '.join('-' if gap is None else f'{gap:.2f}' for gap in gaps)} |")
    lines.append(f"| TPOT, ms | {' | '.join(format(one['tpot_ms'], '.3f') for one in found.values())} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS, metavar="NAME")
    parser.add_argument("--inside", choices=VARIANTS, help=argparse.SUPPRESS)
    known, options = parser.parse_known_args()
    if known.inside is not None:
        change, more = VARIANTS[known.inside]
        change()
        sys.argv = ["launch", "bench", "latency", *USUAL, *options, *more, "--profile", "--result-dir", str(known.out)]
        runpy.run_module("launch", run_name="__main__", alter_sys=True)
        return
    found: dict[str, dict[str, Any]] = {}
    for variant in known.variants:
        found[variant] = run(variant, known.out / variant, options)
        print("\n".join(table(found)), flush=True)
        (known.out / "launch-gaps.md").write_text("\n".join(table(found)) + "\n")


if __name__ == "__main__":
    main()

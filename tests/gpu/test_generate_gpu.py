"""`launch generate` on GPUs: the demo model's own prompts on one GPU and, under torchrun with NCCL, on two, and on four
where there are four.

Knows: how far answers may be from golden.json. Does not know: what one step of them does (test_engine_gpu.py,
test_engine_ranks_gpu.py).

Run: python3 -m pytest -m 'gpu or multigpu' tests/gpu/test_generate_gpu.py    # -k two-ranks, -k four-ranks
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.ranks_on_gpus import on_gpus
from tests.models.demo_golden import load

DEMO = Path("models/demo")
FEW_GRAPHS = ("--decode-buckets", "32", "--max-num-seqs", "32")
CLOSE = 0.25  # lead of a logit, in float32, under which bfloat16 may choose the other token


def generate(ranks: int, output: Path, *options: str) -> dict[str, list[int]]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [
        *start,
        *("-m", "launch", "generate", "--model", str(DEMO), "--input", str(DEMO / "prompts.jsonl")),
        *("--output", str(output), "--overwrite", "--num-blocks", "2048", *options),  # leaves room for other tests
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, env=dict(os.environ))
    print(ran.stdout[-3000:], ran.stderr[-3000:])
    assert ran.returncode == 0, ran.stderr[-3000:]
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    return {row["id"]: row["token_ids"] for row in rows}


def agrees_with_golden(found: dict[str, list[int]]) -> None:
    """Most rows are those of golden.json; where another first differs, the golden token led by little in float32."""
    rows = json.loads((DEMO / "golden.json").read_text())["rows"]
    places = [(row, place) for row in rows if (place := first_other(found[row["id"]], row["token_ids"])) is not None]
    others = [row["id"] for row, _ in places]
    assert too_short(found) <= {*others}
    assert len(places) < len(rows) / 2, others
    if not places:
        return
    model, _ = load(DEMO)
    for row, place in places:
        ids = torch.tensor([row["prompt_token_ids"] + row["token_ids"][:place]])
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
        lead = float(logits[row["token_ids"][place]] - logits[found[row["id"]][place]])
        assert lead < CLOSE, f"{row['id']}, token {place}: another token, though the golden one led by {lead:.2f}"


def first_other(found: list[int], expected: list[int]) -> int | None:
    return next((i for i, (one, other) in enumerate(zip(found, expected, strict=False)) if one != other), None)


def too_short(found: dict[str, list[int]]) -> set[str]:
    """Rows that end before golden.json's, which no text to stop at ended, though nothing else need differ."""
    prompts = map(json.loads, (DEMO / "prompts.jsonl").read_text().splitlines())
    may_stop = {prompt["id"] for prompt in prompts if "stop" in prompt}
    rows = json.loads((DEMO / "golden.json").read_text())["rows"]
    return {
        row["id"] for row in rows if len(found[row["id"]]) < (1 if row["id"] in may_stop else len(row["token_ids"]))
    }


def equal_in_float32(ranks: int, folder: Path, *options: str) -> None:
    """Rounding decides nothing in float32: every token of both depths is that of golden.json."""
    deep = generate(ranks, folder / "deep32.jsonl", "--dtype", "float32", *options)
    serial = generate(ranks, folder / "serial32.jsonl", "--dtype", "float32", "--chain-depth", "0", *options)
    assert deep == serial
    assert not too_short(deep)
    golden = json.loads((DEMO / "golden.json").read_text())
    for row in golden["rows"]:
        most = min(len(row["token_ids"]), len(deep[row["id"]]))
        assert deep[row["id"]][:most] == row["token_ids"][:most], row["id"]


@pytest.mark.gpu
def test_one_gpu(tmp_path: Path) -> None:
    deep = generate(1, tmp_path / "deep.jsonl")
    serial = generate(1, tmp_path / "serial.jsonl", "--chain-depth", "0")
    assert deep.keys() == serial.keys()
    differing = [key for key in deep if deep[key] != serial[key]]
    print("rows that differ between depth 0 and 2 (batches of other sizes round differently):", differing)
    agrees_with_golden(deep)
    equal_in_float32(1, tmp_path)


@pytest.mark.multigpu
@pytest.mark.parametrize("ranks", [on_gpus(2), on_gpus(4)])
def test_several_gpus(ranks: int, tmp_path: Path) -> None:
    deep = generate(ranks, tmp_path / "deep.jsonl", *FEW_GRAPHS)
    serial = generate(ranks, tmp_path / "serial.jsonl", "--chain-depth", "0", *FEW_GRAPHS)
    assert deep.keys() == serial.keys()
    agrees_with_golden(deep)
    print("rows that differ between depth 0 and 2:", [key for key in deep if deep[key] != serial[key]])


@pytest.mark.multigpu
@pytest.mark.parametrize("ranks", [on_gpus(2), on_gpus(4)])
def test_several_gpus_in_float32(ranks: int, tmp_path: Path) -> None:
    equal_in_float32(ranks, tmp_path, *FEW_GRAPHS)

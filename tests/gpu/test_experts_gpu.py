"""Sparse models on two GPUs, and on four where there are four, in every layout: token for token what one CPU rank
answers, in float32.

Knows: the layouts that two and four ranks allow. Does not know: what ranks of a layout hold (parallel/layers), how they
exchange tokens (test_exchange_gpu.py).

Run: python3 -m pytest -m multigpu tests/gpu/test_experts_gpu.py    # -k two-ranks, -k four-ranks: only those
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.__main__ import main
from tests.gpu.ranks_on_gpus import on_gpus
from tests.runtime.engine.rig import TINY, VOCABULARY

SHAPE = TINY | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
REQUESTS = 24
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {  # by ranks
    2: {
        "shared": (),
        "expert-parallel": ("--expert-parallel",),
        "nccl-only": ("--expert-parallel", "--no-symmetric-all-reduce"),
        "data-parallel": ("--data-parallel-size", "2"),
        "data-parallel-serial": ("--data-parallel-size", "2", "--chain-depth", "0"),
    },
    4: {
        "shared": (),
        "expert-parallel": ("--expert-parallel",),
        "data-parallel": ("--data-parallel-size", "4"),
        "data-and-tensor-parallel": ("--data-parallel-size", "2"),
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, requests, and the answers of one rank on a CPU."""
    found = tmp_path_factory.mktemp("experts")
    (found / "model").mkdir()
    (found / "model" / "config.json").write_text(json.dumps(SHAPE))
    lines = []
    for i in range(REQUESTS):
        prompt = [(7 * i + 5 * j) % VOCABULARY for j in range(5 + 3 * i)]
        sampling = {"temperature": 0.8 * (i % 2), "seed": i, "max_tokens": 8 + i % 17, "ignore_eos": True}
        lines.append(json.dumps({"id": f"r{i}", "prompt_token_ids": prompt} | sampling))
    (found / "in.jsonl").write_text("\n".join(lines) + "\n")
    assert main(command(found, "expected", "cpu")) == 0
    return found


def command(folder: Path, name: str, device: str, *options: str) -> list[str]:
    given = {
        "model": folder / "model",
        "input": folder / "in.jsonl",
        "output": folder / f"{name}.jsonl",
        "load-format": "dummy",
        "dtype": "float32",
        "device": device,
        "max-num-seqs": 8,
        "max-model-len": 128,
        "num-blocks": 64,
        "block-size": 16,
        "max-num-batched-tokens": 128,
        "decode-buckets": "1,4,8",
    }
    return ["generate", *(text for key, value in given.items() for text in (f"--{key}", str(value))), *options]


def tokens(folder: Path, name: str) -> dict[str, list[int]]:
    rows = (json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines())
    return {row["id"]: row["token_ids"] for row in rows}


@pytest.mark.multigpu
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("ranks", "layout"), [on_gpus(ranks, layout) for ranks, layouts in LAYOUTS.items() for layout in layouts]
)
def test_gpus_answer_as_one_cpu(folder: Path, ranks: int, layout: str) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    name = f"{layout}-{ranks}"
    arguments = command(folder, name, "cuda", *LAYOUTS[ranks][layout])
    ran = subprocess.run(
        [*start, "-m", "launch", *arguments], capture_output=True, text=True, timeout=200, env=dict(os.environ)
    )
    print(ran.stdout[-2000:], ran.stderr[-3000:])
    assert ran.returncode == 0, ran.stderr[-30_000:]  # torchrun's own words behind a fault are 4,000
    assert tokens(folder, name) == tokens(folder, "expected")

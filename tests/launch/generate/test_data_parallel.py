"""`--data-parallel-size` as a person starts it: the answers are those of one rank, whoever gave them.

A tiny sparse model with a tokenizer, real ranks, gloo between them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.__main__ import main
from models.expert_load import ExpertLoad
from runtime.config import EngineConfig
from tests.models.drafters.tiny_drafters import mtp_config
from tests.runtime.engine.rig import TINY
from tests.runtime.engine.test_experts import EXPERTS
from tests.runtime.frontend.small_tokenizers import byte_level_backend
from tests.torchrun import torchrun

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 900.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, prompts, and what one rank makes of them."""
    torch.set_num_threads(1)
    found = tmp_path_factory.mktemp("dp")
    (found / "model").mkdir()
    shape = TINY | EXPERTS | {"vocab_size": 360}
    (found / "model" / "config.json").write_text(json.dumps(shape))
    byte_level_backend().save(str(found / "model" / "tokenizer.json"))
    lines = list(prompts())
    (found / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found / "one.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert main([*command(found, "in", "alone"), "--expert-load", str(found / "alone.json")]) == 0
    return found


def prompts() -> Iterator[dict[str, Any]]:
    """Several answers, stop strings, log-probabilities of answers and prompts, echo, lengths of all kinds."""
    texts = ["the quick brown fox", "def main():", "héllo wörld", "the lazy dog sleeps, and", "n", "你好，世界。"]
    for i, text in enumerate(texts):
        yield {
            "id": f"t{i}",
            "prompt": text,
            "max_tokens": 20,
            "temperature": 0.0,
            "logprobs": i,
            "prompt_logprobs": i % 2,
        }
        yield {"id": f"s{i}", "prompt": text, "max_tokens": 30, "seed": i, "n": 1 + i % 3, "stop": ["e", "t"]}
    for i in range(4):
        ids = [(7 * i + 5 * j) % 360 for j in range(20 + 9 * i)]
        body = {"model": "tiny", "prompt": ids, "max_tokens": 5 + i, "seed": i, "echo": True, "logprobs": 1}
        yield {"custom_id": f"b{i}", "method": "POST", "url": "/v1/completions", "body": body}


def command(folder: Path, source: str, name: str) -> list[str]:
    given = {
        "model": folder / "model",
        "input": folder / f"{source}.jsonl",
        "output": folder / f"{name}.jsonl",
        "summary": folder / f"{name}.summary.json",
        "bundles": folder / "bundles",
        "load-format": "dummy",
        "device": "cpu",
        "max-num-seqs": 8,
        "block-size": 8,
        "max-model-len": 128,
        "num-blocks": 200,
        "max-num-batched-tokens": 64,
        "decode-buckets": 8,
        "control-timeout-s": 600,
    }
    return ["generate", *(text for key, value in given.items() for text in (f"--{key}", str(value)))]


def as_a_user_does(ranks: int, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*program, "-m", "launch", *arguments]
    environ = dict(os.environ, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", PYTHONPATH=str(ROOT))
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environ, cwd=cwd)


def rows(path: Path) -> dict[str, Any]:
    """By id, without what may differ: times, rounds, and the last bits of float32."""
    found = {}
    for line in path.read_text().splitlines():
        row = json.loads(line, parse_float=lambda text: round(float(text), 3))
        found[row.get("custom_id") or row["id"]] = _timeless(row)
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _timeless(one)
            for key, one in value.items()
            if key not in ("timing", "created", "id", "request_id", "speculation")
        }
    return [_timeless(one) for one in value] if isinstance(value, list) else value


def close(found: Any, expected: Any) -> bool:
    """Equal but for the last digit that ``rows`` keeps."""
    if isinstance(expected, float):
        return isinstance(found, float) and abs(found - expected) < 2e-3
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    return bool(found == expected)


def check_answers(folder: Path, name: str, ids: set[str] | None = None) -> None:
    found, alone = rows(folder / f"{name}.jsonl"), rows(folder / "alone.jsonl")
    assert found.keys() == (ids or alone.keys())
    for line_id, row in found.items():
        assert close(row, alone[line_id]), line_id


@pytest.mark.long  # torchrun as a user starts it: `make demo`, tests/launch/sweep/test_point.py
@pytest.mark.multiprocess
def test_two_groups_of_one_rank(folder: Path, tmp_path: Path) -> None:
    default = EngineConfig(model="m", device="cpu").bundles
    flags = ["--data-parallel", "2", "--bundles", default]
    ran = as_a_user_does(2, *command(folder, "in", "two"), *flags, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-3000:]
    check_answers(folder, "two")
    assert list(tmp_path.iterdir()) == [], "a good run leaves nothing in the working directory"
    assert any(row.get("finish_reason") == "stop" for row in rows(folder / "two.jsonl").values())
    summary = json.loads((folder / "two.summary.json").read_text())
    assert len(summary["group_requests"]) == 2
    assert sum(summary["group_requests"]) == sum(line.get("n", 1) for line in prompts())
    assert min(summary["group_requests"]) >= 5
    assert "groups        requests " in ran.stdout


@pytest.mark.multiprocess
def test_two_groups_of_two_ranks_count_experts_together(folder: Path) -> None:
    flags = ["--data-parallel-size", "2", "--tensor-parallel-size", "2", "--expert-load", str(folder / "four.json")]
    ran = torchrun(4, "launch", *command(folder, "in", "four"), *flags)
    assert ran.returncode == 0, ran.said[-3000:]
    check_answers(folder, "four")
    together, alone = ExpertLoad.read(folder / "four.json"), ExpertLoad.read(folder / "alone.json")
    assert together.tokens.keys() == alone.tokens.keys()
    for layer, counts in alone.tokens.items():
        assert 0.9 * sum(counts) < sum(together.tokens[layer]) < 1.5 * sum(counts), (
            "ghosts and prefixes differ a little"
        )
    assert json.loads((folder / "four.json").read_text())["ranks"] == 4


@pytest.mark.multiprocess
def test_fewer_requests_than_groups_over_a_map_of_experts(folder: Path) -> None:
    """One group verifies what a drafter guesses, the other one has nothing to do."""
    (folder / "drafter").mkdir()
    sizes = {key: TINY[key] for key in _OF_A_DRAFTER} | {"vocab_size": 360}
    (folder / "drafter" / "config.json").write_text(json.dumps(mtp_config(**sizes)))
    drafting = {"method": "mtp", "model": str(folder / "drafter"), "num_speculative_tokens": 3}
    flags = ["--data-parallel-size", "2", "--expert-map", str(folder / "alone.json")]
    flags += ["--speculative-config", json.dumps(drafting)]
    ran = torchrun(2, "launch", *command(folder, "one", "few"), *flags)
    assert ran.returncode == 0, ran.said[-3000:]
    check_answers(folder, "few", {"t0"})
    summary = json.loads((folder / "few.summary.json").read_text())
    assert summary["group_requests"] == [1, 0]
    assert summary["group_idle_steps"] == [0, summary["steps"]]
    (answer,) = (json.loads(line) for line in (folder / "few.jsonl").read_text().splitlines())
    assert answer["speculation"]["rounds"] > 3


_OF_A_DRAFTER = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    "max_position_embeddings",
)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data-parallel-size", "2"], "--data-parallel-size is 2, which does not divide the 1 rank(s)"),
        (["--data-parallel-size", "2", "-tp", "2"], "2 x --data-parallel-size 2 is 4 ranks, but 1 were started"),
        (["--data-parallel-size", "0"], "data_parallel is 0, but must be at least 1: type --data-parallel-size 1"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(
    folder: Path, flags: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*command(folder, "in", "none"), *flags]) == 2
    assert said in capfd.readouterr().err
    assert not (folder / "none.jsonl").exists()

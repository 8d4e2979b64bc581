"""`bench` from command line to result files, around a real engine over a tiny model; and on two ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.bench import command as bench
from launch.bench.environment import process_age
from launch.bench.latency import _why_noise
from launch.bench.load.engine_backend import run_batch
from launch.bench.load.journal import Journal
from launch.bench.options import BenchCommand
from launch.bench.point import Point
from launch.errors import UsageError
from launch.ranks.start_engine import open_engine
from tests.launch.api.parsed import parsed
from tests.runtime.engine.rig import TINY, tiny_folder
from tests.runtime.engine.test_experts import EXPERTS
from tests.torchrun import torchrun

ROOT = Path(__file__).parents[3]
BUSY = "something else kept the machine busy"
SMALL = "--device cpu --input-len 20 --output-len 9 --num-iters 2 --num-warmups 1 --block-size 8"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measure(folder: Path, line: str) -> int:
    arguments = f"bench {line} --model {tiny_folder(folder / 'tiny')} --result-dir {folder / 'results'}"
    command = parsed(BenchCommand, arguments.split())
    return bench.run(command, {}, open_engine)


def result(folder: Path, ending: str) -> Any:
    (path,) = (folder / "results").glob(f"*.{ending}")
    lines = path.read_text()
    return [json.loads(line) for line in lines.splitlines()] if ending.endswith("jsonl") else json.loads(lines)


def test_latency_by_the_fixed_batch_protocol(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chunked = "--max-num-batched-tokens 16"  # prefill in many steps: the batch must be full all the same
    code = measure(tmp_path, f"latency {SMALL} --batch-size 1,4 --roofline {chunked}")
    one, four = points = result(tmp_path, "points.jsonl")
    if any(BUSY in str(point["refused"]) for point in points):  # no rate can be promised on a machine that is shared
        assert code == 1
        return
    assert code == 0
    assert [point.keys() for point in points] == [{*Point.__dataclass_fields__}] * 2
    for point, batch in ((one, 1), (four, 4)):
        assert point | {"batch": batch, "tp": 1, "ep": 1, "dp": 1, "model": "tiny", "runs": 2, "refused": None} == point
        assert point | {"hw": "cpu", "kind": "latency", "precision": "float32", "chain_depth": 2} == point
        assert 0 < point["tpot_ms_min"] <= point["tpot_ms"] <= point["tpot_ms_max"]
        assert point["tok_s"] == pytest.approx(batch * 1e3 / point["tpot_ms"])
        assert point["tok_s_per_user"] == pytest.approx(1e3 / point["tpot_ms"])
        assert point["roofline_fraction"] == pytest.approx(point["roofline_floor_ms"] / point["tpot_ms"])
        assert 0 < point["chained_ratio"] <= 1
        assert point["startup_s"] == one["startup_s"] <= process_age()
        for index in range(2):
            run = result(tmp_path, f"b{batch}-run{index}.json")
            assert run | {"completed": batch, "total_output": 9 * batch, "model_id": "tiny", "refused": None} == run
            assert run["max_concurrency"] == batch
            assert run["duration"] == pytest.approx(run["protocol_ttft_s"] + 8e-3 * run["protocol_tpot_ms"])
            assert run["device"]["step_ms"] > 0
    rows = result(tmp_path, "requests.jsonl")
    assert [row["run"] for row in rows] == ["b1-run0", "b1-run1", *["b4-run0"] * 4, *["b4-run1"] * 4]
    record = result(tmp_path, "environment.json")
    assert record["config"].startswith("model=")
    assert "prefix_caching=False" in record["config"]
    assert {"versions", "gpus", "argv", "seed", "commit", "code_digest"} <= record.keys()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[:3] == ["batch", "TPOT", "ms"]
    assert "of floor" in printed[0]
    assert [line.split()[0] for line in printed[1:]] == ["1", "4", "TTFT"]


def test_a_round_has_a_floor_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = '{"method":"synthetic","num_speculative_tokens":3,"synthetic_acceptance_length":2.0}'
    small = SMALL.replace("--output-len 9", "--output-len 33")
    code = measure(tmp_path, f"latency {small} --batch-size 2 --roofline --speculative-config {spec}")
    (point,) = result(tmp_path, "points.jsonl")
    assert point["speculation"] == "synthetic", "whoever reads the file alone knows that its texts mean nothing"
    assert point["round_floor_ms"] > 0
    assert point["roofline_fraction"] is None, "of a step of one token a row"
    (told,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("       round"))
    assert f"floor {point['round_floor_ms']:.4f} ms" in told
    ratio = point["round_floor_ms"] / point["roofline_floor_ms"]
    assert f", {ratio:.2f} floors of a plain step; synthetic, k = 3" in told
    if code == 0:  # no rate can be promised on a machine that is shared
        assert f" ({point['round_floor_ms'] / point['round_ms']:.1%} of it reached)" in told


def test_whole_answers_without_a_short_run(tmp_path: Path) -> None:
    assert measure(tmp_path, f"latency {SMALL} --protocol generation --batch-size 2 --chain-depth 0") == 0
    (point,) = result(tmp_path, "points.jsonl")
    run = result(tmp_path, "b2-run1.json")
    assert run["protocol_tpot_ms"] == pytest.approx(run["median_tpot_ms"])
    assert run["protocol_ttft_s"] == pytest.approx(run["median_ttft_ms"] / 1e3)
    assert point["chained_ratio"] == 0


@pytest.mark.slow
def test_a_batch_that_is_not_full_has_no_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once = SMALL.replace("--num-iters 2 --num-warmups 1", "--num-iters 1 --num-warmups 0")
    line = f"latency {once} --batch-size 1,8 --num-blocks 12 --max-model-len 64"  # eight requests need 32 blocks
    assert measure(tmp_path, f"{line} --profile") == 1
    one, eight = result(tmp_path, "points.jsonl")
    assert one["refused"] is None or BUSY in one["refused"]
    assert "the batch was not full" in eight["refused"]
    rates = ("tpot_ms", "tok_s", "tok_s_per_gpu", "tok_s_per_user", "roofline_fraction", "bandwidth_fraction")
    assert [eight[name] for name in rates] == [None] * len(rates)
    assert result(tmp_path, "b8-run0.json")["protocol_tpot_ms"] is None
    printed = capsys.readouterr().out
    assert "no rate: the batch was not full" in printed
    assert "batch 8: no profile: the batch was not full" in printed
    assert result(tmp_path, "b8.profile.json")["refused"].startswith("the batch was not full")
    assert result(tmp_path, "b1.profile.json")["refused"] is None


def test_throughput_over_random_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure(tmp_path, f"throughput {SMALL} --num-prompts 12 --max-concurrency 3 --roofline") == 0
    (point,) = result(tmp_path, "points.jsonl")
    assert point | {"kind": "throughput", "batch": 3, "refused": None, "input_len": 20, "output_len": 9} == point
    assert point["tok_s_per_user"] == pytest.approx(point["tok_s"] / 3)
    run = result(tmp_path, "run1.json")
    assert run | {"completed": 12, "failed": 0, "total_input": 240, "total_output": 108, "max_concurrency": 3} == run
    assert len(result(tmp_path, "requests.jsonl")) == 24
    assert "output_throughput" in capsys.readouterr().out


def test_no_run_of_throughput_finds_the_prompts_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Journal] = []

    def counted(*given: Any, **named: Any) -> Journal:
        runs.append(run_batch(*given, **named))
        return runs[-1]

    monkeypatch.setattr("launch.bench.batches.run_batch", counted)
    assert measure(tmp_path, f"throughput {SMALL} --num-prompts 12 --max-concurrency 3 --num-warmups 2") == 0
    assert len(runs) == 4
    assert runs[-1].after["prefix_query_tokens"] == 4 * 12 * 20
    assert runs[-1].after["prefix_hit_tokens"] == 0


def test_runs_of_throughput_over_one_file_are_refused_with_a_prefix_cache(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"prompt_token_ids": [*range(5, 25), i]}) + "\n" for i in range(4)))
    line = f"throughput {SMALL} --dataset-name jsonl --dataset-path {lines} --num-prompts 4 --max-concurrency 2"
    with pytest.raises(UsageError, match="of the 2 runs from the second on: type --no-prefix-caching, or --num-iters"):
        measure(tmp_path, line)
    assert measure(tmp_path, f"{line} --num-iters 1") in (0, 1)


def test_throughput_over_lines_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"prompt_token_ids": [5, i]}) + "\n" for i in range(10)))
    line = f"throughput {SMALL} --dataset-name jsonl --dataset-path {lines} --num-prompts 10 --output-len 6"
    line += " --no-prefix-caching"
    assert measure(tmp_path, line) == 1, "ten requests never fill 32 rows"
    (point,) = result(tmp_path, "points.jsonl")
    assert point["refused"].startswith("10 requests never wait for one of 32 rows")
    assert (point["input_len"], point["roofline_floor_ms"], point["tok_s"]) == (None, None, None)
    assert "no rate: 10 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--dataset-name jsonl", "needs a file: type --dataset-path FILE"),
        (
            "--dataset-path {here}",
            "not read by --dataset-name random: leave it out, or type --dataset-name",
        ),
        ("--input-len 250 --output-len 10", "make 260 tokens, but a request may have 256"),
        ("--dataset-name sharegpt --dataset-path {here}", "has no tokenizer.json"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_refused(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        measure(tmp_path, f"throughput --device cpu {line.format(here=__file__)}")
    assert words in str(refused.value)


@pytest.mark.multiprocess
def test_latency_of_two_groups(tmp_path: Path) -> None:
    """A batch is spread over the groups, and each of its steps is full."""
    folder = tiny_folder(tmp_path / "tiny")
    (folder / "config.json").write_text(json.dumps(TINY | EXPERTS))
    line = f"bench latency {SMALL} --data-parallel-size 2 --batch-size 1,4 --roofline --profile --model {folder}"
    ended = torchrun(2, "launch", *line.split(), "--result-dir", str(tmp_path / "results"))
    points = result(tmp_path, "points.jsonl")
    assert ended.returncode == 0 or any(BUSY in str(point["refused"]) for point in points), ended.errors
    for point, batch in zip(points, (1, 4), strict=True):
        assert point | {"batch": batch, "tp": 1, "ep": 2, "dp": 2, "runs": 2} == point
        assert point["refused"] is None or BUSY in point["refused"]
        profile = result(tmp_path, f"b{batch}.profile.json")
        assert (profile["refused"], profile["decode"]["steps"]) == (None, 8)
    assert "groups, warm-up included: requests " in ended.output
    assert all("-tp1dp2-" in path.name for path in (tmp_path / "results").iterdir())


def test_a_longer_answer_that_took_no_longer_gives_no_rate() -> None:
    assert _why_noise(-0.001, 0.5, 0.492, 8) == (
        "one token took 0.5000 s and 9 took 0.4920 s: something else kept the machine busy"
    )
    assert _why_noise(0.001, 0.5, 0.508, 8) is None
    assert _why_noise(0.0, 0.5, 0.5, 0) is None

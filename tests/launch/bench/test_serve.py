"""`bench serve` from command line to result files, around an engine on one rank and on two, and around a server."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from matplotlib.figure import Figure

from launch.__main__ import main
from launch.bench import command as bench
from launch.bench.load.generator import Load, _label
from launch.bench.load.report import Progress, shown_seconds
from launch.bench.options import BenchCommand
from launch.bench.point import ServePoint
from launch.bench.serve import ServeBench
from launch.bench.serve_options import ServeOptions
from launch.cli import parse
from launch.errors import BenchError, UsageError
from launch.ranks.start_engine import open_engine
from launch.sweep.report.load_plot import LoadPictures
from tests.launch.api.parsed import parsed
from tests.launch.bench.load.test_openai_backend import Handler, serving
from tests.runtime.engine.rig import VOCABULARY, tiny_folder
from tests.torchrun import torchrun

SMALL = "--device cpu --block-size 8 --input-len 24 --output-len 6 --max-num-seqs 4"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measure(folder: Path, line: str, draw: LoadPictures | None = None) -> int:
    arguments = f"bench serve {SMALL} {line} --model {tiny_folder(folder / 'tiny')} --result-dir {folder / 'results'}"
    return bench.run(parsed(BenchCommand, arguments.split()), {}, open_engine, draw)


def result(folder: Path, ending: str) -> Any:
    (path,) = (folder / "results").glob(f"*.{ending}")
    lines = path.read_text()
    return [json.loads(line) for line in lines.splitlines()] if ending.endswith("jsonl") else json.loads(lines)


def check_run(run: dict[str, Any], requests: int) -> None:
    """What every run of an engine holds."""
    assert run | {"completed": requests, "failed": 0, "num_prompts": requests} == run
    assert run["request_throughput"] == pytest.approx(requests / run["duration"])
    assert run["output_throughput"] == pytest.approx(run["total_output_tokens"] / run["duration"])
    assert 0 < run["p50_ttft_ms"] <= run["p99_ttft_ms"] <= run["p99_e2el_ms"]
    assert run["mean_itl_ms"] > 0
    engine = run["engine"]
    assert engine["steps"] == engine["prefill_steps"] + engine["decode_steps"] + engine.get("mixed_steps", 0) > 0
    assert 0 < engine["chained"] <= 1
    assert 0 <= engine["device_idle"] < 1
    assert {"ghost_rows", "evictions", "stalls", "prefix_hit_tokens", "chain_breaks"} <= engine.keys()


@pytest.mark.slow
def test_a_sweep_of_closed_loops_leaves_a_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "--num-prompts 12 --max-concurrency 1,3 --num-warmups 2 --goodput ttft:60000 tpot:60000 --save-detailed"
    assert measure(tmp_path, line, LoadPictures()) == 0
    one, three = points = result(tmp_path, "points.jsonl")
    for point in points:
        assert point.keys() == {*ServePoint.__dataclass_fields__}
        assert point | {"kind": "serve", "hw": "cpu", "dataset": "mixed", "runs": 1, "refused": None} == point
        assert point | {"num_prompts": 12, "seed": 0, "request_rate": None, "tp": 1, "model": "tiny"} == point
        assert point["request_goodput"] == pytest.approx(point["request_throughput"])
        assert point["tok_s"] > 0
        assert point["steady_tok_s"] > 0
    assert [(one["label"], one["batch"]), (three["label"], three["batch"])] == [("c1", 1), ("c3", 3)]
    for label in ("c1", "c3"):
        run = result(tmp_path, f"{label}-run0.json")
        check_run(run, 12)
        assert run["engine"]["prefix_hit_tokens"] == 0, "no run finds the prompts of another"
        assert 0 < run["steady"]["begin_s"] < run["steady"]["end_s"] < run["duration"]
        assert run["steady"]["total_output_tokens"] < run["total_output_tokens"]
        assert len(run["ttfts"]) == len(run["itls"]) == len(run["output_lens"]) == 12
        rows = result(tmp_path, f"{label}-run0.requests.jsonl")
        assert [row["output_tokens"] for row in rows] == run["output_lens"]
        over_time = result(tmp_path, f"{label}-run0.timeline.jsonl")
        assert sum(row["output_tokens"] for row in over_time) == run["total_output_tokens"]
        assert sum(row["completed"] for row in over_time) == 12
        assert len(over_time) == max(1, math.ceil(run["duration"] / 0.1))
    pictures = sorted((tmp_path / "results").glob("*.png"))
    assert [path.name.partition("Z.")[2] for path in pictures] == [
        *("c1-run0.timeline.png", "c3-run0.timeline.png", "curve.png"),
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert "prefix_caching=True" in result(tmp_path, "environment.json")["config"]
    printed = capsys.readouterr().out
    assert printed.count("request_goodput") == 2
    assert "handed over late: median" in printed
    assert [line.split()[0] for line in printed.splitlines()[-3:]] == ["point", "c1", "c3"]


def test_paced_load_runs_again_with_other_ids(tmp_path: Path) -> None:
    line = "--dataset-name prefix --prefix-len 16 --suffix-len 4 --num-prefixes 2 --num-prompts 10 --num-iters 2"
    assert measure(tmp_path, f"{line} --request-rate 100 --burstiness 0.5 --max-concurrency 4 --num-warmups 0") == 0
    (point,) = result(tmp_path, "points.jsonl")
    assert point | {"label": "c4r100", "request_rate": 100.0, "burstiness": 0.5, "max_concurrency": 4} == point
    assert point["runs"] == 2
    runs = [result(tmp_path, f"c4r100-run{number}.json") for number in range(2)]
    for run in runs:
        check_run(run, 10)
        assert run["duration"] >= 0.1, "the last one arrives after 10 / 100 s"
        assert run | {"request_rate": 100.0, "total_input_tokens": 200, "total_output_tokens": 60} == run
        assert run["engine"]["prefix_hit_tokens"] <= 8 * 16, "at least two beginnings are computed, in each run"
    assert not list((tmp_path / "results").glob("*.requests.jsonl")), "details are for those who ask"


def test_a_run_that_is_too_short_has_no_steady_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure(tmp_path, "--num-prompts 3 --temperature 0.8 --top-k 5 --num-warmups 0") == 0
    run = result(tmp_path, "all-run0.json")
    check_run(run, 3)
    assert run["steady"] == {"refused": "3 requests of ramp and 3 of drain leave none of 3: type --num-prompts 24"}
    assert result(tmp_path, "points.jsonl")[0]["steady_tok_s"] is None
    assert "no steady window: 3 requests of ramp" in capsys.readouterr().out


def test_a_trace_arrives_as_it_did(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"arrival_time": 5 + number / 10, "input_length": 9, "output_length": 4} for number in range(4)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    line = f"--dataset-name trace --dataset-path {trace} --num-warmups 1 --save-detailed"
    assert measure(tmp_path, line) == 0
    assert [row["due_ms"] for row in result(tmp_path, "requests.jsonl")] == pytest.approx([0, 100, 200, 300])
    check_run(result(tmp_path, "all-run0.json"), 4)


def test_a_request_that_fails_is_counted_and_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "--num-prompts 4 --max-waiting 1 --max-num-seqs 1 --num-warmups 0 --base-url"
    with serving() as url:
        assert measure(tmp_path, f"{line} {url} --dataset-name random --random-range-ratio 0.5 --label theirs") == 0
        Handler.refused = range(VOCABULARY)
        assert measure(tmp_path / "again", f"{line} {url}") == 1
    (point,) = result(tmp_path, "points.jsonl")
    assert point | {"framework": "theirs", "hw": url, "chained_ratio": None, "device_idle": None} == point
    run = result(tmp_path, "all-run0.json")
    assert run | {"label": "theirs", "completed": 4, "engine": {}} == run
    (point,) = result(tmp_path / "again", "points.jsonl")
    assert point["refused"] == "4 requests failed"
    assert "request 0: HTTP 400" in capsys.readouterr().out


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("--speculative-method ngram --num-speculative-tokens 3", "--speculative-config"),
        ("--timeline steps.json", "--timeline"),
        ("--expert-load load.json", "--expert-load"),
    ],
)
def test_what_only_an_engine_of_ours_can_do_is_refused_of_a_server(tmp_path: Path, line: str, flag: str) -> None:
    with pytest.raises(UsageError, match=rf"^{flag} is of an engine, but --base-url measures a server's: leave it out"):
        measure(tmp_path, f"--num-prompts 2 --base-url http://127.0.0.1:9 {line}")


def test_two_ranks_serve_one_load(tmp_path: Path) -> None:
    line = "bench serve --model models/demo --device cpu --input-len 12 --output-len 5 --num-prompts 10 --seed 5"
    line += " --max-concurrency 2 --request-rate 40 --num-warmups 1 --max-num-seqs 2 --max-model-len 64"
    line += f" --result-dir {tmp_path / 'results'}"
    ran = torchrun(2, "launch", *line.split())
    assert ran.returncode == 0, ran.said[-3000:]
    check_run(result(tmp_path, "c2r40-run0.json"), 10)
    (point,) = result(tmp_path, "points.jsonl")
    assert point | {"tp": 2, "model": "demo", "num_prompts": 10, "seed": 5, "max_concurrency": 2} == point
    assert point["tok_s_per_gpu"] == pytest.approx(point["tok_s"] / 2)
    assert ran.said.count("handed over late") == 1, "rank 0 alone speaks"
    assert result(tmp_path, "environment.json")["ranks"] == 2


# ---- the command line ----


def options_of(line: str) -> ServeOptions:
    command = parsed(BenchCommand, ["bench", "serve", "--model", "m", *line.split()])
    assert isinstance(command.options, ServeOptions)
    return command.options


def test_vllm_s_flags_are_read() -> None:
    assert options_of("") == ServeOptions()
    line = "--dataset-name random --random-input-len 7 --random-output-len 9 --random-range-ratio 0.25 --num-prompts 11"
    line += " --request-rate 2.5,inf --burstiness 0.3 --max-concurrency 16,64 --num-warmups 3 --save-detailed"
    line += " --goodput ttft:200 tpot:20 --top-p 0.9 --temperature 1 --prefix-repetition-num-prefixes 4"
    assert options_of(line) == ServeOptions(
        dataset_name="random",
        input_len=7,
        output_len=9,
        random_range_ratio=0.25,
        num_prompts=11,
        request_rate=(2.5, math.inf),
        burstiness=0.3,
        max_concurrency=(16, 64),
        num_warmups=3,
        save_detailed=True,
        goodput=((("ttft", 200.0),), (("tpot", 20.0),)),
        top_p=0.9,
        temperature=1.0,
        num_prefixes=4,
    )
    assert options_of("--url http://h:1 --goodput e2el:5,ttft:1 ttft:2").goals == {"e2el": 5.0, "ttft": 2.0}


def test_points_are_every_rate_with_every_concurrency() -> None:
    options = options_of("--request-rate 2,inf --max-concurrency 16,300")
    assert options.points == [(2.0, 16), (2.0, 300), (math.inf, 16), (math.inf, 300)]
    assert options_of("").points == [(math.inf, None)]
    assert [options.requests_of(most) for most in (None, 16, 300)] == [1000, 2048, 2400]
    assert options_of("--dataset-name long").requests_of(16) == 64
    assert options_of("--num-prompts 5").requests_of(16) == 5
    assert [options.warmups_of(rows) for rows in (3, 300)] == [3, 64]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--goodput ttft=200", "'ttft=200' is no goal such as ttft:200"),
        ("--goodput itl:5", "names are ttft, tpot, e2el"),
        ("--goodput ttft:-1", "-1 is not a time in milliseconds"),
        ("--request-rate 0", "0 is not a rate above 0"),
        ("--request-rate nan", "nan is not a rate above 0"),
        ("--request-rate 4,4", "names a rate twice"),
        ("--burstiness 0", "0 is not above 0"),
        ("--max-concurrency 16,0", "0 is not at least 1"),
        ("--random-range-ratio 1.5", "1.5 is not 0 to 1"),
        ("--dataset-name hf", "invalid choice"),
        ("--batch-size 4", "unrecognized arguments"),
    ],
)
def test_a_wrong_command_line_is_explained(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["bench", "serve", "--model", "m", *line.split()])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("subcommand", ["serve", "latency", "throughput"])
def test_a_result_folder_that_cannot_be_is_refused_before_an_engine_starts(tmp_path: Path, subcommand: str) -> None:
    def no_engine(*_: object) -> NoReturn:
        pytest.fail("no engine is needed")

    (tmp_path / "file").touch()
    for folder, words in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "below", "Not a directory")):
        line = f"bench {subcommand} --device cpu --input-len 9 --output-len 4 --model {tiny_folder(tmp_path / 'tiny')}"
        with pytest.raises(UsageError) as refused:
            bench.run(parsed(BenchCommand, [*line.split(), "--result-dir", str(folder)]), {}, no_engine)
        assert str(refused.value) == f"--result-dir {folder} cannot be written to: {words}"


def test_a_disk_that_is_full_costs_the_files_and_not_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(BenchError, match=r"\.json cannot be written: No space left on device"):
        measure(tmp_path, "--num-prompts 2 --num-warmups 0")
    assert "total_output_tokens" in capsys.readouterr().out


def test_a_picture_that_cannot_be_written_costs_no_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(figure: Figure, out: Path, **more: object) -> NoReturn:
        out.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Figure, "savefig", full)
    with caplog.at_level(logging.WARNING, "lockstride"):
        assert measure(tmp_path, "--num-prompts 2 --max-concurrency 1,2 --num-warmups 0", LoadPictures()) == 0
    assert [point["label"] for point in result(tmp_path, "points.jsonl")] == ["c1", "c2"]
    said = [record.getMessage() for record in caplog.records if "is not drawn" in record.getMessage()]
    assert len(said) == 3
    assert all(line.endswith(".png is not drawn: [Errno 28] No space left on device") for line in said)
    assert not list((tmp_path / "results").glob("*.png"))


@pytest.mark.slow
def test_an_interrupt_keeps_the_points_before_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up = ServeBench._warm_up

    def interrupted(self: ServeBench, load: Load) -> float | None:
        if load.label == "c3":
            raise KeyboardInterrupt
        return warm_up(self, load)

    monkeypatch.setattr(ServeBench, "_warm_up", interrupted)
    line = f"bench serve {SMALL} --num-prompts 4 --max-concurrency 1,2,3 --result-dir {tmp_path / 'results'}"
    assert main([*line.split(), "--model", str(tiny_folder(tmp_path / "tiny"))]) == 130
    assert [point["label"] for point in result(tmp_path, "points.jsonl")] == ["c1", "c2"]
    assert "prefix_caching=True" in result(tmp_path, "environment.json")["config"]
    said = capfd.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()[-3:]] == ["point", "c1", "c2"]
    assert said.err.splitlines()[-1] == "lockstride bench: interrupted"


def test_runs_that_would_find_each_other_s_prompts_are_refused(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"prompt_token_ids": [5, number]}) + "\n" for number in range(4)))
    line = f"--dataset-name jsonl --dataset-path {lines} --num-prompts 4"
    with pytest.raises(UsageError, match=r"of the 2 runs from the second on: type --no-prefix-caching"):
        measure(tmp_path, f"{line} --max-concurrency 1,2")
    assert measure(tmp_path, f"{line} --max-concurrency 1,2 --no-prefix-caching --num-warmups 0") == 0


def test_rates_that_nearly_agree_have_files_of_their_own() -> None:
    assert _label(1000001.0, None) != _label(1000002.0, None)
    assert [_label(rate, 4) for rate in (2.0, 0.1, math.inf)] == ["c4r2", "c4r0.1", "c4"]


def test_a_trace_of_one_moment_cannot_be_stretched_to_a_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 5, "input_length": 9, "output_length": 4}\n' * 2)
    line = f"--dataset-name trace --dataset-path {trace} --num-warmups 0"
    with pytest.raises(UsageError, match="all requests arrive at one moment, which --request-rate 2 cannot stretch"):
        measure(tmp_path, f"{line} --request-rate 2")
    assert measure(tmp_path, line) == 0


def test_rows_follow_the_widest_closed_loop(tmp_path: Path) -> None:
    from launch.bench.session import open_session

    def rows(more: str) -> int:
        line = ["bench", "serve", "--model", str(tiny_folder(tmp_path)), "--device", "cpu", *more.split()]
        return open_session(parsed(BenchCommand, line), {}, open_engine).config.max_num_seqs

    assert rows("--max-concurrency 8,48") == 48
    assert rows("--max-concurrency 8,48 --max-num-seqs 16") == 16, "requests may wait in the engine, too"


def test_progress_says_what_is_left_where_there_is_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lockstride"), Progress("c4-run0", 100, True) as progress:
        for ended in range(5, 101, 5):
            progress(ended)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 9
    assert said[0].startswith("c4-run0: 10 of 100 requests, about ")
    assert [shown_seconds(seconds) for seconds in (41.2, 720.0)] == ["41 s", "12 min"]

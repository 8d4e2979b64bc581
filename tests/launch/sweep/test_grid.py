"""Grid files: what they may say, which points they become, and what they are told when they are wrong."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.bench.options import BenchCommand, LatencyOptions
from launch.bench.serve_options import ServeOptions
from launch.cli import build_parser, parse
from launch.sweep.command import run as run_sweep
from launch.sweep.grid import MOST_POINTS, grid_of, read_grid
from launch.sweep.options import SweepCommand
from launch.sweep.point import Point, Setting, SweepError, model_names, models_of
from tests.launch.api.parsed import parsed


def batches(content: dict[str, Any]) -> list[tuple[Any, ...]]:
    """(tp, batch, depth) of each point."""
    points = grid_of(content, "g").points
    return [(point.tp, point.settings.get("batch"), point.settings.get("depth")) for point in points]


# ---- the command line ----


def subcommand_actions() -> Iterator[tuple[str, argparse.Action]]:
    def choices_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
        return next(a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))

    for name, parser in choices_of(choices_of(build_parser())["sweep"]).items():
        yield from ((name, action) for action in parser._actions if action.dest != "help")


@pytest.mark.parametrize("name", ["profile", "roofline"])
def test_a_switch_without_an_opposite_may_be_off(name: str) -> None:
    point = Point("latency", {"model": "m", name: False})
    point.check()
    assert f"--{name}" not in point.flags("results")


def test_every_option_says_its_default_and_its_unit() -> None:
    for name, action in subcommand_actions():
        assert action.help is not None, (name, action.dest)
        assert "(default: " in action.help or "(required)" in action.help, (name, action.dest)
        assert action.help.endswith("]"), (name, action.dest)


def test_options_are_read() -> None:
    line = "sweep submit g.yaml --out o --resume --max-array 7 --throttle 3 --show"
    command = parsed(SweepCommand, line.split())
    options = command.options
    assert (command.name, command.subcommand) == ("sweep", "submit")
    assert (options.grid, options.out, options.resume, options.show) == (Path("g.yaml"), Path("o"), True, True)
    assert (options.max_array, options.throttle, options.retry_failed) == (7, 3, False)
    assert parsed(SweepCommand, ["sweep", "plan"]).options.grid is None


@pytest.mark.parametrize("line", ["", "run", "status", "submit g --max-array 0", "run g --resum", "task middle"])
def test_a_wrong_command_line_ends_with_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["sweep", *line.split()])
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


# ---- points ----


def test_a_grid_is_every_combination_the_last_variable_fastest() -> None:
    content = {"options": {"model": "m"}, "grid": {"tp": [1, 2], "batch": [1, 8], "depth": [0, 2]}}
    assert batches(content) == [(tp, batch, depth) for tp in (1, 2) for batch in (1, 8) for depth in (0, 2)]
    assert grid_of(content, "g").varied == ("tp", "batch", "depth")


def test_speculation_and_none_are_values_of_a_variable() -> None:
    grid = grid_of(
        {
            "options": {"model": "m"},
            "grid": {"speculative-method": [None, "ngram"], "num-speculative-tokens": [None, 4]},
            "link": [["speculative-method", "num-speculative-tokens"]],
        },
        "g",
    )
    without, with_it = (dict(point.settings) for point in grid.points)
    assert with_it == {**without, "speculative-method": "ngram", "num-speculative-tokens": 4}


def test_weights_and_cache_of_eight_bits_are_values_of_a_variable() -> None:
    axes = {"model": ["m"], "quantization": [None, "fp8"], "kv-cache-dtype": ["auto", "fp8"]}
    grid = grid_of({"grid": axes}, "g")
    assert grid.varied == ("quantization", "kv-cache-dtype")
    assert len(grid.by_key()) == 4
    command = parsed(BenchCommand, grid.points[3].flags("results"))
    assert (command.engine["quantization"], command.engine["kv_cache_dtype"]) == ("fp8", "fp8")
    with pytest.raises(SweepError, match="kv-cache-dtype"):
        grid_of({"grid": {**axes, "kv-cache-dtype": ["int4"]}}, "g")


def test_linked_variables_are_read_side_by_side() -> None:
    content = {
        "options": {"model": "m"},
        "grid": {"batch": [1, 8], "tp": [1, 2], "depth": [0, 2]},
        "link": [["batch", "chain-depth"]],
    }
    assert batches(content) == [(1, 1, 0), (2, 1, 0), (1, 8, 2), (2, 8, 2)]


def test_exclusions_leave_out_what_matches_all_of_an_entry() -> None:
    content = {
        "options": {"model": "m"},
        "grid": {"tp": [1, 2, 4], "batch": [1, 8]},
        "exclude": [{"tp": 4}, {"tp": [1, 2], "batch": 8}],
    }
    assert batches(content) == [(1, 1, None), (2, 1, None)]
    assert grid_of(content, "g").excluded == 4


def test_a_value_of_nothing_leaves_the_option_out() -> None:
    content = {"options": {"model": "m"}, "grid": {"num-blocks": [None, 64]}}
    without, with_blocks = grid_of(content, "g").points
    assert "num-blocks" not in without.settings
    assert without.key == Point("latency", {"model": "m"}).key
    assert with_blocks.flags("r")[-4:-2] == ["--num-blocks", "64"]


def test_a_point_is_a_command_line_that_bench_reads() -> None:
    settings: dict[str, Setting] = {"model": "m", "tp": 4, "ep": 4, "batch": 8, "depth": 0, "roofline": True}
    settings["prefix-caching"] = False
    flags = Point("latency", {**settings, "max-prefill-tokens": 64, "dtype": "float32"}).flags("out")
    assert flags == [
        *("bench", "latency", "--tensor-parallel-size", "4", "--expert-parallel", "--batch-size", "8"),
        *("--chain-depth", "0", "--dtype", "float32", "--max-num-batched-tokens", "64", "--model", "m"),
        *("--no-prefix-caching", "--roofline", "--result-dir", "out"),
    ]
    engine = parsed(BenchCommand, flags).engine
    assert engine["expert_parallel"] is True
    assert engine["max_prefill_tokens"] == 64


def test_groups_share_the_experts_of_all_ranks() -> None:
    point = Point("latency", {"model": "m", "tp": 2, "dp": 4})
    assert (point.ranks, point.ep) == (8, 8)
    assert point.key == Point("latency", {"model": "m", "tp": 2, "dp": 4, "ep": 8}).key
    flags = point.flags("out")
    assert flags[2:6] == ["--tensor-parallel-size", "2", "--data-parallel-size", "4"]
    assert "--expert-parallel" not in flags
    assert parsed(BenchCommand, flags).engine["data_parallel"] == 4
    assert [p.ranks for p in grid_of({"options": {"model": "m"}, "grid": {"dp": [1, 2, 4]}}, "g").points] == [1, 2, 4]
    with pytest.raises(SweepError, match="ep is 2, but groups share the experts: leave it out, or write 8"):
        Point("latency", {"model": "m", "tp": 2, "dp": 4, "ep": 2})


def test_models_are_named_by_as_much_of_their_paths_as_tells_them_apart() -> None:
    paths = ["/ckpt/a/step-1/hf", "/ckpt/b/step-1/hf", "/ckpt/b/step-2/hf", "qwen3-8b", "hf"]
    names = ["a/step-1/hf", "b/step-1/hf", "step-2/hf", "qwen3-8b", "hf"]
    assert list(model_names(paths).values()) == names
    points = grid_of({"grid": {"model": paths}}, "g").points
    assert [point.label(("tp", "model"), models_of(points)) for point in points] == [f"tp1 {name}" for name in names]
    assert points[0].label(("model",)) == "hf"


def test_several_batches_in_one_process() -> None:
    (point,) = grid_of({"options": {"model": "m", "batch": "1,8"}}, "g").points
    options = parsed(BenchCommand, point.flags("r")).options
    assert isinstance(options, LatencyOptions)
    assert options.batch_size == (1, 8)


def test_loads_are_points_too() -> None:
    options = {"model": "m", "tp": 2, "dataset-name": "prefix", "goodput": "ttft:200 tpot:20", "save-detailed": False}
    content = {
        "bench": "serve",
        "options": options,
        "grid": {"concurrency": [16, "64,256"], "request-rate": ["inf", 4]},
    }
    points = grid_of(content, "g").points
    assert [point.label(("concurrency", "request-rate")) for point in points] == [
        *("concurrency16 request-rate=inf", "concurrency16 request-rate4"),
        *("concurrency=64,256 request-rate=inf", "concurrency=64,256 request-rate4"),
    ]
    serve = parsed(BenchCommand, points[-1].flags("r")).options
    assert isinstance(serve, ServeOptions)
    assert (serve.max_concurrency, serve.request_rate) == ((64, 256), (4.0,))
    assert serve.goals == {"ttft": 200.0, "tpot": 20.0}
    with pytest.raises(SweepError, match=r"launch bench serve: .*is no goal such as ttft:200"):
        grid_of({"bench": "serve", "options": {"model": "m", "goodput": "fast"}}, "g")


# ---- keys ----


def test_a_key_is_the_same_for_ever() -> None:
    """Results on disk are found by it: if this fails, FORMAT must change."""
    point = Point("latency", {"model": "qwen3-8b", "batch": 8, "tp": 2, "depth": 2})
    assert point.canonical == (
        b'{"bench":"latency","format":1,"settings":{"batch":8,"depth":2,"dp":1,"ep":1,"model":"qwen3-8b","tp":2}}'
    )
    assert point.key == "cc1d3a3c70cd5094"


def test_order_and_spelling_do_not_change_a_key() -> None:
    one = {"options": {"model": "m", "chain_depth": 0}, "grid": {"batch-size": [8]}}
    other = {"options": {"depth": 0}, "grid": {"batch": [8], "tensor-parallel-size": [1], "model": ["m"]}}
    assert [point.key for point in grid_of(one, "a").points] == [point.key for point in grid_of(other, "b").points]


def test_other_settings_have_other_keys() -> None:
    contents: list[dict[str, Setting]] = [
        {},
        {"batch": 1},
        {"batch": 2},
        {"batch": "1"},
        {"tp": 2},
        {"roofline": True},
        {"seed": 1},
    ]
    points = [Point("latency", {"model": "m", **content}) for content in contents]
    assert len({point.key for point in [*points, Point("throughput", {"model": "m"})]}) == len(points) + 1


# ---- what is refused ----


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1], "the file must be 'name: value' lines, not list"),
        ({"grids": {}}, "'grids', which means nothing here"),
        ({"bench": "flips"}, "bench is 'flips', but must be one of latency, throughput"),
        ({"grid": {"batch": 8}}, "grid: batch must be a list of values, not int 8; a single one goes under options"),
        ({"grid": {"batch": []}}, "grid: batch must be a list"),
        ({"grid": {"batch": [1, 1]}}, "batch: the list has a value twice"),
        ({"grid": {"batch": [[1, 2]]}}, "lists of numbers are texts"),
        ({"options": {"batch": 1}, "grid": {"batch": [2]}}, "batch stands under options and under grid"),
        ({"options": {"depth": 1, "chain-depth": 2}}, "options sets depth twice, as 'chain-depth' too"),
        ({"options": {"result-dir": "x"}}, "'result-dir' cannot be set: the sweep chooses where results go"),
        ({"options": {"help": True}}, "'help' cannot be set"),
        ({"options": {"tensor_parallel": 2}}, "write tp"),
        ({"options": {"model": "m"}, "grid": {"tp": [0]}}, "tp is 0, but must be a whole number from 1"),
        ({"options": {"model": "m", "tp": 4, "ep": 2}}, "ep is 2, but must be 1, or tp, which is 4"),
        ({"options": {"model": "m", "memory-fraction": float("nan")}}, "must be a finite number"),
        ({"options": {"model": "m", "batchsize": 2}}, "unrecognized arguments: --batchsize 2"),
        ({"options": {"model": "m", "dtype": "int4"}}, "argument --dtype: invalid choice: 'int4'"),
        ({"options": {"batch": 8}}, "the following arguments are required: --model"),
        (
            {"options": {"model": "m", "speculative-config": '{"method": "ngrm", "num_speculative_tokens": 3}'}},
            "launch bench latency: --speculative-config: method is 'ngrm', but must be one of ngram",
        ),
        (
            {
                "options": {"model": "m", "spec-method": "ngram"},
                "grid": {"num-speculative-tokens": [2, None], "batch": [1, 2]},
            },
            "--speculative-config names no num_speculative_tokens: type",
        ),
        (
            {
                "options": {"model": "m", "num-speculative-tokens": 3},
                "grid": {"speculative-method": ["ngram", "mtp"], "speculative-model": ["models/demo/mtp", None]},
            },
            "method 'ngram' has no weights: leave model out",
        ),
        ({"options": {"model": "m", "concurrency": 8}}, "unrecognized arguments: --max-concurrency 8"),
        ({"options": {"model": "m"}, "link": [["a", "b"]]}, "not under grid (there are none): put it there, or"),
        (
            {"grid": {"tp": [1], "batch": [1, 2]}, "link": [["tp", "batch"]]},
            "lists of one length, but have tp 1, batch 2",
        ),
        ({"grid": {"tp": [1, 2]}, "link": [["tp"], ["tp"]]}, "link names tp twice"),
        ({"options": {"model": "m"}, "exclude": [{"batch": 1}]}, "exclude names batch, which no point has"),
        ({"options": {"model": "m"}, "exclude": [{}]}, "an entry of exclude is empty"),
        ({"options": {"model": "m"}, "exclude": [{"tp": 1}]}, "no point is left: all 1 are excluded"),
        ({"grid": {"seed": list(range(MOST_POINTS + 1))}}, "the grid has 100,001 combinations"),
        ({"options": {"model": "m"}, "minutes": 0}, "minutes is 0, but must be a whole number from 1"),
        ({"options": {"model": "m"}, "cluster": {"gpus": 8}}, "'gpus', which means nothing here"),
        ({"options": {"model": "m"}, "cluster": {"throttle": "4"}}, "throttle is '4', but must be a whole number"),
        ({"options": {"model": "m"}, "cluster": {"sbatch": ["mem=4G"]}}, "must be a list of sbatch options"),
        ({"options": {"model": "m"}, "cluster": {"sbatch": ["--mem=4G\nrm"]}}, "has a line break in it"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(content: Any, words: str) -> None:
    with pytest.raises(SweepError) as refused:
        grid_of(content, "g")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("options: {model: m}\ngrid:\n  batch: [1]\n  batch: [2]\n", "line 4 sets 'batch' a second time"),
        ("options: [1, 2", "is not YAML"),
        ("options: {model: !!python/object/apply:os.system [date]}", "is not YAML: could not determine a constructor"),
        ("\x00", "is not YAML"),
        ("options: {model: {{ model }}}", "is not YAML: while constructing a mapping"),
        ("options: {label: 2024-02-30}", "has a value that YAML cannot read: day is out of range for month"),
        (f"options: {{seed: {'1' * 5000}}}", "has a value that YAML cannot read: Exceeds the limit"),
        ("[" * 600, "is nested too deeply"),
        ("", "the following arguments are required: --model"),
    ],
)
def test_a_file_that_is_no_grid_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "g.yaml"
    path.write_text(text)
    with pytest.raises(SweepError) as refused:
        read_grid(path)
    assert str(refused.value).startswith(f"{path}")
    assert words in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"options: {model: \xff}")
    (tmp_path / "long.yaml").write_text("#" * (1 << 21))
    for name in ("latin.yaml", "long.yaml", "none.yaml"):
        with pytest.raises(SweepError, match=name):
            read_grid(tmp_path / name)


def test_a_grid_file_is_not_taken_for_its_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file name without an ending is the default of --out, too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "night").write_text("options: {model: m}\n")
    assert run_sweep(parsed(SweepCommand, ["sweep", "plan", "night"]), {}) == 2
    assert "error: the ledger would be night, which is a file: type --out FOLDER" in capsys.readouterr().err


def test_a_file_is_named_after_itself(tmp_path: Path) -> None:
    (tmp_path / "night.yaml").write_text("options: {model: m}\n")
    assert read_grid(tmp_path / "night.yaml").name == "night"
    (tmp_path / "night.yaml").write_text("name: long night\noptions: {model: m}\n")
    assert read_grid(tmp_path / "night.yaml").name == "long night"


def test_what_is_hashed_is_canonical_json() -> None:
    text = Point("latency", {"model": "modell-ä", "seed": 3}).canonical
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")).encode()

"""The command line of `bench`: what its subcommands say of themselves and accept."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

import pytest

from launch.bench.options import BenchCommand, LatencyOptions, ThroughputOptions
from launch.bench.session import SHAPES, model_folder, open_session
from launch.cli import build_parser, parse
from launch.errors import UsageError
from models.row_buckets import decode_ladder
from runtime.config import EngineConfig
from tests.runtime.engine.rig import tiny_folder


def subcommands() -> dict[str, argparse.ArgumentParser]:
    def choices_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
        return next(a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))

    return choices_of(choices_of(build_parser())["bench"])


def parsed(line: str) -> BenchCommand:
    command = parse(["bench", *line.split()])
    assert isinstance(command, BenchCommand)
    return command


@pytest.mark.parametrize("flag", ["--bytes-per-s", "--flop-per-s"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_a_device_s_rate_is_above_zero(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(f"latency --model m {flag} {value}")
    assert f"argument {flag}: {value} is not a finite number above 0" in capsys.readouterr().err


def no_engine(*_: object) -> NoReturn:
    pytest.fail("no engine is needed")


def config_of(folder: Path, line: str) -> EngineConfig:
    command = parsed(f"{line} --model {tiny_folder(folder)} --device cpu")
    return open_session(command, {}, no_engine).config


@pytest.mark.parametrize("name", ["latency", "throughput", "serve", "flips"])
def test_every_option_says_its_default_and_its_unit(name: str) -> None:
    for action in subcommands()[name]._actions:
        assert action.help is not None
        assert action.dest == "help" or "(default: " in action.help or "(required)" in action.help, action.dest
        assert action.dest == "help" or action.help.endswith("]"), action.dest


def test_options_left_out_have_their_defaults() -> None:
    command = parsed("latency --model m")
    assert (command.name, command.subcommand, command.engine) == ("bench", "latency", {"model": "m"})
    assert command.options == LatencyOptions()


def test_vllm_s_flags_are_read() -> None:
    line = "throughput --model m -tp 1 --input-len 7 --output-len 9 --num-prompts 11 --max-concurrency 3 --seed 5"
    line += " --dataset-name jsonl --dataset-path f.jsonl --num-iters 2 --num-warmups 0 --roofline --flop-per-s 1e12"
    command = parsed(line)
    assert command.engine == {"model": "m", "tensor_parallel": 1, "seed": 5}
    assert command.options == ThroughputOptions(
        input_len=7,
        output_len=9,
        num_prompts=11,
        max_concurrency=3,
        dataset_name="jsonl",
        dataset_path=Path("f.jsonl"),
        num_iters=2,
        num_warmups=0,
        roofline=True,
        flop_per_s=1e12,
    )
    assert parsed("latency --model m --batch-size 1,8 --num-iters-warmup 4").options == LatencyOptions(
        batch_size=(1, 8), num_warmups=4
    )
    assert parsed("latency --model m --profile").options == LatencyOptions(profile=True)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("latency --model m --batch-size 1,0", "0 is not at least 1"),
        ("latency --model m --batch-size 8,8", "names a number twice"),
        ("latency --model m --batch-size a", "'a' is not a whole number"),
        ("latency --model m --num-prompts 3", "unrecognized arguments"),
        ("throughput --model m --profile", "unrecognized arguments"),
        ("throughput --model m --dataset-name hf", "invalid choice"),
        ("flips a", "FILE"),
        ("", "SUBCOMMAND"),
    ],
)
def test_a_wrong_command_line_is_explained(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(line)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


# ---- what a protocol makes of it ----


def test_the_fixed_batch_protocol_sets_the_engine(tmp_path: Path) -> None:
    config = config_of(tmp_path, "latency --input-len 8 --output-len 9 --batch-size 1,40")
    assert not config.prefix_caching
    assert config.prefill_burst >= 1 << 20
    assert config.max_model_len == 256, "4096, but the model ends here"
    assert config.max_num_seqs == 40, "raised from the CPU's 32"
    assert config.decode_buckets == decode_ladder(40)
    assert config.load_format == "dummy", "the folder holds no weights"


def test_what_was_given_stays(tmp_path: Path) -> None:
    line = "latency --input-len 8 --output-len 9 --batch-size 2 --max-model-len 64 --prefill-burst 3 --chain-depth 4"
    config = config_of(tmp_path, line)
    assert (config.max_model_len, config.prefill_burst, config.chain_depth, config.max_num_seqs) == (64, 3, 4, 32)


def test_throughput_keeps_the_prefix_cache(tmp_path: Path) -> None:
    config = config_of(tmp_path, "throughput --max-concurrency 48")
    assert config.prefix_caching
    assert config.max_num_seqs == 48


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("latency --batch-size 9 --max-num-seqs 8", "type --max-num-seqs 9"),
        ("latency --batch-size 1", "make 769 tokens, but --max-model-len is 256"),
        ("latency --batch-size 1 --output-len 1", "--output-len 1 has no time between tokens"),
        ("latency --batch-size 1 --prefix-caching", "leave out --prefix-caching"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_it_starts(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        config_of(tmp_path, line)
    assert words in str(refused.value)


def test_a_shape_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_folder("qwen3-8b") == SHAPES / "qwen3-8b"
    (tmp_path / "qwen3-8b").mkdir()
    assert model_folder("qwen3-8b") == Path("qwen3-8b"), "a folder here comes first"
    for missing in ("qwen3-9b", "../shapes/qwen3-32b"):
        with pytest.raises(UsageError, match=r"no such shape \(there are gemma-3-27b, .*qwen3-0\.6b, "):
            model_folder(missing)

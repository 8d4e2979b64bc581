"""The command line: what it says of itself, what it accepts, and what it makes of it."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

import pytest

from launch.bench.options import BenchCommand
from launch.bench.session import open_session
from launch.cli import build_parser, parse
from launch.generate.options import Command
from runtime.config import ConfigError, EngineConfig, flag_of
from tests.launch.api.parsed import parsed

NEEDED = ["generate", "--model", "m", "--input", "i", "--output", "o"]


def generate_actions() -> list[argparse.Action]:
    commands = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return [a for a in commands.choices["generate"]._actions if a.dest != "help"]


@pytest.mark.parametrize("action", generate_actions(), ids=lambda action: action.dest)
def test_every_option_says_its_default_and_its_unit(action: argparse.Action) -> None:
    assert action.help is not None
    assert "(default: " in action.help or "(required)" in action.help
    assert not re.search(r"default: [\[('{]", action.help), "a default that cannot be typed"
    assert action.help.endswith("]")


@pytest.mark.parametrize("field", [f.name for f in fields(EngineConfig)])
def test_every_field_of_the_engine_s_config_has_an_option(field: str) -> None:
    assert flag_of(field) in [flag for action in generate_actions() for flag in action.option_strings]


def parser_of(name: str) -> argparse.ArgumentParser:
    parser = build_parser()
    for word in name.split():
        parser = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices[word]
    return parser


@pytest.mark.parametrize(
    "line",
    [
        *("generate --input i --output o", "serve", "daemon"),
        *("bench latency", "bench throughput", "bench serve"),
    ],
)
def test_help_states_the_defaults_that_the_command_has(line: str) -> None:
    """Those that are a word or a number; others are told in words."""
    command = parse([*line.split(), "--model", "models/demo", "--device", "cpu"])
    config = (
        open_session(command, {}, never_opened).config
        if isinstance(command, BenchCommand)
        else command.engine_config(1)  # type: ignore[union-attr]
    )
    parser = parser_of(line.partition(" --")[0])
    told = {
        action.dest: found[1]
        for action in parser._actions
        if hasattr(config, action.dest) and (found := re.search(r"\(default: (\S+)\) \[", action.help or ""))
    }
    assert len(told) > 15
    wrong = {name: text for name, text in told.items() if text not in typed(getattr(config, name))}
    assert wrong.keys() <= {"device"}, wrong


def typed(value: object) -> tuple[str, ...]:
    """How a value may stand on a command line."""
    if value is None:
        return ("off", "none")
    if isinstance(value, bool):
        return ("on" if value else "off",)
    return (",".join(value) if isinstance(value, tuple) else str(value),)


def never_opened(*_: object) -> NoReturn:
    raise AssertionError("the engine was opened")


def test_help_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["generate", "--help"])
    assert ended.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in ("256 on cuda, 32 on cpu", "--chain-depth STEPS", "default: on", "Exit code"):
        assert words in printed


def test_options_left_out_leave_the_config_s_defaults() -> None:
    config = parsed(Command, [*NEEDED, "--device", "cpu"]).engine_config(tensor_parallel=2)
    assert config == EngineConfig(model="m", device="cpu", tensor_parallel=2)


def test_given_options_reach_the_config() -> None:
    given = "--dtype float32 --device cpu --load-format dummy --max-model-len 128 --max-num-seqs 6 --block-size 8 "
    given += "--num-blocks 50 --gpu-memory-utilization 0.5 --max-num-batched-tokens 77 --prefill-burst 2 "
    given += "--chain-depth 0 --decode-buckets 1,3,6 --no-enable-prefix-caching --max-waiting 9 --horizon 4 --seed 11 "
    given += "--control-timeout-s 2.5"
    assert parsed(Command, [*NEEDED, *given.split()]).engine_config(1) == EngineConfig(
        model="m",
        dtype="float32",
        device="cpu",
        load_format="dummy",
        max_model_len=128,
        max_num_seqs=6,
        block_size=8,
        num_blocks=50,
        memory_fraction=0.5,
        max_prefill_tokens=77,
        prefill_burst=2,
        chain_depth=0,
        decode_buckets=(1, 3, 6),
        prefix_caching=False,
        max_waiting=9,
        horizon=4,
        seed=11,
        control_timeout_s=2.5,
    )


def test_generate_options() -> None:
    options = parsed(Command, [*NEEDED, "--overwrite", "--show", "3", "--temperature", "0"]).options
    assert (options.input, options.output, options.overwrite, options.show) == (Path("i"), Path("o"), True, 3)
    assert (options.temperature, options.top_p, options.max_tokens, options.drain_seconds) == (0.0, None, None, 20.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["complete"], "invalid choice"),
        (["generate"], "--model"),
        ([*NEEDED, "--max-num-sequences", "3"], "--max-num-sequences"),
        ([*NEEDED, "--max-num-seq", "3"], "unrecognized"),
        ([*NEEDED, "extra"], "extra"),
        ([*NEEDED, "--max-num-seqs", "many"], "many"),
        ([*NEEDED, "--dtype", "int4"], "int4"),
        ([*NEEDED, "--decode-buckets", "1,x"], "1,2,4,8"),
        ([*NEEDED, "--show", "-1"], "--show"),
        ([*NEEDED, "--look-ahead", "0"], "--look-ahead"),
        ([*NEEDED, "--drain-seconds", "nan"], "--drain-seconds"),
        ([*NEEDED, "--max-tokens", "0"], "--max-tokens"),
        ([*NEEDED, "--temperature", "-1"], "--temperature"),
        ([*NEEDED, "--top-p", "0"], "--top-p"),
        ([*NEEDED, "--top-k", "-1"], "--top-k"),
        ([*NEEDED, "--max-line-bytes", "0"], "--max-line-bytes"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_names_the_option(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_values_that_cannot_work_are_the_config_s_to_refuse() -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs 1"):
        parsed(Command, [*NEEDED, "--max-num-seqs", "0", "--device", "cpu"]).engine_config(1)


def test_help_starts_without_torch() -> None:
    """A person who asks for help does not wait for CUDA libraries to load."""
    code = "import sys; sys.argv[1:] = ['generate', '--help']\n"
    code += "import runpy\ntry:\n    runpy.run_module('launch', run_name='__main__')\nexcept SystemExit as end:\n"
    code += "    assert end.code == 0\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

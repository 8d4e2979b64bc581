"""Numbers of a command line, of the environment and of a grid: one reading, whatever script or sign they come in."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

import pytest

from launch.cli import parse
from launch.ranks.rendezvous import RendezvousError, discover, first_host
from launch.values import at_least_one, bounded, counts, integer, number, variable, whole_number, whole_numbers

FOREIGN = ("٣", "３", "²", "1_0", " 1", "1\n", "+1", "", "1.0", "0x1")  # each is a number to some Python function


@pytest.mark.parametrize("text", FOREIGN)
@pytest.mark.parametrize("read", [whole_number, at_least_one, whole_numbers, counts, integer])
def test_other_spellings_are_no_whole_numbers(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="number"):
        read(text)


@pytest.mark.parametrize("text", ["٣", "1_0", "1,5", "", "one"])
def test_other_spellings_are_no_numbers(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is not a number"):
        number(text)


def test_numbers_are_read() -> None:
    assert (whole_number("007"), at_least_one("1"), integer("-3"), number("1e-3")) == (7, 1, -3, 0.001)
    assert (whole_numbers("4,0,4"), counts("8,1")) == ((4, 0, 4), (8, 1))


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (whole_number, "-1", "-1 is not at least 0"),
        (whole_number, "a", "'a' is not a whole number"),
        (at_least_one, "0", "0 is not at least 1"),
        (at_least_one, "-1", "-1 is not at least 1"),
        (counts, "2,2", "2,2 names a number twice"),
        (bounded(integer, 0, 9), "10", "10 is not 0 to 9"),
        (bounded(integer, 0, 9), "-1", "-1 is not 0 to 9"),
        (bounded(number, 0), "-0.5", "-0.5 is not at least 0"),
        (bounded(number, 0), "nan", "nan is not at least 0"),
        (bounded(number, 0), "inf", "inf is not at least 0"),
    ],
)
def test_a_number_out_of_range_is_refused(read: Callable[[str], Any], text: str, said: str) -> None:
    with pytest.raises(ArgumentTypeError) as refused:
        read(text)
    assert str(refused.value) == said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("serve --model m --port -1", "argument --port: -1 is not 0 to 65535"),
        ("serve --model m --api-processes 0", "argument --api-processes: 0 is not 1 to 64"),
        ("serve --model m --max-body-bytes -5", "argument --max-body-bytes: -5 is not 1 to 1073741824"),
        ("generate --model m --input i --output o --top-k -1", "argument --top-k: -1 is not 0 to 2147483647"),
        ("generate --model m --input i --output o --show -1", "argument --show: -1 is not at least 0"),
        ("bench serve --model m --client-processes 65", "argument --client-processes: 65 is not 0 to 64"),
    ],
)
def test_an_option_out_of_range_names_its_range(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(line.split())
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "generate --model m --input i --output o --max-num-seqs",
        "generate --model m --input i --output o --max-tokens",
        "bench latency --model m --num-iters",
        "sweep plan g --gpus-per-node",
    ],
)
def test_every_command_reads_numbers_alike(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    parse([*line.split(), "3"])
    with pytest.raises(SystemExit):
        parse([*line.split(), "٣"])
    assert "number" in capsys.readouterr().err


def test_the_environment_is_read_alike() -> None:
    with pytest.raises(RendezvousError, match="WORLD_SIZE is '٣', but must be a whole number"):
        discover({"RANK": "0", "WORLD_SIZE": "٣"})
    with pytest.raises(ValueError, match="no range of numbers"):
        first_host("node[٣-4]")


def test_a_variable_that_is_no_number_counts_as_unset() -> None:
    """`doctor` tells of it, so it cannot end by it."""
    environ = {"LOCAL_RANK": "٣", "SLURM_LOCALID": "2", "WORLD_SIZE": ""}
    assert variable(environ, "LOCAL_RANK", "SLURM_LOCALID") == 2
    assert variable(environ, "WORLD_SIZE", "RANK") == 0

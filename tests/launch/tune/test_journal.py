"""The journal on disk: what it survives, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launch.errors import UsageError
from launch.tune.journal import Failed, Journal, Measured, Timed, opened
from models.kernels.matmul.choice_table import Blas, CublasLt
from tests.launch.tune.fake_gpu import BROKEN, FAST, VARIANT

IDENTITY = {"gpu": "NVIDIA H200", "kernels": "1"}
ONE = Measured(
    "products bfloat16 8x8 x8",
    8,
    Blas(),
    FAST,
    12.5,
    10.0,
    (Timed(FAST, 9.5, 10.0), Timed(CublasLt("00ff", 1), 20.0)),
    (Failed(BROKEN, "it is too large"),),
    1.25,
)
OTHER = Measured("attention bfloat16 4x128 x64", 8, None, VARIANT, None, 3.0)


def written(path: Path) -> None:
    with opened(path, IDENTITY) as journal:
        journal.add(ONE)
        journal.add(OTHER)
        journal.avoid(ONE.key, BROKEN, "it is too large")


def test_what_was_measured_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "gpu.tune.jsonl"
    written(path)
    for _ in range(2):
        with opened(path, IDENTITY) as journal:
            assert journal.done == {ONE.key: ONE, OTHER.key: OTHER}
            assert journal.avoided == {ONE.key: {BROKEN: "it is too large"}}
            assert journal.put_aside is None


def test_a_line_that_was_torn_is_lost_alone(tmp_path: Path) -> None:
    path = tmp_path / "gpu.tune.jsonl"
    written(path)
    whole = path.read_bytes()
    ends = [number + 1 for number, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (len(whole) - 1, ends[1] + 7, ends[1], ends[0] + 1):
        path.write_bytes(whole[:cut])
        with opened(path, IDENTITY) as journal:
            assert list(journal.done) == [ONE.key, OTHER.key][: sum(end <= cut for end in ends[1:3])]
            journal.add(OTHER)
        with opened(path, IDENTITY) as journal:
            assert OTHER.key in journal.done
        assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize("content", ["", "{", "[1]\n", '{"format": 1}\n', "\0\0\n"])
def test_a_file_that_is_no_journal_is_put_aside(tmp_path: Path, content: str) -> None:
    path = tmp_path / "gpu.tune.jsonl"
    path.write_text(content)
    with opened(path, IDENTITY) as journal:
        assert journal.done == {}
        assert journal.put_aside is not None
        assert journal.put_aside.read_text() == content
        journal.add(ONE)
    with opened(path, IDENTITY) as journal:
        assert list(journal.done) == [ONE.key]


def test_measurements_of_other_kernels_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "gpu.tune.jsonl"
    written(path)
    with opened(path, {**IDENTITY, "kernels": "2"}) as journal:
        assert (journal.done, journal.avoided) == ({}, {})
        assert journal.put_aside is not None


def test_two_at_a_time_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "gpu.tune.jsonl"
    with opened(path, IDENTITY), pytest.raises(UsageError, match=r"another launch tune is writing .*--out"):
        Journal(path, IDENTITY)
    with opened(path, IDENTITY):
        pass


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match=rf"{file}/kernels cannot be written \(Not a directory\): name another folder"):
        Journal(file / "kernels" / "gpu.tune.jsonl", IDENTITY)
    assert os.listdir(tmp_path) == ["file"]

"""The output file: what survives, what is refused, and what a second run finds."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from launch.api.parser import BadLine, Form
from launch.api.response import error_row
from launch.generate.output_file import ResultsFile, ResultsFileError, ResultsWriteError


def answer(line_id: str | int) -> bytes:
    return json.dumps({"id": line_id, "text": "t\n", "usage": {"total_tokens": 1}}).encode() + b"\n"


def batch_answer(custom_id: str) -> bytes:
    row = {"id": "batch_req_1", "custom_id": custom_id, "response": {"status_code": 200, "body": {}}, "error": None}
    return json.dumps(row).encode() + b"\n"


def bad(line: int, line_id: str | None, form: Form = Form.SIMPLE) -> bytes:
    return error_row(BadLine(line, line_id, form, "bad_line", "no"))


def write(path: Path, *rows: bytes, **options: Any) -> ResultsFile:
    with ResultsFile(path, **options) as results:
        for row in rows:
            results.write(row)
    return results


def test_rows_are_appended_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    assert write(path, answer("a"), batch_answer("b")).finished.ids == set()
    again = write(path, answer(3), bad(4, None), bad(9, "e"), bad(7, "f", Form.CHAT))
    assert again.finished.ids == {"a", "b"}
    third = write(path)
    assert third.finished.ids == {"a", "b", 3}
    assert third.finished.errors == {4: None, 9: "e", 7: "f"}
    assert path.read_bytes().startswith(answer("a") + batch_answer("b") + answer(3))


def test_overwrite_empties_the_file_first(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, answer("a"))
    assert write(path, answer("b"), overwrite=True).finished.ids == set()
    assert path.read_bytes() == answer("b")


def test_a_torn_last_line_is_cut_off_at_every_possible_byte(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole, torn = answer("a"), answer("b")
    for cut in range(len(torn)):
        path.write_bytes(whole + torn[:cut])
        results = write(path)
        assert results.finished.ids == {"a"}
        assert results.repaired_bytes == cut
        assert path.read_bytes() == whole


def test_errors_are_taken_out_of_the_file_that_a_link_names(tmp_path: Path) -> None:
    real, link = tmp_path / "scratch" / "out.jsonl", tmp_path / "out.jsonl"
    write(real, answer("a"), bad(2, "b"))
    link.symlink_to(real)
    write(link, answer("b"), retry_errors=True)
    assert link.is_symlink()
    assert real.read_bytes() == answer("a") + answer("b")


def test_a_disk_that_is_full_leaves_errors_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    write(path, answer("a"), bad(2, "b"))
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(ResultsWriteError, match=r"out\.jsonl cannot be written .*: No space left.* as it was"):
        ResultsFile(path, retry_errors=True)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_torn_only_line_longer_than_a_read_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"id": "' + b"x" * 200_000)
    assert write(path).repaired_bytes == 200_008
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "foreign",
    [
        b"a text\n",
        b"no line end",
        b'{"id": "a", "prompt": "an input line"}\n',
        b"[1]\n",
        b'{"text": 1}\n{"id": "x',
        b'{"experiment": "mine", "values": [0, 1, 2]}',  # as json.dump leaves it
        b'{"id": "a", "prompt": "an input line"}',
        b'{"in',
        answer("a") + b'{"experiment": 1}',
    ],
)
def test_a_file_that_is_not_an_output_is_refused_and_left_alone(tmp_path: Path, foreign: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(foreign)
    with pytest.raises(ResultsFileError, match="--overwrite"):
        ResultsFile(path)
    assert path.read_bytes() == foreign


def test_a_place_that_takes_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResultsFileError, match=r"out\.jsonl cannot be opened for writing: .*another --output"):
        ResultsFile(tmp_path / "file" / "out.jsonl")


def test_a_second_run_on_the_same_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultsFile(path) as results:
        results.write(answer("a"))
        with pytest.raises(ResultsFileError, match="another run is writing"):
            ResultsFile(path, overwrite=True)
    assert path.read_bytes() == answer("a")
    write(path)


def test_retrying_errors_takes_their_rows_out_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, answer("a"), bad(2, None), batch_answer("b"), bad(4, "d", Form.COMPLETION))
    with path.open("ab") as stream:
        stream.write(b'{"id": "torn')
    results = write(path, answer("d"), retry_errors=True)
    assert results.finished.ids == {"a", "b"}
    assert results.finished.errors == {}
    assert path.read_bytes() == answer("a") + batch_answer("b") + answer("d")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.jsonl"]


def test_rows_are_on_disk_soon_without_closing(tmp_path: Path) -> None:
    synced, sync = threading.Event(), os.fdatasync

    def sync_and_tell(fd: int) -> None:
        sync(fd)
        synced.set()

    path = tmp_path / "out.jsonl"
    with pytest.MonkeyPatch.context() as patch, ResultsFile(path, sync_seconds=0.01) as results:
        patch.setattr(os, "fdatasync", sync_and_tell)
        results.write(answer("a"))
        assert synced.wait(30)
        assert path.read_bytes() == answer("a")


def failing_write(limit: int) -> Callable[[int, Any], int]:
    """A disk with ``limit`` bytes left."""
    write, left = os.write, [limit]

    def limited(fd: int, data: Any) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(fd, bytes(data)[: left[0]])
        left[0] -= written
        return written

    return limited


@pytest.mark.parametrize("room", [0, 1, 40, 60, 100, 119])
def test_a_full_disk_is_an_error_that_leaves_whole_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    path = tmp_path / "out.jsonl"
    rows = [answer(f"row{i}") for i in range(3)]
    results = ResultsFile(path)
    monkeypatch.setattr(os, "write", failing_write(room))
    for row in rows:
        results._rows.put(row)
    with pytest.raises(ResultsWriteError, match=r"out\.jsonl cannot be written: No space left"):
        results.close()
    monkeypatch.undo()
    kept = path.read_bytes()
    assert b"".join(rows).startswith(kept)
    assert kept == b"" or kept.endswith(b"\n")
    assert len(kept) <= room
    assert write(path).repaired_bytes == 0


def test_many_rows_from_the_queue_keep_their_order(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    rows = [answer(i) for i in range(random.Random(0).randrange(2000, 3000))]
    write(path, *rows)
    assert path.read_bytes() == b"".join(rows)

"""The output file: what survives, what is refused, and what a second run finds."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from launch.api.parser import BadLine, Form
from launch.api.response import error_row, read_back
from launch.generate.output_file import ResultsFile, ResultsFileError, ResultsWriteError, name_of


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
            found = read_back(row)
            results.write(row, name_of(found.line_id, found.error.line if found.error else 0))
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
        results.write(answer("a"), "a")
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
        results.write(answer("a"), "a")
        assert synced.wait(300)
        assert path.read_bytes() == answer("a")


TAKEN_AWAY: dict[str, tuple[Callable[[Path], object], str]] = {
    "deleted": (Path.unlink, r"is gone \(No such file or directory\)"),
    "moved": (lambda path: path.rename(path.with_name("kept.jsonl")), "is gone"),
    "its folder deleted": (lambda path: shutil.rmtree(path.parent), "is gone"),
    "replaced": (lambda path: path.with_name("x").rename(path), "is another file now"),
    "emptied": (lambda path: os.truncate(path, 0), "was cut short, to"),
    "truncated": (lambda path: os.truncate(path, len(answer("a"))), "was cut short, to"),
    "overwritten": (lambda path: path.write_bytes(answer("a") + b"something else\n" * 99), "was overwritten"),
}


@pytest.mark.parametrize("during", [True, False], ids=["while rows come", "behind the last row"])
@pytest.mark.parametrize("how", TAKEN_AWAY)
def test_a_file_that_was_taken_away_is_an_error_that_names_the_missing_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, during: bool
) -> None:
    path = tmp_path / "out" / "out.jsonl"
    take, said = TAKEN_AWAY[how]
    write(path, answer("a"), bad(2, None))  # an earlier run's
    path.with_name("x").write_bytes(answer("a") + b"something else\n")
    results = ResultsFile(path)
    looked, lost = threading.Event(), results._lost

    def look() -> ResultsWriteError | None:
        found = lost()
        looked.set()
        return found

    monkeypatch.setattr(results, "_lost", look)
    results.write(answer("b"), "b")
    assert looked.wait(300)  # written, and found where it was written
    take(path)
    if during:
        results.write(answer("c"), "c")
        while results._failure is None:
            time.sleep(0.001)
        with pytest.raises(ResultsWriteError, match=said):
            results.write(answer("d"), "d")
    with pytest.raises(ResultsWriteError, match=rf"out\.jsonl {said}.* rows are missing: .*same command") as caught:
        results.close()
    names = {"a", "line 2", "b", *(["c"] if during else [])}
    if how in ("replaced", "truncated", "overwritten"):
        names.remove("a")
    if during and how in ("emptied", "truncated", "overwritten"):
        names.remove("c")  # it came behind
    told = str(caught.value).split("are missing: ")[1].split(". Run")[0]
    assert set(told.split(", ")) == names
    assert f" {len(names)} rows" in str(caught.value)
    if how in ("emptied", "truncated"):
        missing = {"a", "b", "c"} - names
        assert write(path).finished.ids == (missing if during else missing - {"c"})


def test_many_missing_rows_are_counted_and_the_first_named(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path / "out.jsonl")
    for number in range(100):
        results.write(answer(number), number)
    results.path.unlink()
    with pytest.raises(
        ResultsWriteError, match=r"100 rows are missing: 0, 1, 2, .*, 19 \.\.\. Run|100 rows .* 19 \.\.\.\."
    ):
        results.close()


def test_a_link_may_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "real.jsonl")
    write(tmp_path / "out.jsonl", answer("a"))
    assert (tmp_path / "real.jsonl").read_bytes() == answer("a")


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

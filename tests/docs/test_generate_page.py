"""docs/generate.md shows rows as they are: each form's fields, all codes, and every field of the simple form."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import msgspec
import pytest

from launch.api.parser import BadLine
from launch.api.response import answer_row
from launch.api.schema import SimpleLine
from launch.generate.input_file import FinishedRows, read_requests
from runtime.frontend.outputs import Completion, RequestOutput, Timing
from runtime.schedule.request import FinishReason
from tests.launch.generate import batches
from tests.launch.public_face import RECORD, names_in

PAGE = (Path(__file__).resolve().parents[2] / "docs/generate.md").read_text()


def shown(heading: str) -> list[str]:
    (section,) = (part for part in PAGE.split("\n## ") if part.startswith(heading + "\n"))
    return re.findall(r"^```json\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("heading", "rows", "form"),
    [
        ("Rows of the simple form", (0, 1), "output, simple"),
        ("Rows of batch lines", (0,), "output, completion"),
        ("Rows of batch lines", (1,), "output, chat"),
        ("Error rows", (0,), "error row, simple"),
        ("Error rows", (1,), "error row, chat"),
    ],
)
def test_a_row_of_each_form_has_the_fields_that_are_written(heading: str, rows: tuple[int, ...], form: str) -> None:
    names = {name for row in rows for name in names_in(json.loads(shown(heading)[row]))}
    assert sorted(names) == json.loads(RECORD.read_text())["fields"][f"generate {form}"]


def test_the_lines_of_the_page_are_read() -> None:
    (lines,) = shown("Input")
    found = list(read_requests(io.BytesIO(lines.encode()), batches.parser(), FinishedRows(), 1000))
    assert len(found) == 4
    assert [one for one in found if isinstance(one, BadLine)] == []


def test_every_field_of_the_simple_form_is_explained() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE.partition("\n## Rows")[0], re.MULTILINE)
    assert set(SimpleLine.__struct_fields__) <= set(re.findall(r"`(\w+)`", " ".join(rows)))


def test_every_code_is_explained() -> None:
    text = b'{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "a"}\n{}\n{"prompt": "' + b"a" * 100 + b'"}\n'
    good, *bad = read_requests(io.BytesIO(text), batches.parser(), FinishedRows(), 50)
    codes = {one.code for one in bad if isinstance(one, BadLine)}
    assert not isinstance(good, BadLine)
    for reason in (FinishReason.REJECTED, FinishReason.ERROR):
        ended = RequestOutput(1, "a", (5,), (Completion(0, "", (), reason, 1),), Timing(0, None, None, 1))
        codes.add(msgspec.json.decode(answer_row(good, [ended], None, 0))["error"]["code"])
    assert codes == set(re.findall(r"^\| `(\w+)` \|", PAGE.partition("\n## Error rows")[2], re.MULTILINE))

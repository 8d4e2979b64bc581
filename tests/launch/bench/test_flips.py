"""`bench flips`: what it says of two files of answers, and which files it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.bench import command as bench
from launch.bench.flips import compare_answers
from launch.bench.options import BenchCommand
from launch.errors import UsageError
from launch.ranks.start_engine import open_engine
from tests.launch.api.parsed import parsed


def answer(
    tokens: list[int], scores: list[float] | None = None, likely: list[list[Any]] | None = None
) -> dict[str, Any]:
    found: dict[str, Any] = {"text": "", "token_ids": tokens, "finish_reason": "length", "seed": 0}
    if scores is not None:
        tops = likely or [[] for _ in tokens]
        found["logprobs"] = [
            {"token_id": token, "logprob": score, "rank": 1, "top": top}
            for token, score, top in zip(tokens, scores, tops, strict=True)
        ]
    return found


def write(path: Path, **rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"id": name, **row}) + "\n" for name, row in rows.items()))
    return path


def test_first_differences_and_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top = [[[5, -0.5]], [[6, -0.7], [7, -0.75]], [[8, -0.1]]]
    first = write(
        tmp_path / "a.jsonl",
        one=answer([5, 6, 8], [-0.5, -0.7, -0.1], top),
        two={"choices": [answer([1, 2], [-0.1, -0.2]), answer([3])]},
        bad={"error": {"line": 3, "code": "x", "message": "y"}},
    )
    second = write(
        tmp_path / "b.jsonl",
        one=answer([5, 7, 9], [-0.5, -0.7, -0.1], top),
        two={"choices": [answer([1, 2], [-0.1, -0.2000001]), answer([3])]},
        bad={"error": {"line": 3, "code": "x", "message": "y"}},
    )
    found = compare_answers(first, second)
    assert (found.answers, found.tokens, found.scored, found.bits) == (3, 2 + 2 + 1, 1 + 2, 1)
    (flip,) = found.flips
    assert (flip.answer, flip.position, flip.token, flip.other) == ("'one'[0]", 1, 6, 7)
    assert flip.gap == pytest.approx(0.05)
    assert found.flips_per_1000 == 200.0
    command = parsed(BenchCommand, ["bench", "flips", str(first), str(second)])
    assert bench.run(command, {}, open_engine) == 0
    told = capsys.readouterr().out
    assert "1 first differences, 200.000 in 1,000 tokens" in told
    assert "1 of 3 log-probabilities" in told
    assert "'one'[0], token 1: 6 and 7, -0.700000 and -0.750000" in told
    assert compare_answers(first, first).flips == []


def test_files_that_cannot_be_compared(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", one=answer([1, 2]))
    with pytest.raises(UsageError, match="cannot be read"):
        compare_answers(first, tmp_path / "nothing.jsonl")
    with pytest.raises(UsageError, match="do not answer the same"):
        compare_answers(first, write(tmp_path / "b.jsonl", two=answer([1, 2])))
    with pytest.raises(UsageError, match="were the limits the same"):
        compare_answers(first, write(tmp_path / "c.jsonl", one=answer([1])))
    (tmp_path / "d.jsonl").write_text("[1]\n")
    with pytest.raises(UsageError, match="line 1: no answer in the simple form"):
        compare_answers(first, tmp_path / "d.jsonl")
    for row in ({"token_ids": 5}, {"token_ids": [1, 2], "logprobs": [{"logprob": -0.5}]}):
        with pytest.raises(UsageError, match=r"e\.jsonl, line 1: no answer in the simple form"):
            compare_answers(first, write(tmp_path / "e.jsonl", one=row))

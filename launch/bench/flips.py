"""`bench flips`: the answers of two runs of `generate`, compared token by token.

Knows: the simple form of answers (api/response.py), and what is compared: tokens up to the first that differs in each
answer, since after it everything is another text. Does not know: engines, or with which options a file was written.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from launch.errors import UsageError

MOST_SHOWN = 20  # first differences


@dataclass(frozen=True, slots=True)
class Flip:
    """The first other token of an answer: both tokens, and both scores in the first file. The second token's score is
    None where it is not among those that the file lists.
    """

    answer: str
    position: int
    token: int
    other: int
    logprob: float | None
    other_logprob: float | None

    @property
    def gap(self) -> float | None:
        return None if self.logprob is None or self.other_logprob is None else self.logprob - self.other_logprob


@dataclass(slots=True)
class Comparison:
    """``tokens``: compared. ``bits``: of these the ones with the same token, but another log-probability, by any bit.
    ``scored``: of these the ones with a log-probability in both files.
    """

    answers: int = 0
    tokens: int = 0
    scored: int = 0
    bits: int = 0
    flips: list[Flip] = field(default_factory=list)

    @property
    def flips_per_1000(self) -> float:
        return 1000 * len(self.flips) / self.tokens if self.tokens else 0.0


def compare_answers(first: Path, second: Path) -> Comparison:
    """Raises UsageError for files that cannot be read, or that do not answer the same lines."""
    one, two = dict(_answers(first)), dict(_answers(second))
    if one.keys() != two.keys():
        apart = sorted(one.keys() ^ two.keys())
        raise UsageError(
            f"{first} and {second} do not answer the same: {len(apart)} are in one only, such as {apart[0]}"
        )
    found = Comparison(answers=len(one))
    for name, (tokens, scores) in one.items():
        others, other_scores = two[name]
        for position, (token, other) in enumerate(zip(tokens, others, strict=False)):
            found.tokens += 1
            here = scores[position] if scores else None
            if token != other:
                found.flips.append(_flip(name, position, token, other, here))
                break
            if here is not None and other_scores:
                found.scored += 1
                found.bits += here["logprob"] != other_scores[position]["logprob"]
        else:
            if len(tokens) != len(others):
                raise UsageError(f"{name}: one answer ends where the other goes on: were the limits the same?")
    return found


def flips(first: Path, second: Path) -> int:
    """The whole command; prints, returns 0. Raises UsageError as above."""
    found = compare_answers(first, second)
    print(f"{found.answers} answers, {found.tokens} tokens up to each one's first difference")
    print(f"{len(found.flips)} first differences, {found.flips_per_1000:.3f} in 1,000 tokens")
    print(f"{found.bits} of {found.scored} log-probabilities of equal tokens differ")
    gaps = [flip.gap for flip in found.flips if flip.gap is not None]
    if gaps:
        print(f"scores of the two tokens: {statistics.median(gaps):.3g} apart (median), {max(gaps):.3g} at most")
    for flip in found.flips[:MOST_SHOWN]:
        scores = f"{_shown(flip.logprob)} and {_shown(flip.other_logprob)}"
        print(f"  {flip.answer}, token {flip.position}: {flip.token} and {flip.other}, {scores} in the first file")
    return 0


def _answers(path: Path) -> Iterator[tuple[str, tuple[list[int], list[Any]]]]:
    """(line id and number of the answer, (tokens, their log-probabilities or nothing)); rows of errors are left out."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            row = msgspec.json.decode(line)
            if "error" in row and "response" not in row:
                continue
            for index, answer in enumerate(row.get("choices", [row])):
                tokens, scores = answer["token_ids"], answer.get("logprobs") or []
                if not isinstance(tokens, list) or (scores and len(scores) != len(tokens)):
                    raise TypeError("tokens are a list, and all of them have log-probabilities or none")
                yield f"{row['id']!r}[{index}]", (tokens, scores)
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}, line {number}: no answer in the simple form of generate") from error


def _flip(name: str, position: int, token: int, other: int, here: Any) -> Flip:
    if here is None:
        return Flip(name, position, token, other, None, None)
    return Flip(name, position, token, other, here["logprob"], dict(map(tuple, here["top"])).get(other))


def _shown(logprob: float | None) -> str:
    return "not listed" if logprob is None else f"{logprob:.6f}"

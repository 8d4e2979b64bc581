"""Trace files: times in both units, lengths and prompts, shared blocks, and lines that are refused by number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from launch.bench.load.trace_file import Trace, read_trace
from launch.errors import BenchError
from runtime.engine import ServedModel

MODEL = ServedModel(vocab_size=5000, max_model_len=4096, eos_token_ids=(2,))


def read(folder: Path, *lines: Mapping[str, object] | str, count: int | None = None) -> Trace:
    path = folder / "trace.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return read_trace(path, count, None, None, 7, MODEL, 3, range(100, 5000))


def test_lengths_in_mooncake_s_form_share_what_their_hashes_share(tmp_path: Path) -> None:
    first = {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [4, 5, 6]}
    second = {"timestamp": 3500, "input_length": 1600, "output_length": 9, "hash_ids": [4, 5, 7, 8]}
    trace = read(tmp_path, first, second)
    assert trace.drawn
    assert trace.offsets == [0.0, 2.5]
    one, other = (request.prompt for request in trace.requests)
    assert (len(one), len(other)) == (1100, 1600)
    assert one[:1024] == other[:1024], "two blocks of 512 tokens"
    assert one[1024:] != other[1024:1100]
    assert [request.sampling.max_tokens for request in trace.requests] == [5, 9]
    assert trace == read(tmp_path, first, second)


def test_requests_of_generate_come_with_a_time_in_seconds_in_order_of_arrival(tmp_path: Path) -> None:
    late = {"arrival_time": 9.5, "prompt_token_ids": [5, 7], "max_tokens": 4, "ignore_eos": True, "id": "late"}
    early = {"arrival_time": 8.0, "custom_id": "e", "url": "/v1/completions", "body": {"prompt": [9, 9, 9]}}
    trace = read(tmp_path, late, early)
    assert not trace.drawn
    assert trace.offsets == [0.0, 1.5]
    assert [tuple(request.prompt) for request in trace.requests] == [(9, 9, 9), (5, 7)]
    assert [request.sampling.max_tokens for request in trace.requests] == [7, 4], "7: --output-len"


def test_a_file_without_times_has_no_schedule(tmp_path: Path) -> None:
    trace = read(tmp_path, {"input_length": 3, "output_length": 2}, {"input_length": 4, "output_length": 2}, count=1)
    assert trace.offsets is None
    assert [len(request.prompt) for request in trace.requests] == [3]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            ({"timestamp": 1, "input_length": 3, "output_length": 2}, {"input_length": 3, "output_length": 2}),
            "line 2: ",
        ),
        (({"input_length": 0, "output_length": 2},), "input_length is 0 and output_length 2: both must be at least 1"),
        (({"input_length": 3},), "output_length None"),
        (("{",), "line 1 is no line of a trace"),
        (({"timestamp": "soon"},), "line 1 is no line of a trace"),
        (({"prompt_token_ids": [5], "max_token": 3},), "unknown field `max_token`"),
        (({"prompt_token_ids": [5], "n": 2},), "n > 1, several prompts and stop strings are not measured"),
        ((), "gives 0 requests: name another file"),
    ],
)
def test_a_line_that_cannot_be_measured_is_named(
    tmp_path: Path, lines: tuple[Mapping[str, object] | str, ...], words: str
) -> None:
    with pytest.raises(BenchError) as refused:
        read(tmp_path, *lines)
    assert words in str(refused.value)


def test_more_requests_than_a_file_has_are_refused_with_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="gives 1 requests, 6 are asked for: type --num-prompts 1 or less"):
        read(tmp_path, {"input_length": 3, "output_length": 2}, count=6)

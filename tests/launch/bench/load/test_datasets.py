"""Datasets of `bench serve`: fixed draws of the mixed load, lengths, shared beginnings, other ids for other runs."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from launch.bench.load.datasets import (
    LoadSet,
    load_set,
    long_requests,
    mixed_requests,
    prefix_requests,
    random_requests,
)
from launch.bench.serve_options import DatasetName, ServeOptions
from launch.bench.workload import id_range
from launch.errors import UsageError
from runtime.engine import ServedModel
from runtime.frontend.client import PromptRequest

MODEL = ServedModel(vocab_size=151_936, max_model_len=4096, eos_token_ids=(2,))
IDS = id_range(MODEL.vocab_size)
# Of the files that the engines in docs/peers.json were measured with, by seed: requests, prompt and output tokens of
# all; prompt length, answer length and first ids of the first four requests; the last two ids of the last one.
GOLDEN = {
    5: (
        (1024, 350_765, 264_108),
        [
            (497, 46, (65387, 13693, 41217)),
            (79, 119, (78886, 112466, 84840)),
            (359, 455, (13558, 9957, 51086)),
            (54, 208, (47262, 142014, 101362)),
        ],
        (110_233, 76_119),
    ),
    6: (
        (384, 126_647, 97_172),
        [
            (212, 148, (97921, 83825, 5838)),
            (180, 509, (33667, 19491, 91955)),
            (325, 188, (22819, 22775, 32836)),
            (228, 192, (86658, 48868, 115678)),
        ],
        (79_070, 51_378),
    ),
}


def ids(request: PromptRequest) -> tuple[int, ...]:
    assert not isinstance(request.prompt, str)
    return tuple(request.prompt)


def drawn(name: DatasetName, count: int = 8, **options: object) -> LoadSet:
    return load_set(ServeOptions(dataset_name=name, **options), count, MODEL, Path(), 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", GOLDEN)
def test_mixed_requests_are_those_that_other_engines_were_measured_with(seed: int) -> None:
    (count, prompt_tokens, output_tokens), first, last = GOLDEN[seed]
    requests = mixed_requests(count, seed, MODEL.vocab_size)
    assert [(len(ids(one)), one.sampling.max_tokens, ids(one)[:3]) for one in requests[:4]] == first
    assert ids(requests[-1])[-2:] == last
    assert sum(len(ids(one)) for one in requests) == prompt_tokens
    assert sum(one.sampling.max_tokens for one in requests) == output_tokens
    assert all(one.sampling.greedy and one.sampling.ignore_eos for one in requests)


def test_a_smaller_vocabulary_and_a_lower_longest_change_no_other_length() -> None:
    whole = mixed_requests(50, 5, MODEL.vocab_size)
    folded = mixed_requests(50, 5, 4096)
    assert [len(ids(one)) for one in folded] == [len(ids(one)) for one in whole]
    assert all(100 <= each < 4096 for one in folded for each in ids(one))
    capped = mixed_requests(50, 5, 4096, longest_prompt=40, longest_answer=5)
    assert {len(ids(one)) for one in capped} <= set(range(8, 41))
    assert {one.sampling.max_tokens for one in capped} == {5}


def test_random_lengths_lie_around_their_middle() -> None:
    requests = random_requests(400, 0, IDS, 100, 10, 0.5)
    prompts = {len(ids(one)) for one in requests}
    assert (min(prompts), max(prompts)) == (50, 150)
    assert {one.sampling.max_tokens for one in requests} == set(range(5, 16))
    assert {len(ids(one)) for one in random_requests(9, 0, IDS, 100, 10, 0.0)} == {100}


def test_prompts_share_their_beginnings_and_nothing_else() -> None:
    requests = prefix_requests(40, 2, IDS, prefix_len=30, suffix_len=20, output_len=5, prefixes=4)
    assert sorted(Counter(ids(one)[:30] for one in requests).values()) == [10] * 4
    assert len({ids(one)[30:] for one in requests}) == 40
    assert {len(ids(one)) for one in requests} == {50}
    again = prefix_requests(40, 2, IDS, prefix_len=30, suffix_len=20, output_len=5, prefixes=4)
    assert requests == again


def test_long_prompts_are_ragged() -> None:
    requests = long_requests(300, 0, IDS, longest=10_000, output_len=100)
    lengths = sorted(len(ids(one)) for one in requests)
    assert lengths[0] >= 100
    assert 8_000 < lengths[-1] <= 10_000
    assert 700 < lengths[150] < 1_400, "log-uniform: the median is the geometric mean"
    assert all(25 <= one.sampling.max_tokens <= 100 for one in requests)
    assert len(ids(drawn("long", 4).requests[0])) <= 4096 - 128, "as long as the model allows, where nobody says"


def test_other_turns_have_other_ids_of_the_same_shape() -> None:
    load = drawn("prefix", 12, prefix_len=16, suffix_len=8, num_prefixes=3)
    assert load.with_other_ids(0) is load.requests
    own = [ids(one) for one in load.requests]
    for turn in (-2, -1, 1, 2):
        other = [ids(one) for one in load.with_other_ids(turn)]
        assert [len(one) for one in other] == [len(one) for one in own]
        assert not {one[0] for one in other} & {one[0] for one in own}, "no first block is the same"
        assert sorted(Counter(one[:16] for one in other).values()) == [4, 4, 4], "what was shared is shared"
        assert all(each in IDS for one in other for each in one)


def test_requests_are_sampled_where_the_command_line_says_so() -> None:
    (greedy,) = drawn("mixed", 1).requests
    (sampled,) = drawn("mixed", 1, temperature=0.7, top_p=0.9, top_k=20).requests
    assert greedy.sampling.greedy
    found = sampled.sampling
    assert (found.temperature, found.top_p, found.top_k, found.ignore_eos) == (0.7, 0.9, 20, True)
    assert (sampled.prompt, found.max_tokens) == (greedy.prompt, greedy.sampling.max_tokens)


def test_sampling_that_no_engine_takes_is_refused_before_one_starts() -> None:
    with pytest.raises(UsageError, match="top_p is 0, but must be more than 0"):
        drawn("mixed", 1, temperature=0.7, top_p=0.0)
    with pytest.raises(UsageError, match="temperature is 5000, but must be"):
        drawn("mixed", 1, temperature=5000.0)


def test_bursts_need_a_rate() -> None:
    with pytest.raises(UsageError, match="--request-rate, which is inf: type one"):
        drawn("burst")
    load = load_set(ServeOptions(dataset_name="burst", burst_size=3), 6, MODEL, Path(), 1, rate=2.0)
    assert load.offsets is not None
    assert len(set(load.offsets)) == 2
    assert [one.prompt for one in load.requests] == [one.prompt for one in mixed_requests(6, 1, MODEL.vocab_size)]


def test_a_request_that_the_model_cannot_hold_is_named() -> None:
    with pytest.raises(UsageError, match=r"request 0 of --dataset-name random has 4000 prompt and 128 output tokens"):
        drawn("random", 2, input_len=4000)


def test_a_request_that_is_too_long_is_blamed_on_what_made_it_so(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5000, "output_length": 4}\n')
    for options, words in (
        ({"name": "prefix", "prefix_len": 4000}, "type --prefix-len, --suffix-len and --output-len of 4096 or less"),
        ({"name": "random", "input_len": 3900, "random_range_ratio": 0.5}, "less together at their longest"),
        ({"name": "trace", "dataset_path": trace}, f"take it out of {trace}, or raise --max-model-len"),
    ):
        with pytest.raises(UsageError) as refused:
            drawn(**options)  # type: ignore[arg-type]
        assert words in str(refused.value)


def test_answers_as_long_as_the_model_leave_no_room_for_a_long_prompt() -> None:
    with pytest.raises(UsageError, match="request 0 of --dataset-name long has 1 prompt and"):
        drawn("long", 8, output_len=20_000)
    assert {len(ids(one)) for one in drawn("long", 8, output_len=4095).requests} == {1}


def test_a_file_s_prompts_are_nobody_else_s(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"prompt_token_ids": [5, number]}) + "\n" for number in range(3)))
    load = drawn("jsonl", 3, dataset_path=path, output_len=6)
    assert not load.drawn
    assert [ids(one) for one in load.requests] == [(5, 0), (5, 1), (5, 2)]
    with pytest.raises(UsageError, match="needs a file: type --dataset-path FILE"):
        drawn("trace")
    with pytest.raises(UsageError, match=r"has no tokenizer\.json"):
        drawn("sharegpt", dataset_path=path)
    with pytest.raises(UsageError, match=r"lines\.jsonl is not read by --dataset-name mixed: leave it out, or type"):
        drawn("mixed", dataset_path=path)
    assert math.isinf(ServeOptions().request_rate[0])

"""Datasets: exact lengths, the same prompts for the same seed, and files that are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.bench.workload import jsonl_prompts, random_prompts, sharegpt_prompts
from launch.errors import BenchError
from runtime.engine import ServedModel
from runtime.frontend.client import PromptRequest
from runtime.frontend.validation import stop_ids_of
from tests.runtime.frontend.small_tokenizers import byte_level

MODEL = ServedModel(vocab_size=400, max_model_len=64, eos_token_ids=(2, 3))


def ids_of(request: PromptRequest) -> tuple[int, ...]:
    assert not isinstance(request.prompt, str)
    return tuple(request.prompt)


def stop_ids(request: PromptRequest) -> tuple[int, ...]:
    return stop_ids_of(request.sampling, MODEL.eos_token_ids)


def test_random_prompts_follow_the_protocol() -> None:
    prompts = random_prompts(3, 2000, 7, vocab_size=151_936, seed=4)
    assert prompts == random_prompts(3, 2000, 7, vocab_size=151_936, seed=4)
    assert prompts != random_prompts(3, 2000, 7, vocab_size=151_936, seed=5)
    assert [len(ids_of(prompt)) for prompt in prompts] == [2000] * 3
    ids = [token_id for prompt in prompts for token_id in ids_of(prompt)]
    assert 100 <= min(ids) < 1000
    assert 149_000 < max(ids) < 150_000
    for prompt in prompts:
        assert prompt.sampling.greedy
        assert prompt.sampling.ignore_eos
        assert (prompt.sampling.max_tokens, stop_ids(prompt)) == (7, ())


@pytest.mark.parametrize("vocab_size", [2, 100, 101, 4096])
def test_random_ids_stay_below_the_vocabulary(vocab_size: int) -> None:
    (prompt,) = random_prompts(1, 500, 1, vocab_size, seed=0)
    assert min(vocab_size - 1, 100) <= min(ids_of(prompt))
    assert max(ids_of(prompt)) < vocab_size


# ---- ShareGPT ----


def sharegpt_file(folder: Path, *pairs: tuple[str, ...]) -> Path:
    path = folder / "sharegpt.json"
    turns = [[{"from": "human", "value": text} for text in texts] for texts in pairs]
    path.write_text(json.dumps([{"id": str(i), "conversations": c} for i, c in enumerate(turns)]))
    return path


QUESTION = "the quick brown fox jumps over the lazy dog"


def test_sharegpt_gives_questions_and_the_lengths_of_their_answers(tmp_path: Path) -> None:
    answers = [" ".join(["naïve café"] * n) for n in (2, 3, 4)]
    pairs = [(f"{QUESTION} {i}", answer) for i, answer in enumerate(answers)]
    path = sharegpt_file(tmp_path, *pairs, ("hi", "ho"), ("only a question and nothing else",), (QUESTION, "so " * 900))
    tokenizer = byte_level()
    found = sharegpt_prompts(path, tokenizer, 3, None, 1000, seed=0)
    expected = {tuple(tokenizer.encode(q)): len(tokenizer.encode(a)) for q, a in pairs}
    assert {ids_of(prompt): prompt.sampling.max_tokens for prompt in found} == expected
    assert found == sharegpt_prompts(path, tokenizer, 3, None, 1000, seed=0)
    fixed = sharegpt_prompts(path, tokenizer, 4, 12, 1000, seed=0)
    assert [prompt.sampling.max_tokens for prompt in fixed] == [12] * 4
    shorter = sharegpt_prompts(path, tokenizer, 4, 3, 1000, seed=0)
    assert [prompt.sampling.max_tokens for prompt in shorter] == [3] * 4, "as in vLLM, which looks at the file's alone"
    with pytest.raises(BenchError, match="gives 3 usable prompts, 4 are asked for: type --num-prompts 3 or less"):
        sharegpt_prompts(path, tokenizer, 4, None, 1000, seed=0)


@pytest.mark.parametrize(
    "text", ["{}", "[1]", '[{"conversations": [{"from": "human"}]}]', "\n", '[{"conversations": 1}]']
)
def test_what_is_no_sharegpt_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"x\.json is no ShareGPT file"):
        sharegpt_prompts(path, byte_level(), 1, None, 1000, seed=0)


# ---- JSONL ----


def jsonl_file(folder: Path, *lines: dict[str, object]) -> Path:
    path = folder / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_jsonl_lines_are_those_of_generate(tmp_path: Path) -> None:
    path = jsonl_file(
        tmp_path,
        {"prompt_token_ids": [5, 6], "max_tokens": 4, "temperature": 0, "stop_token_ids": [9]},
        {"prompt": QUESTION},
        {"prompt_token_ids": [7], "ignore_eos": True},
        {"prompt_token_ids": [8], "n": 2},
    )
    ids, text, free = jsonl_prompts(path, byte_level(), None, 3, 11, MODEL, seed=0)
    assert (ids_of(ids), ids.sampling.max_tokens, stop_ids(ids)) == ((5, 6), 4, (2, 3, 9))
    assert (ids_of(text), text.sampling.max_tokens) == (tuple(byte_level().encode(QUESTION)), 11)
    assert stop_ids(free) == ()
    with pytest.raises(BenchError, match=r"line 4: n > 1, several prompts and stop strings are not measured"):
        jsonl_prompts(path, byte_level(), None, 4, 11, MODEL, seed=0)


def test_a_bad_line_and_a_short_file_are_named(tmp_path: Path) -> None:
    path = jsonl_file(tmp_path, {"prompt_token_ids": [5]}, {"prompt_token_ids": [4000]})
    with pytest.raises(BenchError, match=r"lines\.jsonl, line 2: "):
        jsonl_prompts(path, None, None, 2, None, MODEL, seed=0)
    path = jsonl_file(tmp_path, {"prompt_token_ids": [5]})
    with pytest.raises(BenchError, match="gives 1 usable prompts, 2 are asked for: type --num-prompts 1 or less"):
        jsonl_prompts(path, None, None, 2, None, MODEL, seed=0)

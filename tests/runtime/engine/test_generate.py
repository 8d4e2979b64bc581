"""`launch generate` over a real engine, file to file: what is wrong with one request is told in its row alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.generate.command import run
from launch.generate.options import Command
from launch.ranks.start_engine import open_engine
from models.registry import config_from_dict
from tests.launch.api.parsed import parsed
from tests.launch.generate.batches import model_folder, rows_of, write_input
from tests.models import tiny_checkpoint
from tests.models.drafters import tiny_drafters as drafters
from tests.runtime.engine.conftest import long

VOCABULARY, LONGEST = 360, 64
CONFIG = tiny_checkpoint.TINY | {"vocab_size": VOCABULARY}
BROKEN = 350  # a token whose embedding is not a number
Row = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer; whoever has BROKEN in his prompt gets logits that are not finite, nobody else."""
    made = model_folder(tmp_path_factory.mktemp("parent"))
    tensors = tiny_checkpoint.full_tensors(config_from_dict(CONFIG))
    tensors["model.embed_tokens.weight"][BROKEN] = float("nan")
    tiny_checkpoint.write(made, tensors, config=CONFIG)
    return made


def generate(folder: Path, work: Path, lines: list[Row], *options: str) -> tuple[int, dict[str, Row]]:
    """The exit code, and the rows by id."""
    source = write_input(work, [json.dumps(line).encode() for line in lines])
    arguments = ["generate", "--model", str(folder), "--input", str(source), "--output", str(work / "out.jsonl")]
    arguments += ["--device", "cpu", "--overwrite", "--max-model-len", str(LONGEST), "--num-blocks", "40"]
    command = parsed(Command, [*arguments, "--block-size", "8", "--max-num-seqs", "4", "--chain-depth", "2", *options])
    code = run(command, {}, open_engine)
    return code, {str(row.get("custom_id", row["id"])): row for row in rows_of(work / "out.jsonl")}


def answers(rows: dict[str, Row]) -> dict[str, list[int]]:
    return {name: row["token_ids"] for name, row in rows.items() if "token_ids" in row}


def good_lines() -> list[Row]:
    return [{"id": f"good{i}", "prompt_token_ids": [5 + i, 6, 7], "max_tokens": 4 + i} for i in range(6)]


def test_logits_that_are_not_finite_end_one_request_and_its_row_says_so(folder: Path, tmp_path: Path) -> None:
    _, alone = generate(folder, tmp_path, good_lines())
    lines = good_lines()
    lines.insert(2, {"id": "nan", "prompt_token_ids": [9, BROKEN, 9], "max_tokens": 5})
    code, rows = generate(folder, tmp_path, lines)
    assert code == 1
    assert rows["nan"]["error"] == {
        "line": 3,
        "code": "engine_error",
        "message": "the logits after 3 tokens (3 of them prompt) are not finite: no token can be drawn",
    }
    assert answers(rows) == answers(alone)


def test_a_request_that_can_never_fit_is_refused_with_both_numbers(folder: Path, tmp_path: Path) -> None:
    """The pool holds at least one request of the full length, so what is no longer than that does fit some day."""
    lines = good_lines()
    lines.insert(0, {"id": "long", "prompt_token_ids": [5] * 99})
    lines.insert(1, {"id": "full", "prompt_token_ids": [5] * LONGEST})
    lines.insert(2, {"id": "just", "prompt_token_ids": [5] * (LONGEST - 1), "max_tokens": 1000})
    code, rows = generate(folder, tmp_path, lines, "--num-blocks", "9", "--max-num-seqs", "1")
    assert code == 1
    for name, length in (("long", 99), ("full", LONGEST)):
        error = rows[name]["error"]
        assert error["code"] == "bad_line"
        assert f"{length} tokens" in error["message"]
        assert f"may have {LONGEST}" in error["message"]
    assert (len(rows["just"]["token_ids"]), rows["just"]["finish_reason"]) == (1, "length")
    assert [len(tokens) for name, tokens in sorted(answers(rows).items()) if name != "just"] == [4, 5, 6, 7, 8, 9]


def test_echo_and_prompt_log_probabilities_come_through(folder: Path, tmp_path: Path) -> None:
    sampling = {"max_tokens": 3, "temperature": 0, "logprobs": 2}
    body = {"prompt": "the dog sleeps", "echo": True, **sampling}
    lines: list[Row] = [
        {"custom_id": "echo", "url": "/v1/completions", "body": body},
        {"id": "simple", "prompt": "the dog sleeps", "prompt_logprobs": 2, **sampling},
        {"id": "plain", "prompt": "the dog sleeps", **sampling},
    ]
    code, rows = generate(folder, tmp_path, lines, "--max-num-batched-tokens", "3")
    assert code == 0
    (choice,) = rows["echo"]["response"]["body"]["choices"]
    simple, columns = rows["simple"], choice["logprobs"]
    prompt, generated = simple["prompt_logprobs"], simple["logprobs"]
    assert choice["text"] == "the dog sleeps" + simple["text"]
    assert columns["token_logprobs"][0] is prompt[0] is None
    expected = [entry["logprob"] for entry in [*prompt[1:], *generated]]
    assert columns["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    assert len(columns["tokens"]) == len(prompt) + 3 == rows["simple"]["usage"]["total_tokens"]
    assert "".join(columns["tokens"][: len(prompt)]) == "the dog sleeps"
    assert all(len(entry["top"]) == 2 for entry in prompt[1:])
    assert "prompt_logprobs" not in rows["plain"]
    assert rows["plain"]["token_ids"] == simple["token_ids"] == choice["token_ids"]


def alike(found: Any, wanted: Any) -> bool:
    """The same JSON, but for the last digits of its numbers."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return found.keys() == wanted.keys() and all(alike(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list) and isinstance(found, list):
        return len(found) == len(wanted) and all(map(alike, found, wanted))
    return bool(found == (pytest.approx(wanted, abs=1e-4) if isinstance(wanted, float) else wanted))


CHUNKS = ("--max-num-batched-tokens", "24")
FEW = (301, 302, 303)
TEXT = "the dog sleeps and the dog sleeps and the"


def echoing() -> list[Row]:
    """Greedy and sampled, several answers, prompts in chunks beside windows, and one whose answer is a token."""
    body: Row = {"prompt": TEXT, "echo": True, "logprobs": 2, "max_tokens": 20, "allowed_token_ids": FEW}
    return [
        body | {"temperature": 0, "seed": 1},
        body | {"temperature": 0.6, "seed": 7, "n": 2},
        body | {"temperature": 0.6, "seed": 9, "logprobs": 0, "repetition_penalty": 1.2},
        body | {"temperature": 0, "seed": 2, "prompt": [5, 6, 7] * 9, "max_tokens": 12},
        body | {"temperature": 0, "seed": 3, "max_tokens": 1},
        {key: body[key] for key in body if key != "logprobs"} | {"temperature": 0, "seed": 4},
    ]


def echo_lines() -> list[Row]:
    return [{"custom_id": f"{i}", "url": "/v1/completions", "body": one} for i, one in enumerate(echoing())]


@pytest.fixture(scope="module")
def echoed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """The rows of these, one token a step."""
    code, rows = generate(folder, tmp_path_factory.mktemp("echoed"), echo_lines(), *CHUNKS)
    assert code == 0
    return rows


def drafting(method: str, work: Path) -> Row:
    """Keys of a --speculative-config; a drafter has random weights and guesses among the allowed tokens."""
    if method == "ngram":
        return {"method": method, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    sizes = {key: CONFIG[key] for key in drafters.SIZES.keys() & CONFIG.keys()}
    keys: Row = {"method": method, "model": str(work / method)}
    if method == "eagle3":
        config = drafters.eagle3_config(**sizes, draft_vocab_size=len(FEW))
        drafters.write(work / method, config, drafters.eagle3_tensors(config, FEW))
        return keys
    if method == "mtp":
        config = drafters.mtp_config(**sizes)
        drafters.write(work / method, config, drafters.mtp_tensors(config))
    else:
        config = drafters.dflash_config(**sizes)
        drafters.write(work / method, config, drafters.dflash_tensors(config))
    (work / "few.json").write_text(json.dumps(FEW))
    return keys | {"token_map": str(work / "few.json")}


@pytest.mark.parametrize(
    ("method", "tree"),
    [
        ("ngram", {}),
        ("mtp", {"tree_size": 9, "tree_top_k": 3}),
        *(long(method, {}) for method in ("mtp", "dflash", "eagle3")),
    ],
    ids=str,
)
def test_echo_with_proposals_gives_what_it_gives_without(
    method: str, tree: dict[str, int], folder: Path, echoed: dict[str, Row], tmp_path: Path
) -> None:
    keys = drafting(method, tmp_path) | tree | {"num_speculative_tokens": 3, "mixed_step_percent": 100}
    code, guessed = generate(folder, tmp_path, echo_lines(), *CHUNKS, "--speculative-config", json.dumps(keys))
    assert code == 0
    kept = 0
    for name, body in enumerate(echoing()):
        row, other = echoed[str(name)], guessed[str(name)]
        choices, others = (one["response"]["body"]["choices"] for one in (row, other))
        assert len(choices) == body.get("n", 1)
        stats = [choice.pop("speculation", {"accepted_tokens": 0}) for choice in others]
        kept += sum(of_choice["accepted_tokens"] for of_choice in stats)
        assert alike(others, choices), name
        prompt = row["response"]["body"]["usage"]["prompt_tokens"]
        for choice in choices:
            assert choice["text"].startswith(TEXT) or name == 3
            if "logprobs" in body:
                assert len(choice["logprobs"]["tokens"]) == prompt + len(choice["token_ids"])
    assert kept > 20, "guesses are kept"

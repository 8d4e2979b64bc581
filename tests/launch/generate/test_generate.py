"""`generate` from file to file, around an engine that is late and out of order."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.errors import UsageError
from launch.generate.output_file import ResultsFileError, ResultsWriteError
from launch.ranks.rendezvous import RendezvousError
from runtime.config import EngineConfig
from runtime.schedule.request import Request
from tests.launch.api import bad_lines
from tests.launch.generate import batches
from tests.launch.generate.batches import answers_of, choices_in, generate, good_lines, rows_of, write_input
from tests.launch.generate.fake_engine import FakeEngine, FakeModel
from tests.runtime.frontend import small_tokenizers

Opener = Callable[[EngineConfig, Any], FakeEngine]


def opener(seen: list[FakeEngine] | None = None, **options: Any) -> Opener:
    def open_engine(config: EngineConfig, rendezvous: object) -> FakeEngine:
        engine = FakeEngine(config, **options)
        if seen is not None:
            seen.append(engine)
        return engine

    return open_engine


@pytest.mark.parametrize(("seed", "lag", "width"), [(0, 0, 1), (1, 3, 1), (2, 7, 1), (3, 2, 4)])
def test_every_line_gets_the_serial_engine_s_answer(tmp_path: Path, seed: int, lag: int, width: int) -> None:
    lines = good_lines(60)
    write_input(tmp_path, lines)
    engines: list[FakeEngine] = []
    options = ("--max-num-seqs", "8", "--look-ahead", "4")
    code, output = generate(tmp_path, *options, engine=opener(engines, seed=seed, lag=lag, width=width))
    assert code == 0
    by_id = {row.get("custom_id", row["id"]): row for row in rows_of(output)}
    assert len(by_id) == len(rows_of(output)) == 60
    for number, line in enumerate(lines, 1):
        request = batches.prepared(line, number)
        expected = batches.expected_choices(request, FakeModel(), small_tokenizers.byte_level())
        assert choices_in(by_id[request.id]) == expected
    (engine,) = engines
    assert engine.stopped
    assert engine.closed
    assert engine.most_live <= 2 * 8


def test_a_panic_of_the_tokenizer_library_is_an_error_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no Exception, and ended the run after the rows before it."""
    broken = small_tokenizers.panicking_backend()
    monkeypatch.setattr(small_tokenizers, "byte_level_backend", lambda: broken)
    write_input(tmp_path, [b'{"prompt_token_ids": [5]}', b'{"prompt": "abc"}', b'{"prompt_token_ids": [6]}'])
    code, output = generate(tmp_path)
    rows = {row["id"]: row for row in rows_of(output)}
    assert (code, len(rows)) == (1, 3)
    assert "the prompt cannot be tokenised" in rows["line-2"]["error"]["message"]
    assert not [row for name, row in rows.items() if name != "line-2" and "error" in row]


def test_rows_of_the_three_forms(tmp_path: Path) -> None:
    write_input(tmp_path, good_lines(3))
    code, output = generate(tmp_path, "--seed", "9")
    assert code == 0
    simple, completion, chat = sorted(rows_of(output), key=lambda row: str(row.get("custom_id", row["id"])))
    assert list(simple) == ["id", "text", "token_ids", "finish_reason", "seed", "usage", "timing"]
    assert set(simple["timing"]) == {"queued", "ttft", "tpot", "e2e"}
    assert simple["usage"]["total_tokens"] == simple["usage"]["prompt_tokens"] + len(simple["token_ids"])
    for row, kind in ((completion, "text_completion"), (chat, "chat.completion")):
        assert list(row) == ["id", "custom_id", "response", "error"]
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        assert row["response"]["body"]["object"] == kind
        assert row["response"]["body"]["model"] == "model", "the folder's name, where a body has none"
    assert chat["response"]["body"]["choices"][0]["message"]["role"] == "assistant"


def test_several_prompts_of_a_line_are_choices_of_one_row(tmp_path: Path) -> None:
    """As over HTTP: choice p * n + i. Prompts that are only scored have no answer, and end by length."""
    url = "/v1/completions"
    bodies: dict[str, dict[str, Any]] = {
        "two": {"prompt": ["the", [5, 6]], "n": 2, "max_tokens": 3, "echo": True, "seed": 1, "ignore_eos": True},
        "scored": {"prompt": ["ab", "c"], "max_tokens": 0, "echo": True, "logprobs": 1},
        **{f"alone{at}": {"prompt": prompt, "n": 2, "max_tokens": 3, "echo": True, "seed": 1, "ignore_eos": True}
           for at, prompt in enumerate(["the", [5, 6]])},
    }  # fmt: skip
    write_input(tmp_path, [json.dumps({"custom_id": k, "url": url, "body": v}).encode() for k, v in bodies.items()])
    code, output = generate(tmp_path, "--show", "1")
    assert code == 0
    found = {row["custom_id"]: row["response"]["body"] for row in rows_of(output)}
    alone = [choice for at in (0, 1) for choice in found[f"alone{at}"]["choices"]]
    assert found["two"]["choices"] == [{**choice, "index": at} for at, choice in enumerate(alone)]
    tokens = small_tokenizers.byte_level().encode("the")
    assert found["two"]["usage"] == {"prompt_tokens": len(tokens) + 2, "completion_tokens": 12,
                                     "total_tokens": len(tokens) + 14}  # fmt: skip
    scored = found["scored"]
    assert [(c["index"], c["text"], c["token_ids"], c["finish_reason"]) for c in scored["choices"]] == [
        (0, "ab", [], "length"), (1, "c", [], "length")]  # fmt: skip
    assert scored["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    assert [choice["logprobs"]["tokens"] for choice in scored["choices"]] == [["a", "b"], ["c"]]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"prompt_logprobs": 2}])
def test_scored_prompts_of_a_batch_end_by_length(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Also where the one token that is generated all the same is an end token."""
    body = {"prompt": [5, 6, 7], "seed": 1, **fields}

    def choice(**more: Any) -> dict[str, Any]:
        line = {"custom_id": "a", "url": "/v1/completions", "body": {**body, **more}}
        write_input(tmp_path, [json.dumps(line).encode()])
        code, output = generate(tmp_path, "--overwrite")
        assert code == 0
        (found,) = rows_of(output)[0]["response"]["body"]["choices"]
        return dict(found)

    said = choice(max_tokens=1)["token_ids"]
    assert choice(max_tokens=1, stop_token_ids=said)["finish_reason"] == "stop"
    scored = choice(max_tokens=0, echo=True, stop_token_ids=said)
    assert (scored["finish_reason"], scored["token_ids"]) == ("length", [])


def test_bad_lines_become_error_rows_and_change_nothing_for_the_others(tmp_path: Path) -> None:
    good = good_lines(20)
    write_input(tmp_path, good)
    alone = answers_of(generate(tmp_path)[1])
    lines = [*(line for line, _ in bad_lines.HAND_WRITTEN), *bad_lines.generated(300, seed=1), *good]
    random.Random(0).shuffle(lines)
    write_input(tmp_path, lines)
    code, output = generate(tmp_path, "--overwrite")
    assert code == 1
    found = answers_of(output)
    errors = {key: row for key, row in found.items() if key.startswith("error")}
    assert {key: row for key, row in found.items() if key not in errors} == alone
    assert sorted(row["error"]["line"] for row in errors.values()) == [
        number for number, line in enumerate(lines, 1) if line not in good
    ]
    assert all(row["error"]["message"] for row in errors.values())


def test_a_request_that_the_engine_fails_or_refuses_is_an_error_row(tmp_path: Path) -> None:
    form = b'{"id": "form", "prompt": "a", "structured_outputs": {"choice": ["b"]}}'
    lines = [b'{"id": "nan", "prompt": "a"}', b'{"id": "huge", "prompt": "b"}', *good_lines(3), form]
    write_input(tmp_path, lines)
    first = {"nan": (batches.prepared(b'{"prompt": "a"}').prompts[0].token_ids), "huge": None}

    def fail(request: Request) -> bool:
        return tuple(request.prompt_token_ids) == first["nan"]

    def reject(request: Request) -> str:
        return "needs 9 blocks, the pool has 4" if len(request.prompt_token_ids) == 1 and not fail(request) else ""

    code, output = generate(tmp_path, engine=opener(fail=fail, reject=reject))
    assert code == 1
    by_id = {row.get("custom_id", row["id"]): row for row in rows_of(output)}
    assert by_id["nan"]["error"] == {"line": 1, "code": "engine_error", "message": "the request ended with error"}
    assert by_id["huge"]["error"]["message"] == "needs 9 blocks, the pool has 4"
    assert by_id["huge"]["error"]["code"] == "rejected"
    assert by_id["form"]["error"]["code"] == "rejected", "its grammar cannot be used, or leaves no token"
    assert len(by_id) == 6


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """Input and output of a run that nobody disturbed, with good and bad lines."""
    folder = tmp_path_factory.mktemp("unkilled")
    path = write_input(folder, [*good_lines(25), *bad_lines.generated(10), *good_lines(10, "s")])
    code, output = generate(folder)
    assert code == 1
    return path.read_bytes(), output.read_bytes()


@pytest.mark.parametrize("cut", [pytest.param(cut, marks=() if cut < 12 else pytest.mark.long) for cut in range(30)])
def test_a_run_killed_anywhere_goes_on_and_loses_and_doubles_nothing(
    tmp_path: Path, unkilled: tuple[bytes, bytes], cut: int
) -> None:
    (tmp_path / "in.jsonl").write_bytes(unkilled[0])
    output = tmp_path / "out.jsonl"
    output.write_bytes(unkilled[1])
    expected = answers_of(output)
    at = random.Random(cut).randrange(len(unkilled[1]) + 1)
    output.write_bytes(unkilled[1][:at])
    kept = unkilled[1][: unkilled[1].rfind(b"\n", 0, at) + 1]
    code, output = generate(tmp_path, engine=opener(seed=cut))
    assert code == 1, "some lines have failed, in whichever run"
    assert output.read_bytes().startswith(kept)
    assert answers_of(output) == expected


def test_a_finished_file_needs_no_work(tmp_path: Path, unkilled: tuple[bytes, bytes]) -> None:
    (tmp_path / "in.jsonl").write_bytes(unkilled[0])
    (tmp_path / "out.jsonl").write_bytes(unkilled[1])
    engines: list[FakeEngine] = []
    code, output = generate(tmp_path, engine=opener(engines))
    assert code == 1
    assert output.read_bytes() == unkilled[1]
    assert engines[0].added == []


def test_errors_are_tried_again_only_when_asked(tmp_path: Path) -> None:
    lines = [b'{"id": "a", "prompt": "x"}', b'{"id": "b", "prompt": "too many", "n": 500}']
    write_input(tmp_path, lines)
    assert generate(tmp_path)[0] == 1
    write_input(tmp_path, [lines[0], b'{"id": "b", "prompt": "now fine"}'])
    assert generate(tmp_path)[0] == 1
    code, output = generate(tmp_path, "--retry-errors")
    assert code == 0
    assert set(answers_of(output)) == {"a", "b"}


# ---- ending early ----


def raise_at(*steps: int, number: int = signal.SIGTERM) -> Callable[[int], None]:
    def on_step(step: int) -> None:
        if step in steps:
            signal.raise_signal(number)

    return on_step


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_admission_and_lets_what_has_begun_finish(tmp_path: Path, number: int, code: int) -> None:
    write_input(tmp_path, good_lines(80))
    generate(tmp_path)
    expected = answers_of(tmp_path / "out.jsonl")
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    engines: list[FakeEngine] = []
    on_step = raise_at(12, number=number)
    options = ("--max-num-seqs", "6", "--overwrite", "--summary", str(tmp_path / "summary.json"))
    got, output = generate(tmp_path, *options, engine=opener(engines, on_step=on_step))
    assert got == code
    assert engines[0].stopped
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers
    found = answers_of(output)
    assert 0 < len(found) < 80
    assert found.items() <= expected.items(), "every row is a whole and right answer"
    begun = {tuple(request.prompt_token_ids) for request in engines[0].added}
    begun.discard(tuple(small_tokenizers.byte_level().encode("the")))  # the second prompt of some lines
    summary = json.loads((tmp_path / "summary.json").read_bytes())
    assert summary["finished"] == len(found)
    assert summary["finished"] + summary["unfinished"] == len(begun)
    code, output = generate(tmp_path)
    assert code == 0
    assert answers_of(output) == expected


def test_what_does_not_finish_within_the_limit_has_no_row(tmp_path: Path) -> None:
    write_input(tmp_path, good_lines(20))
    code, output = generate(tmp_path, "--drain-seconds", "0", engine=opener(on_step=raise_at(0)))
    assert code == 143
    early = answers_of(output)
    code, output = generate(tmp_path)
    assert code == 0
    assert len(early) < len(answers_of(output)) == 20


def test_an_engine_that_breaks_leaves_what_was_finished(tmp_path: Path) -> None:
    write_input(tmp_path, good_lines(40))

    def on_step(step: int) -> None:
        if step == 30:
            raise RuntimeError("rank 1 is lost")

    with pytest.raises(RuntimeError, match="rank 1 is lost"):
        generate(tmp_path, engine=opener(on_step=on_step))
    early = answers_of(tmp_path / "out.jsonl")
    assert early
    code, output = generate(tmp_path)
    assert code == 0
    assert early.items() <= answers_of(output).items()


# ---- what is printed, and the command line ----


def test_show_prints_the_first_answers_and_the_summary_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_input(tmp_path, good_lines(10))
    generate(tmp_path, "--show", "3", "--summary", str(tmp_path / "s" / "summary.json"))
    printed = capsys.readouterr().out
    for line_id in ("r0", "r1", "r2"):
        assert f"{line_id}: " in printed
    assert "r3: " not in printed
    assert "the dog 0" in printed
    assert "10 finished" in printed
    assert "TTFT" in printed
    summary = json.loads((tmp_path / "s" / "summary.json").read_bytes())
    assert summary["finished"] == 10
    assert summary["chain_breaks"] == {"start": 1}
    assert 0 < summary["chained_step_ratio"] < 1
    assert set(summary["ttft_ms"]) == {"p50", "p90", "p99"}
    assert summary["generated_tokens"] == sum(len(c) for c in _token_ids(tmp_path / "out.jsonl"))


def _token_ids(path: Path) -> list[list[int]]:
    bodies = [row["response"]["body"] if "response" in row else row for row in rows_of(path)]
    return [choice["token_ids"] for body in bodies for choice in body.get("choices", [body])]


def test_a_folder_without_a_tokenizer_completes_token_ids(tmp_path: Path) -> None:
    write_input(
        tmp_path, [b'{"id": "ids", "prompt_token_ids": [5, 6], "max_tokens": 3}', b'{"id": "t", "prompt": "a"}']
    )
    batches.model_folder(tmp_path)
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "model_folder", lambda parent: parent / "model")
        code, output = generate(tmp_path)
    assert code == 1
    by_id = {row["id"]: row for row in rows_of(output)}
    assert by_id["ids"]["text"] == ""
    assert len(by_id["ids"]["token_ids"]) == 3
    assert "no tokenizer.json" in by_id["t"]["error"]["message"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "nowhere"], "--model nowhere"),
        (["--input", "nowhere"], "--input nowhere"),
        (["--output", "."], "folder"),
        (["--output", "/dev/null"], "--output /dev/null is a pipe or a device"),
        (["--summary", "."], "--summary . is a folder"),
        (["--summary", "pyproject.toml/s.json"], "--summary pyproject.toml/s.json cannot be written"),
    ],
)
def test_paths_that_cannot_be_are_refused_before_anything_starts(
    tmp_path: Path, options: list[str], words: str
) -> None:
    write_input(tmp_path, good_lines(1))
    with pytest.raises(UsageError, match=words):
        generate(tmp_path, *options, engine=opener(on_step=raise_at(0)))


@pytest.mark.parametrize("kind", ["--output", "--summary"])
def test_links_to_devices_and_in_circles_are_sentences(tmp_path: Path, kind: str) -> None:
    write_input(tmp_path, good_lines(1))
    for name, target in (("circle", "circle"), ("full", "/dev/full")):
        (tmp_path / name).symlink_to(target)
        with pytest.raises((UsageError, ResultsFileError), match=rf"{name} (cannot be (opened|written)|is a pipe or)"):
            generate(tmp_path, kind, str(tmp_path / name))


def test_an_output_that_is_deleted_ends_the_run(tmp_path: Path) -> None:
    """It ended with exit code 0, and the rows were nowhere."""
    write_input(tmp_path, good_lines(30))
    output = tmp_path / "out.jsonl"

    def deleted(step: int) -> None:
        if step > 3 and output.is_file() and output.stat().st_size:
            output.unlink()

    with pytest.raises(ResultsWriteError, match=r"out\.jsonl is gone .* rows are missing"):
        generate(tmp_path, "--max-num-seqs", "4", engine=opener(on_step=deleted))
    code, output = generate(tmp_path)
    assert (code, len(rows_of(output))) == (0, 30), "the same command makes them"


def test_the_input_is_not_taken_as_output(tmp_path: Path) -> None:
    path = write_input(tmp_path, good_lines(1))
    with pytest.raises(UsageError, match="overwrite the prompts"):
        generate(tmp_path, "--output", str(path), "--overwrite")
    assert path.read_bytes()


@pytest.mark.parametrize("kind", ["--summary", "--timeline"])
@pytest.mark.parametrize("other", ["in.jsonl", "out.jsonl", "sub/../out.jsonl"])
def test_no_file_is_two_things_at_once(tmp_path: Path, kind: str, other: str) -> None:
    """What is written when all is done would take the place of the answers, or of the prompts."""
    path = write_input(tmp_path, good_lines(1))
    assert path.name == "in.jsonl"
    (tmp_path / "sub").mkdir()
    output = str(tmp_path / "out.jsonl")
    with pytest.raises(UsageError, match=rf"and {kind} are both .*: one would overwrite the other"):
        generate(tmp_path, "--output", output, kind, str(tmp_path / other))
    assert path.read_bytes()
    assert not Path(output).exists()


def test_a_tensor_parallel_degree_that_nobody_started_is_refused(tmp_path: Path) -> None:
    write_input(tmp_path, good_lines(1))
    with pytest.raises(RendezvousError, match=r"--tensor-parallel-size is 2, but 1 rank"):
        generate(tmp_path, "-tp", "2")

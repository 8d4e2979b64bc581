"""What is drawn from where nobody says: the line, then the command line, then the model's generation_config.json."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.api.sampling_defaults import read_sampling_parameters, sampling_defaults, warmed_for
from launch.complete import open_engine
from launch.errors import UsageError
from launch.generate.command import run
from launch.generate.options import Command
from lockstride import EngineConfig, complete
from models.config import ModelConfigError
from runtime.config import EngineConfig as Config
from runtime.engine import Engine
from runtime.frontend.client import EngineClient, PromptRequest
from runtime.frontend.tokenizer import Tokenizer
from runtime.schedule.request import Request, SamplingParams
from tests.launch.api.parsed import parsed
from tests.launch.generate.batches import model_folder, write_input
from tests.launch.generate.fake_engine import FakeEngine
from tests.runtime.execute.sampling.sampling_fields import SamplingFields

TUNED: SamplingFields = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
OTHERS = {"eos_token_id": [1, 2], "do_sample": False, "max_new_tokens": 3, "transformers_version": "5.0.0"}


def folder_with(parent: Path, content: Any) -> Path:
    (parent / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return parent


def test_the_folder_s_parameters_and_no_others(tmp_path: Path) -> None:
    assert read_sampling_parameters(tmp_path) == {}
    assert read_sampling_parameters(folder_with(tmp_path, TUNED | OTHERS)) == TUNED
    assert read_sampling_parameters(folder_with(tmp_path, OTHERS | {"top_p": None, "top_k": -1})) == {}
    assert read_sampling_parameters(folder_with(tmp_path, {"temperature": 1})) == {"temperature": 1.0}


def test_the_command_line_wins_over_the_folder_and_none_leaves_it_out(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, TUNED)
    silent = {"temperature": None, "top_p": None, "top_k": None}
    assert sampling_defaults(folder, "auto", silent) == SamplingParams(**TUNED)
    mixed = sampling_defaults(folder, "auto", silent | {"temperature": 0.0, "top_k": 0})
    assert mixed == replace(SamplingParams(**TUNED), temperature=0.0, top_k=0)
    assert sampling_defaults(folder, "none", silent | {"top_p": 0.5}) == SamplingParams(top_p=0.5)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"temperature": "hot"}, "'temperature' must be a number, not 'hot'"),
        ({"top_k": 2.5}, "'top_k' must be a whole number, not 2.5"),
        ({"top_p": True}, "'top_p' must be a number, not True"),
        ({"top_p": 7}, "top_p is 7, but must be more than 0 and at most 1"),
        ({"top_k": -3}, "top_k is -3"),
        ('{"temperature": NaN}', "temperature is nan"),
        ("[]", "must hold a JSON object"),
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
    ids=str,
)
def test_what_no_request_may_have_is_refused_by_name_of_the_file(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        sampling_defaults(folder_with(tmp_path, content), "auto", {})
    assert str(tmp_path / "generation_config.json") in str(caught.value)
    assert words in str(caught.value)
    assert sampling_defaults(tmp_path, "none", {}) == SamplingParams()


@pytest.mark.parametrize("generation_config", ["auto", "none"])
def test_what_no_request_may_have_is_refused_by_name_of_the_option(tmp_path: Path, generation_config: Any) -> None:
    with pytest.raises(UsageError, match="--temperature: temperature is 5000, but must be at least 0 and at most 1000"):
        sampling_defaults(tmp_path, generation_config, {"temperature": 5000.0, "top_k": None})


def drawn_with(parent: Path, *options: str) -> dict[int, SamplingParams]:
    """What generate asks the engine for, by max_tokens, of lines that say something, nothing and everything."""
    folder_with(model_folder(parent), TUNED | OTHERS)
    lines = [
        {"id": "silent", "prompt": "a", "max_tokens": 1},
        {"custom_id": "some", "url": "/v1/completions", "body": {"prompt": "b", "max_tokens": 2, "top_p": 0.3}},
        {"id": "all", "prompt": "c", "max_tokens": 3}
        | {"temperature": 0, "top_p": 1.0, "top_k": 0, "min_p": 0, "repetition_penalty": 1},
    ]
    write_input(parent, [json.dumps(line).encode() for line in lines])
    asked: list[Request] = []

    class Listening(FakeEngine):
        def add(self, request: Request) -> None:
            asked.append(request)
            super().add(request)

    arguments = ["generate", "--model", str(parent / "model"), "--device", "cpu", "--overwrite", *options]
    arguments += ["--input", str(parent / "in.jsonl"), "--output", str(parent / "out.jsonl")]
    command = parsed(Command, arguments)

    def open_engine(config: Config, rendezvous: object) -> FakeEngine:
        return Listening(config)

    assert run(command, {}, open_engine) == 0
    return {one.sampling.max_tokens: replace(one.sampling, seed=None) for one in asked}


def test_lines_that_do_not_say_are_drawn_as_the_folder_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lockstride"):
        asked = drawn_with(tmp_path)
    tuned = SamplingParams(**TUNED)
    assert asked[1] == replace(tuned, max_tokens=1)
    assert asked[2] == replace(tuned, max_tokens=2, top_p=0.3)
    assert asked[3] == SamplingParams(max_tokens=3, temperature=0.0)
    (told,) = [record.getMessage() for record in caplog.records if "sampling defaults" in record.getMessage()]
    assert "temperature 0.6, top_p 0.95, min_p 0.05, repetition_penalty 1.1, top_k 20" in told
    assert "--generation-config none" in told


def test_none_is_as_if_there_were_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lockstride"):
        asked = drawn_with(tmp_path, "--generation-config", "none", "--temperature", "0.5")
    assert asked[1] == SamplingParams(max_tokens=1, temperature=0.5)
    assert asked[2] == SamplingParams(max_tokens=2, temperature=0.5, top_p=0.3)
    assert "sampling defaults" not in caplog.text


def demo_folder(parent: Path, generation_config: Any) -> Path:
    """The demo model, of whose parameters its makers say something else."""
    demo, mine = Path("models/demo"), parent / "mine"
    mine.mkdir()
    for file in demo.iterdir():
        if file.suffix in (".json", ".safetensors") and file.name != "generation_config.json":
            (mine / file.name).write_bytes(file.read_bytes())
    return folder_with(mine, generation_config)


def test_a_program_that_does_not_say_gets_the_folder_s_too(tmp_path: Path) -> None:
    mine = demo_folder(tmp_path, {"temperature": 0.0})
    config = EngineConfig(model=str(mine), device="cpu", max_num_seqs=2, max_model_len=64)
    prompt = "def gcd(a, b):"
    assert _tokens(complete(config, [prompt])) == _tokens(complete(config, [prompt], SamplingParams(temperature=0.0)))


@pytest.mark.parametrize(
    "content",
    [
        {"temperature": 0.6, "top_p": 0.95},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
        {"temperature": 0.0, "repetition_penalty": 1.1},
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in ({"temperature": 0.7, "repetition_penalty": 1.05}, {"temperature": 0.9}, {})
        ),
    ],
    ids=str,
)
def test_no_request_with_the_folder_s_parameters_waits_for_a_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: SamplingFields
) -> None:
    torch.set_num_threads(1)
    counted = watched(monkeypatch)
    config = EngineConfig(model=str(demo_folder(tmp_path, content)), device="cpu", max_num_seqs=4, max_model_len=64)
    outputs = complete(config, ["def gcd(a, b):", "class A:", (311, 437)])
    assert all(tokens for tokens in _tokens(outputs))
    assert counted["graph_captures_after_warmup"] == 0
    assert not [name for name in counted if name.startswith("late_captures")]


def test_a_request_beyond_what_was_warmed_up_captures_one_graph_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the client of an engine that was opened for the folder's defaults: 20 likely tokens a draw are no part of
    them. Requests with the defaults, before it and after it, capture nothing."""
    torch.set_num_threads(1)
    counted = watched(monkeypatch)
    folder = demo_folder(tmp_path, {"temperature": 0.6, "top_p": 0.95})
    defaults = sampling_defaults(folder, "auto", {})
    config = EngineConfig(model=str(folder), device="cpu", max_num_seqs=4, decode_buckets=(4,), max_model_len=64)
    beyond = replace(defaults, logprobs=20, max_tokens=8)
    with open_engine(warmed_for(config, defaults)) as engine:
        client = EngineClient(engine, Tokenizer.if_any(folder))
        for turn, sampling in enumerate((defaults, beyond, beyond, defaults)):
            request = PromptRequest("def gcd(a, b):", sampling, turn)
            assert [output.key for one in client.run([client.prepare(request)]) for output in one.finished] == [turn]
            late = {name: n for name, n in engine.counters.items() if name.startswith("late_captures")}
            assert late == ({"late_captures{random, filters, logprobs, up to 20 likely tokens}": 1} if turn else {})
    assert counted["graph_captures_after_warmup"] == 1


def watched(monkeypatch: pytest.MonkeyPatch) -> dict[str, int | float]:
    """Receives the counters of every engine that is closed from now on."""
    counted: dict[str, int | float] = {}
    close = Engine.close

    def closed(engine: Engine) -> None:
        counted.update(engine.counters)
        close(engine)

    monkeypatch.setattr(Engine, "close", closed)
    return counted


def _tokens(outputs: list[Any]) -> list[tuple[int, ...]]:
    return [completion.token_ids for output in outputs for completion in output.completions]


@pytest.mark.parametrize(
    ("params", "kinds"),
    [
        (SamplingParams(temperature=0.0), ("greedy",)),
        (SamplingParams(), ("greedy", "random")),
        (SamplingParams(temperature=0.6, top_p=0.95, top_k=20), ("greedy", "random", "filtered")),
        (SamplingParams(temperature=0.0, top_p=0.5), ("greedy",)),  # filters change nothing of a greedy draw
        (SamplingParams(temperature=0.0, repetition_penalty=1.1), ("greedy", "penalised")),
        (SamplingParams(min_p=0.1, presence_penalty=0.5), ("greedy", "random", "filtered", "penalised")),
    ],
)
def test_what_requests_ask_for_by_default_is_warmed_up(params: SamplingParams, kinds: tuple[str, ...]) -> None:
    assert warmed_for(EngineConfig(model="m", device="cpu"), params).warm == kinds
    asked = EngineConfig(model="m", device="cpu", warm=("penalised",))
    assert set(warmed_for(asked, params).warm) == {*kinds, "penalised"}

"""The public face, as a program uses it: the demo model, texts and ids, several answers, stop strings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.complete import _prepared
from lockstride import EngineConfig, RequestOutput, SamplingParams, complete
from runtime.frontend.client import EngineClient, PreparedPrompt, PromptRequest
from runtime.frontend.validation import RequestError
from runtime.schedule.request import FinishReason
from tests.launch.generate.fake_engine import FakeEngine
from tests.torchrun import torchrun

ROOT = Path(__file__).resolve().parents[2]
CONFIG = EngineConfig(model="models/demo", device="cpu", max_num_seqs=4, max_model_len=256)


def test_texts_ids_and_several_answers() -> None:
    torch.set_num_threads(1)
    greedy = SamplingParams(max_tokens=40, temperature=0.0)
    two = SamplingParams(max_tokens=12, temperature=0.9, n=2, seed=5)
    stopped = SamplingParams(max_tokens=40, temperature=0.0, stop=("return",))
    prompt = "def gcd(a, b):"
    text, ids, several, cut = complete(
        CONFIG, [prompt, (311, 437, 4046), prompt, prompt], [greedy, greedy, two, stopped]
    )
    assert text.completions[0].finish_reason is FinishReason.STOP
    assert text.prompt == prompt
    assert ids.prompt is None
    assert tuple(ids.prompt_token_ids) == (311, 437, 4046)
    assert [c.seed for c in several.completions] == [5, 6]
    assert several.completions[0].token_ids != several.completions[1].token_ids
    assert "return" in text.completions[0].text
    assert cut.completions[0].text == text.completions[0].text.split("return")[0]


NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
MTP = {"method": "mtp", "model": "models/demo/mtp", "num_speculative_tokens": 3}
DFLASH = {"method": "dflash", "model": "models/demo/dflash", "num_speculative_tokens": 7}
PROMPTS = [
    "def gcd(a, b):",
    "def lcm(a, b):",
    "class A:\n    def a(self):\n        return self.a\n\n    def b(self):",
] * 2
SAMPLING = [
    SamplingParams(max_tokens=60, temperature=0.0, stop=("is_rational:\n        return", "return a.")),
    SamplingParams(max_tokens=60, temperature=0.0, stop=("a.is_rational", "@"), logprobs=2),
    SamplingParams(max_tokens=60, temperature=0.0, prompt_logprobs=1),
    SamplingParams(max_tokens=40, temperature=0.7, n=2, seed=5, stop=("return a",)),
    SamplingParams(max_tokens=40, temperature=0.7, seed=9, repetition_penalty=1.1, top_p=0.8),
    SamplingParams(max_tokens=40, temperature=0.0, min_tokens=30),
]


@cache
def without_proposals() -> tuple[RequestOutput, ...]:
    return tuple(complete(CONFIG, PROMPTS, SAMPLING))


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(NGRAM, marks=pytest.mark.long),
        {**MTP, "tree_size": 8},
        *(pytest.param(keys, marks=pytest.mark.long) for keys in (MTP, DFLASH, {**DFLASH, "tree_size": 16})),
    ],
    ids=["ngram", "mtp-tree", "mtp", "dflash", "dflash-tree"],
)
def test_texts_with_proposals_are_those_without(keys: dict[str, Any]) -> None:
    """Stop strings and stop ids within a block, several answers, log-probabilities, scored prompts, penalties."""
    torch.set_num_threads(1)
    guessed = complete(replace(CONFIG, speculative_config=keys), PROMPTS, SAMPLING)
    for one, other in zip(without_proposals(), guessed, strict=True):
        for wanted, found in zip(one.completions, other.completions, strict=True):
            assert (found.text, found.token_ids, found.finish_reason) == (
                *(wanted.text, wanted.token_ids),
                wanted.finish_reason,
            )
            assert found.rounds > 0 == wanted.rounds
            for a, b in zip(wanted.logprobs or (), found.logprobs or (), strict=True):
                assert b.token_id == a.token_id
                assert b.logprob == pytest.approx(a.logprob, abs=1e-4)
    ends = {completion.finish_reason for output in guessed for completion in output.completions}
    assert ends == {FinishReason.STOP, FinishReason.LENGTH}
    assert sum(completion.accepted for output in guessed for completion in output.completions) > 8


@pytest.mark.parametrize("launched", [False, True])
def test_only_a_process_of_a_launcher_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch, launched: bool) -> None:
    torch.set_num_threads(1)
    asked: list[bool] = []
    monkeypatch.setattr("launch.complete.die_with_parent", lambda: asked.append(True))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        if launched:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    complete(CONFIG, ["def gcd(a, b):"], SamplingParams(max_tokens=2, temperature=0.0))
    assert asked == [True] * launched


def test_a_prompt_that_cannot_be_served_is_refused() -> None:
    with pytest.raises(RequestError, match="4096"):
        complete(CONFIG, [(4096,)], SamplingParams())


@pytest.mark.parametrize(
    ("prompts", "sampling", "words"),
    [
        (["ab"], SamplingParams(max_tokens=0), "max_tokens is 0, but must be at least 1"),
        (["ab"], SamplingParams(stop=("\ud800",)), "a stop string is no Unicode text"),
        (["ab\ud800"], SamplingParams(), "the prompt is no Unicode text"),
        (["ab"], [SamplingParams()] * 2, "sampling is 2 of them, but must be SamplingParams, or one for each of 1"),
        ("ab", SamplingParams(), "prompts is a str, but must be a list of texts or of token ids"),
        (["ab", None], SamplingParams(), "the prompt is None, but must be a sequence of token ids"),
        (["ab", (1,) * 300], SamplingParams(), "the prompt has 300 tokens"),
        (["ab"], {"max_tokens": 5}, "sampling is a dict"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(prompts: Any, sampling: Any, words: str) -> None:
    torch.set_num_threads(1)
    with pytest.raises(RequestError, match=words):
        complete(replace(CONFIG, max_num_seqs=1), prompts, sampling)


def test_lengths_beyond_the_context_are_cut_to_it() -> None:
    torch.set_num_threads(1)
    endless = SamplingParams(max_tokens=2**31, min_tokens=2**31 - 1, temperature=0.0)
    (output,) = complete(replace(CONFIG, max_model_len=32), ["def gcd(a, b):"], endless)
    (completion,) = output.completions
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(output.prompt_token_ids) + len(completion.token_ids) == 32


def test_rank_0_is_heard_of_while_it_prepares_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 prompts of 20 ms each; the other ranks end a job whose leader is silent for ``control_timeout_s``."""
    now, heard_at = 0.0, [0.0]
    engine = FakeEngine(replace(CONFIG, control_timeout_s=1.0))
    client = EngineClient(engine, text=False)

    def prepare(request: PromptRequest) -> PreparedPrompt:
        nonlocal now
        now += 0.02
        return EngineClient.prepare(client, request)

    def wait(ready: Callable[[float], bool], timeout: float) -> None:
        assert (ready(timeout), timeout) == (False, 0.0)
        heard_at.append(now)

    monkeypatch.setattr(client, "prepare", prepare)
    monkeypatch.setattr(engine, "wait", wait)
    prepared = _prepared(client, [PromptRequest((5,), key=key) for key in range(200)], clock=lambda: now)
    assert [one.request.key for one in prepared] == list(range(200))
    assert max(after - before for before, after in pairwise([*heard_at, now])) < 0.5


def test_more_prompts_than_may_wait_are_all_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    greedy = SamplingParams(max_tokens=4, temperature=0.0)
    config = replace(CONFIG, model=str(ROOT / CONFIG.model), max_num_seqs=2, max_waiting=1)
    outputs = complete(config, ["def gcd(a, b):"] * 9, greedy)
    assert list(tmp_path.iterdir()) == [], "nothing is left in the working directory"
    assert {output.completions[0].text for output in outputs} == {outputs[0].completions[0].text}
    assert all(output.failed is None for output in outputs)


RANKS = """
import json, os, sys
from lockstride import EngineConfig, RequestError, SamplingParams, complete

config = EngineConfig(
    model="models/demo",
    device="cpu",
    max_num_seqs=4,
    max_model_len=64,
    control_timeout_s=600.0,
    bundles=f"{sys.argv[1]}/bundles",
)
greedy = SamplingParams(max_tokens=4, temperature=0.0)
for prompts in (["def gcd(a, b):", (5,) * 64], [(5,), (4096,)], ["def gcd(a, b):"]):
    try:
        found = [output.completions[0].token_ids for output in complete(config, prompts, greedy)]
    except RequestError as error:
        found = str(error)
    with open(f"{sys.argv[1]}/found.{os.environ['RANK']}", "a") as file:
        print(json.dumps(found), file=file)
"""


@pytest.mark.multiprocess
def test_on_two_ranks_a_bad_prompt_is_an_error_of_rank_0_and_an_orderly_end(tmp_path: Path) -> None:
    """Twice in one job, and the third call is served: nobody has left."""
    script = tmp_path / "ask.py"
    script.write_text(RANKS)
    ran = torchrun(2, str(script), str(tmp_path))
    assert ran.returncode == 0, ran.errors[-3000:]
    of_each = [(tmp_path / f"found.{rank}").read_text().splitlines() for rank in range(2)]
    found = [[json.loads(line) for line in lines] for lines in of_each]
    too_long, unknown, served = found[0]
    assert "the prompt has 64 tokens, but prompt and answer together may have 64" in too_long
    assert "prompt token 0 is 4096" in unknown
    assert len(served) == 1
    assert len(served[0]) == 4
    assert found[1] == [[], [], []]

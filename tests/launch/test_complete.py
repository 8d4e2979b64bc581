"""The public face, as a program uses it: the demo model, texts and ids, several answers, stop strings."""

from __future__ import annotations

import pytest
import torch

from lockstride import EngineConfig, SamplingParams, complete
from runtime.frontend.validation import RequestError
from runtime.schedule.request import FinishReason

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
    assert ids.prompt_token_ids == (311, 437, 4046)
    assert [c.seed for c in several.completions] == [5, 6]
    assert several.completions[0].token_ids != several.completions[1].token_ids
    assert "return" in text.completions[0].text
    assert cut.completions[0].text == text.completions[0].text.split("return")[0]


@pytest.mark.parametrize("launched", [False, True])
def test_only_a_process_of_a_launcher_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch, launched: bool) -> None:
    torch.set_num_threads(1)
    asked: list[bool] = []
    monkeypatch.setattr("launch.embed.die_with_parent", lambda: asked.append(True))
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

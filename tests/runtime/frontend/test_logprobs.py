"""Log-probabilities of prompts on their way: as columns to the end, so that rank 0 makes no objects of them."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from runtime.execute.sampling.logprobs import PromptLogprobs
from runtime.frontend import output_processor
from runtime.frontend.logprobs import prompt_logprobs
from runtime.frontend.output_processor import OutputProcessor
from runtime.frontend.outputs import TokenLogprob
from runtime.frontend.serve_messages import Ended, ScoredPrompt, Step, framed, from_engine
from runtime.schedule.plan import Finished, StepOutput
from runtime.schedule.request import FinishReason, SamplingParams

IDS = tuple(range(10, 19))


def part(start: int, tokens: int, top: int) -> PromptLogprobs:
    rng = np.random.default_rng(start)
    return PromptLogprobs(
        start,
        rng.standard_normal(tokens).astype(np.float32),
        rng.integers(1, 99, tokens).astype(np.int32),
        rng.integers(-1, 99, (tokens, top)).astype(np.int32),
        rng.standard_normal((tokens, top)).astype(np.float32),
    )


@pytest.mark.parametrize("top", [0, 1, 20])
def test_columns_travel_and_become_the_same_entries(top: int) -> None:
    parts = [part(1, 5, top), part(6, 3, top)]
    wire = tuple(map(ScoredPrompt.of, parts))
    step = from_engine(framed(Step(None, (), (), (Ended(1, FinishReason.LENGTH, b"", "", 0.0, wire),)))[4:])
    assert isinstance(step, Step)
    arrived = step.ended[0].prompt_logprobs
    assert arrived is not None
    entries = prompt_logprobs(IDS, arrived)
    assert entries == prompt_logprobs(IDS, parts)
    assert entries[0] is None
    first = entries[1]
    assert isinstance(first, TokenLogprob)
    assert (first.token_id, first.logprob, first.rank) == (11, float(parts[0].chosen_S[0]), int(parts[0].rank_S[0]))
    assert len(first.top) == sum(token >= 0 for token in parts[0].top_ids_SN[0])


@pytest.mark.parametrize("apart", [False, True])
def test_the_side_of_the_engine_makes_no_entries_for_the_api_processes(apart: bool) -> None:
    outputs, one = OutputProcessor(None), part(1, 8, 20)
    made = mock.Mock(side_effect=prompt_logprobs)
    sampling = SamplingParams(max_tokens=1, seed=1, prompt_logprobs=20)
    outputs.open(0, IDS, sampling, stop_token_ids=(), apart=apart)
    columns = StepOutput(0)._replace(request_ids=(0,), tokens=(5,), counts=(1,), prompt_logprobs=(one,))
    with mock.patch.object(output_processor, "prompt_logprobs", made):
        (whole,) = outputs.route(columns._replace(finished=(Finished(0, FinishReason.LENGTH, (5,)),))).finished
    assert made.call_count == (not apart)
    assert whole.prompt_parts == ((one,) if apart else None)
    assert (whole.prompt_logprobs is None) == apart

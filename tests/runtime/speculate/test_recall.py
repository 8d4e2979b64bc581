"""Acceptance and recall by position: counters of an engine against its proposer's guesses, compared with what the model
drew. The counters know neither: they follow from how much each round gained, and whether its row ended.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.execute.proposer import ProposerParts
from runtime.schedule.counters import ScheduleCounters
from runtime.schedule.speculation import Speculation
from tests.runtime.engine.rig import rig, run
from tests.runtime.engine.test_speculation import ngram, repeating
from tests.runtime.speculate.recorded import Recorder


@pytest.mark.parametrize("depth", [0, 2])
def test_counters_are_what_a_comparison_of_all_guesses_says(depth: int) -> None:
    """Of answers that end by length and by a stop id: there the last token is compared with no guess."""
    made: list[Recorder] = []

    def recording(parts: ProposerParts) -> Recorder:
        made.append(Recorder(ngram(4)(parts), parts.model))
        return made[-1]

    requests = [
        replace(r, sampling=replace(r.sampling, max_tokens=30 + r.request_id)) for r in repeating(8, temperature=1.5)
    ]
    requests[::3] = [replace(r, stop_token_ids=(7,)) for r in requests[::3]]
    with rig(depth=depth, blocks=400, proposer=recording, speculation=Speculation(4, mixed_percent=100)) as engine:
        finished, counters = run(engine, requests), engine.counters
    kept, compared = [0, 0, 0], [0, 0, 0]
    answers = {r.sampling.seed: (*r.prompt_token_ids, *finished[r.request_id].token_ids) for r in requests}
    for (seed, length), guesses in made[-1].rounds.items():
        for position, (guess, drawn) in enumerate(zip(guesses, answers[seed][length:-1], strict=False)):
            compared[position] += 1
            if guess != drawn:
                break
            kept[position] += 1
    assert [counters[f"spec_accepted_per_position{{{i}}}"] for i in range(3)] == kept
    assert [counters[f"spec_compared_per_position{{{i}}}"] for i in range(3)] == compared
    assert counters["spec_num_drafts"] > compared[0] > kept[0] > compared[2] > kept[2] > 0
    assert counters["finished{stop}"] > 0
    assert counters["finished{length}"] > 0


def test_borders() -> None:
    """Windows of three: all kept, none, one; those that ended; one that gained nothing; then wider, and narrower."""
    counters = ScheduleCounters()
    counters.proposed(3, [3, 1, 2])
    assert (counters.spec_accepted_per_position, counters.spec_compared_per_position) == ([2, 1], [3, 2])
    counters.proposed(3, [3, 1, 2], [3, 1, 2])
    assert (counters.spec_accepted_per_position, counters.spec_compared_per_position) == ([4, 2], [5, 3])
    counters.proposed(3, [0], [0])
    assert (counters.spec_accepted_per_position, counters.spec_compared_per_position) == ([4, 2], [5, 3])
    counters.proposed(4, [4, 3])
    counters.proposed(2, [2, 1])
    assert (counters.spec_accepted_per_position, counters.spec_compared_per_position) == ([7, 4, 1], [9, 5, 2])
    assert counters.spec_num_drafts == 3 + 3 + 1 + 2 + 2

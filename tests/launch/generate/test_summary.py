"""The summary of a run, from the counters of real engines: what speculation gained, and lines of what is out of the
ordinary, which a run without has not.
"""

from __future__ import annotations

import pytest

from launch.generate.summary import Summary
from runtime.engine import Engine
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.schedule.request import FinishReason
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculative_config import speculative_config
from tests.runtime.engine.rig import request, rig, run

SCRIPTED = {"method": "synthetic", "num_speculative_tokens": 3, "synthetic_acceptance_rates": [1, 1, 0]}
PLAIN = ["requests", "tokens", "throughput", "TTFT", "TPOT", "steps", "ghost rows"]


def lines_of(engine: Engine) -> dict[str, str]:
    """By label."""
    lines = Summary().text(engine.counters).splitlines()
    return {line[:14].strip(): line[14:] for line in lines}


def test_a_drafted_run_says_how_many_tokens_a_round_gained() -> None:
    """As the second of the demo's two runs. 30 tokens are one of the prompt's last chunk, nine rounds of three tokens,
    and one of two that the length cuts: its second guess is not kept.
    """
    proposer = proposer_for(speculative_config(SCRIPTED))
    with rig(depth=2, proposer=proposer, speculation=Speculation(4)) as engine:
        run(engine, [request(i, (1, 2, 3), max_tokens=30, stops=(), seed=i) for i in range(2)])
        lines, figures = lines_of(engine), Summary().figures(engine.counters)["speculation"]
    assert list(lines) == [*PLAIN, "speculation"]
    rounds, kept, proposed = 2 * 10, 2 * (9 * 2 + 1), 2 * 10 * 3
    assert lines["speculation"] == (
        f"{1 + kept / rounds:.2f} tokens a round, {kept} of {proposed} proposals kept; recall@1 1.00 1.00 0.00"
    )
    assert (figures["num_drafts"], figures["accepted_length"]) == (rounds, 1 + kept / rounds)
    assert figures["accepted_per_position"] == [20, 18, 0]
    assert figures["compared_per_position"] == [20, 18, 18], "of the two last rounds the first place only"
    assert figures["recall_per_position"] == [1, 1, 0]


def test_a_drafter_that_never_got_a_round_says_so() -> None:
    proposer = proposer_for(speculative_config(SCRIPTED))
    with rig(proposer=proposer, speculation=Speculation(4, most_rows=0)) as engine:
        run(engine, [request(0, (1, 2, 3), max_tokens=5, stops=())])
        assert lines_of(engine)["speculation"] == "no round, 0 of 0 proposals kept"


def test_an_ordinary_run_has_no_line_more() -> None:
    """A stop string that the host finds is a cancel, and nothing out of the ordinary."""
    with rig() as engine:
        engine.add(request(1, (1, 2, 4), max_tokens=30, stops=()))
        for _ in range(4):
            engine.step()
        engine.cancel(1, FinishReason.STOP)
        run(engine, [request(0, (1, 2, 3), max_tokens=4, stops=())])
        assert (engine.counters["cancels"], engine.counters["finished{stop}"]) == (1, 1)
        assert list(lines_of(engine)) == PLAIN


def test_lives_and_late_graphs_are_told() -> None:
    """Memory for one: the second request waits for the first, which is paused, gives up its memory and is cancelled."""
    with rig(blocks=9, max_model_len=68, prefix_caching=False) as engine:
        for i in range(2):
            engine.add(request(i, range(1, 60), max_tokens=8, stops=(), temperature=0.9 * i))
        for _ in range(4):
            engine.step()
        engine.pause(0)
        engine.step()
        engine.resume(0)
        engine.step()
        engine.cancel(0)
        run(engine, [])
        lines, figures, counted = lines_of(engine), Summary().figures(engine.counters), engine.counters
    assert list(lines) == [*PLAIN, "ends", "lifecycle", "late graphs"]
    assert lines["ends"] == "length 1, cancelled 1"
    deferred = counted["deferred_admissions"]
    assert deferred > 0
    assert lines["lifecycle"] == (
        f"admissions 2, deferred admissions {deferred}, evictions 1, pauses 1, resumes 1, cancels 1"
    )
    assert lines["late graphs"] == f"{SamplingVariant(random=True)}: 1 (--warm captures them at the start)"
    assert figures["finish_reasons"] == {"stop": 0, "length": 1, "error": 0, "cancelled": 1, "rejected": 0}
    assert figures["late_captures"] == {"random": 1}
    for name in ("admissions", "deferred_admissions", "evictions", "pauses", "resumes", "cancels"):
        assert figures[name] == counted[name]


@pytest.mark.parametrize(
    ("counter", "line"),
    [
        ("evictions", "lifecycle     evictions 3"),
        ("deferred_admissions", "lifecycle     deferred admissions 3"),
        ("finished{error}", "ends          error 3"),
        ("finished{rejected}", "ends          rejected 3"),
        ("fallbacks{eager_prefill_scored}", "fallbacks     eager_prefill_scored 3"),
    ],
)
def test_each_has_its_line(counter: str, line: str) -> None:
    assert Summary().text({counter: 3}).splitlines()[len(PLAIN) :] == [line]
    assert len(Summary().text({counter: 0, "admissions": 2}).splitlines()) == len(PLAIN) + ("fallbacks" in counter)

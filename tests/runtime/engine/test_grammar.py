"""Answers that must be texts of a grammar, in a whole engine: what comes out, the same at any depth and width."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from runtime.engine import Engine
from runtime.frontend.structured import structured
from runtime.frontend.validation import RequestError
from runtime.grammar import Grammars
from runtime.schedule.plan import Finished, StepOutput
from runtime.schedule.request import FinishReason, Request
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculate.tree import branching
from runtime.speculative_config import speculative_config
from tests.runtime.engine import rig as rigs
from tests.runtime.engine.conftest import over_model
from tests.runtime.engine.group_rigs import dealt_rig
from tests.runtime.engine.lives import live, oracle, same
from tests.runtime.engine.replay_proposer import script_of
from tests.runtime.engine.rig import request, rig, run
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_trees import RANKS, KnownAnswers
from tests.runtime.frontend import small_tokenizers

pytest.importorskip("llguidance")

pytestmark = pytest.mark.slow
EOS, VOCABULARY = 0, 400
SHAPE: dict[str, object] = {"vocab_size": VOCABULARY, "eos_token_id": EOS}
GRAMMARS = Grammars(lambda: small_tokenizers.byte_level().to_json(), VOCABULARY, (EOS,))
HOW: dict[str, Any] = {"grammars": GRAMMARS}
NUMBER = r"-?[1-9][0-9]{2,20}"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
DIGITS, JSON = structured(regex=NUMBER), structured(json=SCHEMA)
BLANKS = [i for i in range(3, 360) if not small_tokenizers.byte_level().decode([i]).strip()]
NO_BLANKS = tuple((i, -100.0) for i in BLANKS)  # else a model without sense writes little else


@pytest.fixture(autouse=True)
def _over_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rigs, "TINY", rigs.TINY | SHAPE)


def mixture(count: int = 9, **sampling: Any) -> list[Request]:
    """A third have a regular expression, a third a schema, a third may write anything."""
    made = []
    for i in range(count):
        fields: dict[str, Any] = {"max_tokens": 60, "temperature": (0.0, 1.0, 2.0)[i // 3 % 3], "logprobs": 1}
        fields["grammar"] = (DIGITS, JSON, "")[i % 3]
        fields["logit_bias"] = NO_BLANKS if i % 3 == 1 else ()
        made.append(request(i, [5 + (7 * i + j) % 300 for j in range(3 + 5 * i)], stops=(EOS,), **(fields | sampling)))
    return made


def text_of(ended: Finished) -> str:
    return small_tokenizers.byte_level().decode(ended.token_ids)


def check(requests: list[Request], finished: dict[int, Finished]) -> None:
    """Each answer is a text of its grammar, and has ended with it."""
    for one in requests:
        for request_id in one.answer_ids:
            ended, text = finished[request_id], text_of(finished[request_id])
            if not one.sampling.grammar:
                continue
            assert ended.reason is FinishReason.STOP, (text, ended)
            assert ended.token_ids[-1] == EOS
            if one.sampling.grammar == DIGITS:
                assert re.fullmatch(NUMBER, text), text
            else:
                found = json.loads(text)
                assert found.keys() == {"kind", "age"}
                assert found["kind"] in ("cat", "dog")
                assert 1 <= found["age"] <= 99


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_answers_are_texts_of_their_grammars_and_the_same_at_every_depth(depth: int) -> None:
    requests = mixture()
    life = live(requests, depth=depth, **HOW)
    check(requests, life.finished)
    same(life, oracle(requests, grammars=GRAMMARS) if depth else life)


@pytest.mark.long  # and at more widths and depths: test_grammar_masks.py
def test_in_draft_windows() -> None:
    """No text is forced here: its row gains a token a step, others up to four."""
    requests = mixture()
    alone = oracle(requests, grammars=GRAMMARS)
    keys = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    proposer = proposer_for(speculative_config(keys))
    for depth, percent in ((0, 100), (2, 100), (2, 0)):
        rule = Speculation(4, mixed_percent=percent)
        life = live(requests, depth=depth, proposer=proposer, speculation=rule, **HOW)
        same(life, alone)
        assert life.counters["spec_num_accepted_tokens"] > 0


@pytest.mark.long  # and with windows: test_grammar_masks.py
def test_ranks_that_share_the_vocabulary_draw_the_same() -> None:
    requests = mixture()
    alone = oracle(requests, grammars=GRAMMARS)
    same(live(requests, depth=2, over=lambda **how: tensor_rig(2, **how), **HOW), alone)
    same(
        live(mixture(logprobs=None), depth=2, over=lambda **how: tensor_rig(2, **how), **HOW),
        oracle(mixture(logprobs=None), grammars=GRAMMARS),
    )


@pytest.mark.long  # and with forced runs: test_forced_drafts.py
def test_in_draft_trees() -> None:
    requests = mixture()
    alone = oracle(requests, grammars=GRAMMARS)
    script = script_of(requests, {i: ended.token_ids for i, ended in alone.finished.items()})
    proposer = branching(lambda parts: KnownAnswers(parts, script), RANKS)
    rule = Speculation(3, mixed_percent=0)
    life = live(requests, depth=2, proposer=proposer, speculation=rule, tree=8, **HOW)
    same(life, alone)
    assert life.counters["spec_num_accepted_tokens"] > 0


def test_groups_that_deal_requests_out() -> None:
    requests = mixture()
    with dealt_rig(depth=2, **HOW) as engine:
        check(requests, run(engine, requests))


@pytest.mark.long  # and in draft windows: test_forced_drafts.py
def test_forks_and_whoever_is_evicted() -> None:
    requests = mixture()
    tight = live(requests, depth=2, blocks=22, **HOW)
    assert tight.counters["evictions"]
    same(tight, oracle(requests, grammars=GRAMMARS))
    several = [
        request(0, [9, 8, 7], stops=(EOS,), n=3, temperature=1.0, max_tokens=60, grammar=JSON, logit_bias=NO_BLANKS)
    ]
    forked = live(several, depth=2, **HOW)
    check(several, forked.finished)
    assert forked.counters["forks"] == 2


def test_a_model_with_recurrent_state(monkeypatch: pytest.MonkeyPatch) -> None:
    over_model("hybrid", monkeypatch)
    requests = mixture()
    life = live(requests, depth=2, **HOW)
    check(requests, life.finished)
    same(life, oracle(requests, grammars=GRAMMARS))


def test_other_rows_run_in_every_step() -> None:
    """Steps, and steps by token, of requests without a grammar: one beside them changes nothing."""

    def steps_of(requests: list[Request]) -> list[int]:
        steps: list[int] = []

        def watch(output: StepOutput) -> None:
            steps.extend(output.step for i, id_ in enumerate(output.request_ids) if id_ == 2 and output.counts[i])

        with rig(depth=3, **HOW) as engine:
            run(engine, requests, watch=watch)
            assert "grammar" not in engine.scheduler.counters.chain_breaks
        return steps

    free = [request(i, [5, 6, 7], stops=(), max_tokens=40) for i in (1, 2)]
    constrained = request(0, [5, 6, 7], stops=(EOS,), max_tokens=8, temperature=1.0, grammar=JSON)
    assert steps_of([*free, constrained]) == steps_of(free)


def test_what_grammars_cost_is_counted() -> None:
    grammars = Grammars(lambda: small_tokenizers.byte_level().to_json(), VOCABULARY, (EOS,))
    with rig(depth=3, grammars=grammars) as engine:
        run(engine, [request(0, [5, 6, 7], stops=(), max_tokens=20)])
        assert all(engine.counters[name] == 0 for name in engine.counters if name.startswith("grammar_"))
        ended = ended_with(engine, grammar=DIGITS, max_tokens=60)
        counters = engine.counters
        assert counters["grammar_compiles"] == 1
        assert counters["grammar_masks"] == len(ended.token_ids)
        assert counters["grammar_waits"] > 0
        assert all(counters[f"grammar_{what}_seconds"] > 0 for what in ("compile", "wait", "mask"))
    with rig(depth=0, **HOW) as engine:
        ended_with(engine, grammar=DIGITS, max_tokens=60)
        assert engine.counters["grammar_waits"] == 0


def test_steps_without_such_rows_stage_nothing_for_them() -> None:
    """What a longer answer stages, before and after a request with a grammar had its slot."""

    def staged(engine: Engine, most: int) -> int:
        before = engine.counters["host_to_device_bytes"]
        run(engine, [request(1, [5, 6], stops=(), max_tokens=most)])
        return int(engine.counters["host_to_device_bytes"] - before)

    with rig(depth=2, **HOW) as engine:
        plain = staged(engine, 70) - staged(engine, 10)
        run(engine, [request(0, [5, 6], stops=(EOS,), max_tokens=30, grammar=DIGITS)])
        staged(engine, 10)
        assert staged(engine, 70) - staged(engine, 10) == plain


def ended_with(engine: Engine, **sampling: Any) -> Finished:
    return run(engine, [request(0, [5, 6, 7], stops=(EOS, *sampling.pop("stops", ())), **sampling)])[0]


def test_rules_of_stop_ids_and_other_limits() -> None:
    fixed = structured(choice=["ok"])
    digits = structured(regex="[0-9]{1,30}")
    one = small_tokenizers.byte_level().encode("1")[0]
    with rig(depth=2, **HOW) as engine:
        ended = ended_with(engine, grammar=fixed, ignore_eos=True, max_tokens=20)
        assert (text_of(ended), ended.reason) == ("ok", FinishReason.STOP)  # nothing can follow
        ended = ended_with(engine, grammar=fixed, min_tokens=15, max_tokens=20)
        assert (text_of(ended), ended.reason) == ("ok", FinishReason.STOP)
        ended = ended_with(engine, grammar=digits, ignore_eos=True, max_tokens=60, temperature=2.0)
        assert len(text_of(ended)) == 30
        ended = ended_with(engine, grammar=digits, min_tokens=8, max_tokens=60, temperature=2.0)
        assert 8 <= len(ended.token_ids) <= 31
        ended = ended_with(engine, grammar=digits, ignore_eos=True, max_tokens=5, temperature=2.0)
        assert (len(ended.token_ids), ended.reason) == (5, FinishReason.LENGTH)  # cut
        ended = ended_with(engine, grammar=structured(regex="1{4}2"), stops=(one,), max_tokens=9)
        assert ended.reason is FinishReason.ERROR  # its stop id is no end of a text, and nothing else may come
        ended = ended_with(engine, grammar=structured(regex="1+|2"), logit_bias=((one, -100.0),), temperature=0.0)
        assert text_of(ended) == "2"
        ended = ended_with(engine, grammar=fixed, allowed_token_ids=(one,))
        assert ended.reason is FinishReason.ERROR
        assert "its grammar and its other limits leave no token" in ended.detail
        ended = ended_with(engine, grammar=structured(regex="[12]{6}"), bad_words_token_ids=((one,),), temperature=2.0)
        assert text_of(ended) == "222222"


def test_a_grammar_that_a_rank_cannot_use_ends_its_request_alone() -> None:
    with rig(depth=2, **HOW) as engine:
        broken = request(1, [5, 6], stops=(EOS,), grammar="start: nothing")
        finished = run(engine, [broken, request(2, [5, 6], stops=(), max_tokens=5)])
    assert (finished[1].reason, finished[2].reason) == (FinishReason.ERROR, FinishReason.LENGTH)


def test_a_session_has_no_grammar() -> None:
    with (
        rig(depth=2, max_sessions=1, **HOW) as engine,
        pytest.raises(RequestError, match="a session has no grammar") as found,
    ):
        engine.start(request(0, [5, 6], stops=(EOS,), max_tokens=20, grammar=DIGITS), 8)
    assert found.value.field == "grammar"

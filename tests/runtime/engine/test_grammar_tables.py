"""Answers by tables on the device: the tokens are those of the host's masks, at every depth, width, tree and rank."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launch.serve.parsers.call_grammar import grammar_of_calls
from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime.build import build_engine
from runtime.config import EngineConfig
from runtime.frontend.structured import structured
from runtime.grammar import Grammars
from runtime.grammar_tables import maker
from runtime.schedule.plan import StepOutput
from runtime.schedule.request import FinishReason
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculate.tree import branching
from runtime.speculative_config import speculative_config
from tests.launch.serve.parsers.test_call_grammar import TOOLS
from tests.plant import invariant_kernels
from tests.runtime.engine import rig as rigs
from tests.runtime.engine.conftest import long, over_model
from tests.runtime.engine.group_rigs import dealt_rig
from tests.runtime.engine.lives import live, oracle, same
from tests.runtime.engine.replay_proposer import script_of
from tests.runtime.engine.rig import request, rig, run, tiny_folder
from tests.runtime.engine.table_rigs import small_grammars, with_tables
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_grammar import DIGITS, EOS, GRAMMARS, JSON, SHAPE, VOCABULARY, check, mixture
from tests.runtime.engine.test_grammar_masks import HOW, MANY, NGRAM, asked, grammars_change_no_bit
from tests.runtime.engine.test_trees import RANKS, KnownAnswers
from tests.runtime.frontend import small_tokenizers

pytest.importorskip("llguidance")

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _over_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rigs, "TINY", rigs.TINY | SHAPE)


@pytest.fixture
def tabled() -> Iterator[Grammars]:
    grammars = with_tables(small_grammars(VOCABULARY, EOS), (EOS,))
    yield grammars
    grammars.close()


@pytest.mark.parametrize("depth", [long(0), long(1), 3])
def test_the_tokens_are_those_of_the_host(tabled: Grammars, depth: int) -> None:
    requests = mixture(9)
    life = live(requests, depth=depth, grammars=tabled)
    check(requests, life.finished)
    same(life, oracle(requests, grammars=GRAMMARS))
    assert life.counters["grammar_tabled"] >= 6


def drafts(width: int = 4, percent: int = 100) -> dict[str, Any]:
    config = speculative_config(NGRAM | {"num_speculative_tokens": width - 1})
    return {"proposer": proposer_for(config), "speculation": Speculation(width, mixed_percent=percent)}


@pytest.mark.parametrize("how", [long({"depth": 0}), {"depth": 2}, {"depth": 3, "percent": 0}])
def test_in_draft_windows_rows_append_several_tokens(tabled: Grammars, how: dict[str, Any]) -> None:
    requests = mixture(9)
    life = live(requests, depth=how["depth"], grammars=tabled, **drafts(percent=how.get("percent", 100)))
    same(life, oracle(requests, grammars=GRAMMARS))
    again = structured(regex="(ab){25}")  # which n-grams foresee
    with rig(depth=2, grammars=tabled, **drafts()) as engine:
        ended = run(engine, [request(0, [5, 6, 7], stops=(EOS,), max_tokens=60, grammar=again)])[0]
        assert ended.reason is FinishReason.STOP
        assert engine.counters["spec_num_accepted_tokens"] > 10


def test_in_draft_trees(tabled: Grammars) -> None:
    requests = mixture(9)
    alone = oracle(requests, grammars=GRAMMARS)
    script = script_of(requests, {i: ended.token_ids for i, ended in alone.finished.items()})
    proposer = branching(lambda parts: KnownAnswers(parts, script), RANKS)
    rule = Speculation(3, mixed_percent=0)
    life = live(requests, depth=2, grammars=tabled, proposer=proposer, speculation=rule, tree=8)
    same(life, alone)
    assert life.counters["grammar_tabled"] >= 6


@pytest.mark.parametrize(("seeds", "hows"), [((1,), HOW[1:]), long((2, 3), MANY)])
def test_random_schemas_and_calls(seeds: Sequence[int], hows: list[tuple[int, int, bool, int]]) -> None:
    """At a temperature of 2, where one mask of another bit soon draws another token."""
    for seed in seeds:
        requests, _ = asked(seed, 6)
        call = replace(requests[0].sampling, grammar=grammar_of_calls("hermes", TOOLS, {}, choice="", one=True))
        requests.append(replace(requests[0], request_id=len(requests), sampling=call))
        alone = oracle(requests, grammars=GRAMMARS)
        script = script_of(requests, {i: ended.token_ids for i, ended in alone.finished.items()})
        for depth, width, tree, ranks in hows:
            grammars = with_tables(small_grammars(VOCABULARY, EOS), (EOS,))
            how: dict[str, Any] = {"depth": depth, "grammars": grammars}
            if tree:
                proposer = branching(lambda parts, known=script: KnownAnswers(parts, known), RANKS)  # type: ignore[misc]
                how |= {"proposer": proposer, "speculation": Speculation(width, mixed_percent=0), "tree": 8}
            elif width > 1:
                how |= drafts(width)
            if ranks > 1:
                how["over"] = lambda **more: tensor_rig(2, **more)
            life = live(requests, **how)
            same(life, alone)
            assert life.counters["grammar_tabled"] >= 4, (seed, depth, width, tree, ranks)
            grammars.close()


@pytest.mark.parametrize("logprobs", [1, long(None)])
def test_ranks_that_share_the_vocabulary_draw_the_same(logprobs: int | None) -> None:
    """Each has a place for the table, and masks its shard."""
    grammars = with_tables(small_grammars(VOCABULARY, EOS), (EOS,))
    requests = mixture(9, logprobs=logprobs)
    over = lambda **how: tensor_rig(2, **how)  # noqa: E731
    life = live(requests, depth=2, over=over, grammars=grammars)
    same(life, oracle(requests, grammars=GRAMMARS))
    assert life.counters["grammar_tabled"] >= 6
    grammars.close()


@pytest.mark.parametrize(("late", "how"), [(3, {}), (12, drafts())], ids=["a token a step", "windows"])
def test_a_row_changes_over_when_its_table_is_ready(late: int, how: dict[str, Any]) -> None:
    requests = [one for one in mixture(18) if one.sampling.grammar]
    grammars = with_tables(small_grammars(VOCABULARY, EOS), (EOS,), late=late)
    life = live(requests, depth=2, grammars=grammars, **how)
    same(life, oracle(requests, grammars=GRAMMARS))
    assert grammars.counters.grammar_masks > 0
    assert life.counters["grammar_tabled"] >= 6
    grammars.close()


def test_forks_and_whoever_is_evicted(tabled: Grammars) -> None:
    """The state of a slot is that of its answer, wherever it began."""
    requests = mixture(9)
    tight = live(requests, depth=2, blocks=22, grammars=tabled)
    assert tight.counters["evictions"]
    same(tight, oracle(requests, grammars=GRAMMARS))
    several = [request(0, [9, 8, 7], stops=(EOS,), n=3, temperature=1.0, max_tokens=60, grammar=JSON)]
    same(live(several, depth=2, grammars=tabled), oracle(several, grammars=GRAMMARS))


def test_groups_that_deal_requests_out(tabled: Grammars) -> None:
    requests = mixture(18)
    with dealt_rig(depth=2, grammars=tabled) as engine:
        check(requests, run(engine, requests))
        assert engine.counters["grammar_tabled"] > 0


@pytest.mark.parametrize(
    ("kind", "how"), [("hybrid", {}), long("nemotron-h", drafts())], ids=["a token a step", "windows"]
)
def test_a_model_with_recurrent_state(
    tabled: Grammars, monkeypatch: pytest.MonkeyPatch, kind: str, how: dict[str, Any]
) -> None:
    over_model(kind, monkeypatch)
    requests = mixture(18)
    life = live(requests, depth=2, grammars=tabled, **how)
    same(life, oracle(requests, grammars=GRAMMARS))
    assert life.counters["grammar_tabled"] >= 6


def test_a_tabled_row_is_in_every_step(tabled: Grammars) -> None:
    """As many steps as tokens, though three of them are in flight."""
    fields: dict[str, Any] = {"stops": (EOS,), "max_tokens": 30, "temperature": 0.0, "grammar": DIGITS}
    with rig(depth=3, grammars=tabled) as engine:
        run(engine, [request(0, [5, 6, 7], **fields)])  # its table is there from now on
        steps: list[int] = []

        def watch(output: StepOutput) -> None:
            steps.extend(output.step for i, id_ in enumerate(output.request_ids) if id_ == 1 and output.counts[i])

        before = engine.counters["grammar_masks"]
        ended = run(engine, [request(1, [5, 6, 7], **fields)], watch=watch)[1]
        assert engine.counters["grammar_masks"] == before
    assert ended.reason is FinishReason.STOP
    assert steps == list(range(steps[0], steps[0] + len(ended.token_ids)))


def test_rules_of_stop_ids_and_other_limits(tabled: Grammars) -> None:
    """With and without a table the same tokens, for the same reasons."""
    eights = structured(regex="[0-9]{1,30}")
    many: list[dict[str, Any]] = [
        {"grammar": structured(choice=["ok"]), "ignore_eos": True},
        {"grammar": eights, "ignore_eos": True, "temperature": 2.0},
        {"grammar": eights, "min_tokens": 8, "temperature": 2.0},
        {"grammar": structured(regex="1{4}2"), "stops": (EOS, 19)},
        {"grammar": structured(regex="(ab?c)+"), "stops": (EOS, 70), "ignore_eos": True},
        {"grammar": eights, "allowed_token_ids": tuple(range(30))},
        {"grammar": structured(choice=["ok"]), "allowed_token_ids": (19,)},
        {"grammar": eights, "bad_words_token_ids": ((19,), (20, 20)), "temperature": 2.0},
        {"grammar": eights, "repetition_penalty": 1.5, "logit_bias": ((19, 5.0),)},
    ]
    usual: dict[str, Any] = {"max_tokens": 40, "stops": (EOS,)}
    requests = [request(i, [5, 6, 7 + i], seed=i, **(usual | fields)) for i, fields in enumerate(many * 2)]
    life = live(requests, depth=2, rows=3, grammars=tabled)
    same(life, oracle(requests, grammars=GRAMMARS))
    assert life.counters["grammar_tabled"] >= len(many)


def test_more_grammars_than_places(tabled: Grammars) -> None:
    """Those without one stay with the host, and a place is given on."""
    requests = [
        request(
            i, [5, 6, 7], max_tokens=12, stops=(EOS,), seed=i, grammar=structured(regex=f"[0-9a-f]{{{3 + i % 20}}}")
        )
        for i in range(60)
    ]
    life = live(requests, depth=2, rows=20, grammars=tabled)
    same(life, oracle(requests, grammars=GRAMMARS))
    assert life.counters["grammar_tabled"] > 16


def test_an_engine_makes_its_tables_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is built: rank 0 has a maker, and the first requests begin under their matcher."""
    monkeypatch.setattr(maker, "POLICY", os.SCHED_OTHER)  # no core may be idle beside other tests
    (folder := tiny_folder(tmp_path)).joinpath("tokenizer.json").write_text(small_tokenizers.byte_level().to_json())
    config = EngineConfig(
        model=str(folder), load_format="dummy", device="cpu", max_num_seqs=2, num_blocks=60, max_model_len=128
    )
    fields: dict[str, Any] = {"stops": (EOS,), "max_tokens": 30, "grammar": DIGITS, "temperature": 1.0}
    until = time.monotonic() + 300
    with build_engine(
        config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device="cpu"
    ) as engine:
        first = run(engine, [request(0, [5, 6, 7], **fields)])[0]
        while engine.counters["grammar_tabled"] == 0:
            assert time.monotonic() < until
            again = run(engine, [request(0, [5, 6, 7], **fields)])[0]
    assert again.token_ids == first.token_ids


def test_in_the_deterministic_mode_they_change_no_bit(tabled: Grammars) -> None:
    grammars_change_no_bit(partial(rig, kernels=invariant_kernels()), tabled)

"""Requests for several answers: the prompt is computed once, and each answer is the one that it would be alone.

Every life is compared, bit for bit, with that of as many single requests with the same seeds over the serial engine.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from runtime.engine import Engine
from runtime.frontend.client import EngineClient, PreparedPrompt, PromptRequest
from runtime.frontend.outputs import RequestOutput
from runtime.schedule.config import MixedSteps
from runtime.schedule.plan import StepKind
from runtime.schedule.request import FinishReason, Request, SamplingParams
from runtime.schedule.states import State
from tests.plant import Op, kernels_with
from tests.runtime.engine.conftest import over_models
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.lives import Life, live, oracle, prompt, same, unbroken
from tests.runtime.engine.rig import VOCABULARY, request, rig
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_mixed import last_layer_for_draws
from tests.selection import covering

DEPTHS = (0, 1, 2, 4)
BUCKETS = (4, 8, 16, 24, 40, 64)
MIXED = MixedSteps(BUCKETS, ((8, 10_000, 40),), long_prompt=100)
WITHOUT_CHUNKS = 200  # tokens of a step, more than any prompt has


def families() -> list[Request]:
    """Several answers each: greedy, random, filtered, penalised, with edited logits, scored, stopped; prompts that end
    within a block of 8 and at the end of one, and one of a single token.
    """
    stops = tuple(range(0, VOCABULARY, 15))
    return [
        request(0, prompt(21, 0), n=3, temperature=1.0, max_tokens=12, logprobs=2),
        request(10, prompt(16, 1), n=4, temperature=0.8, top_p=0.8, max_tokens=9, stops=stops),
        request(20, prompt(37, 2), n=2, temperature=1.2, repetition_penalty=1.3, frequency_penalty=0.2, max_tokens=14),
        request(30, prompt(1, 3), n=3, temperature=1.5, max_tokens=3, logprobs=1),
        request(40, prompt(26, 4), n=3, temperature=1.0, prompt_logprobs=2, max_tokens=7),
        request(50, prompt(8, 5), n=3, max_tokens=1),
        request(60, prompt(30, 6), n=2, temperature=1.0, top_k=20, min_p=0.01, min_tokens=4, max_tokens=9, stops=stops),
        request(
            70,
            prompt(13, 7),
            n=3,
            temperature=1.0,
            logit_bias=((5, 4.0), (9, -3.0)),
            bad_words_token_ids=((7,), (5, 5)),
        ),
    ]


def alone(requests: list[Request], **limits: Any) -> Life:
    """Each answer as a request of its own, with its own seed, and nothing shared."""
    return oracle([answer for one in requests for answer in one.answers()], prefix_caching=False, **limits)


@pytest.mark.parametrize(
    ("every_model", "depth", "chunk", "prefix_caching"),
    over_models(DEPTHS, (WITHOUT_CHUNKS, 11), (True, False)),
    indirect=["every_model"],
)
@pytest.mark.usefixtures("every_model")
def test_answers_are_those_of_single_requests(depth: int, chunk: int, prefix_caching: bool) -> None:
    limits: dict[str, Any] = {"max_prefill_tokens": chunk, "prefix_caching": prefix_caching}
    requests = families()
    forked = live(requests, depth=depth, rows=24, **limits)
    same(forked, alone(requests))
    assert forked.counters["forks"] == sum(one.sampling.n - 1 for one in requests)
    assert forked.counters["prefill_tokens"] == sum(len(one.prompt_token_ids) for one in requests)
    if depth:
        unbroken(forked)


@pytest.mark.parametrize("depth", [0, 2])
def test_where_steps_are_replayed_nothing_is_captured_or_allocated(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [one for one in families() if one.sampling.prompt_logprobs is None]  # their ring is made when one comes
    rows, expected = (1, 2, 4, 8, 24), alone(requests)
    taken = last_layer_for_draws(monkeypatch) if depth else [True]  # a fork asks with the last token of its prompt
    forked = live(requests, depth=depth, rows=24, buckets=rows, prefill_buckets=BUCKETS, mixed=MIXED)
    same(forked, expected)
    assert any(taken)
    assert forked.counters["graph_captures_after_warmup"] == sum(
        n for name, n in forked.counters.items() if name.startswith("late_captures")
    ), "kinds of sampling that nobody announced"
    assert forked.counters["device_allocs_after_warmup"] == 0
    replayed = [spec for spec in forked.specs if spec.plan.forks and spec.captured]
    assert replayed
    assert all(spec.shape.rows >= len(spec.plan.slots) and spec.captured >= len(spec.plan.slots) for spec in replayed)


def test_a_step_may_have_more_rows_than_tokens() -> None:
    """One token, 20 answers: the graph is the one for as many tokens as there are rows."""
    requests = [request(0, prompt(1, 3), n=20, temperature=1.5, max_tokens=3, logprobs=1)]
    forked = live(requests, depth=2, rows=24, buckets=(24,), prefill_buckets=BUCKETS, mixed=MIXED)
    same(forked, alone(requests))
    (spec,) = (spec for spec in forked.specs if spec.plan.forks)
    assert (spec.plan.packed_tokens, len(spec.plan.slots), spec.captured, spec.shape.rows) == (1, 20, 24, 24)


def test_answers_that_come_apart_are_computed_once_too() -> None:
    """As in serve, where each has an output of its own, and one may be cancelled without the others."""
    sampling = SamplingParams(n=8, temperature=1.0, max_tokens=9, seed=0)
    expected = alone([request(0, prompt(40, 1), n=8, temperature=1.0, max_tokens=9, stops=())]).answers
    with rig(depth=2, rows=8, prefix_caching=False) as engine:
        client = EngineClient(engine, text=False)
        asked = PreparedPrompt(PromptRequest(prompt(40, 1), sampling, apart=True), prompt(40, 1), sampling, (), 0)
        first = client.submit(asked)
        found: dict[Any, RequestOutput] = {}
        while client.live:
            turn = client.turn()
            found.update((output.key, output) for output in turn.finished)
            if engine.counters["forks"] == 7:
                client.cancel(3)
        counters = dict(engine.counters)
        client.close()
    assert (first, sorted(found)) == (0, [*range(8)])
    assert (counters["prefill_tokens"], counters["forks"]) == (40, 7)
    for key, output in found.items():
        (answer,) = output.completions
        assert (answer.finish_reason is FinishReason.CANCELLED) == (key == 3)
        assert key == 3 or answer.token_ids == expected[key][0]


def test_eight_answers_to_1024_tokens_compute_1024_tokens() -> None:
    requests = [request(0, prompt(1024, 1), n=8, temperature=1.0, max_tokens=4)]
    limits: dict[str, Any] = {"max_model_len": 1100, "blocks": 400, "block_size": 16, "max_prefill_tokens": 300}
    shape = {"max_position_embeddings": 2048}
    forked = live(requests, depth=2, rows=8, shape=shape, **limits)
    assert forked.counters["prefill_tokens"] == 1024
    assert (forked.counters["forks"], forked.counters["forked_tokens"]) == (7, 7 * 1024)
    assert len(set(forked.answers.values())) > 1, "each has its own seed"
    assert forked.counters["prefix_waits"] == 0, "nobody waits for blocks"


@pytest.mark.parametrize(
    ("depth", "prefix_caching"), [*covering(DEPTHS, (True, False), at_once=0, turned=4), (1, False)]
)
def test_with_little_room_as_many_fork_as_fit(depth: int, prefix_caching: bool) -> None:
    """Rows for three and blocks for a few: the others come later, evictions and all."""
    requests = families()
    forked = live(requests, depth=depth, rows=3, blocks=22, prefix_caching=prefix_caching)
    same(forked, alone(requests))
    assert 0 < forked.counters["forks"] < sum(one.sampling.n - 1 for one in requests)


@pytest.mark.parametrize(("turn", "victim", "depth"), covering((1, 3, 6), (0, 2), (0, 2), at_once=1))
def test_one_answer_may_be_cancelled_at_any_time(turn: int, victim: int, depth: int) -> None:
    """In turn 1 and 3 the prompt is being computed, in turn 6 all answers are running. It is in row 0."""
    requests = [request(0, prompt(37, 2), n=4, temperature=1.0, max_tokens=12, logprobs=1)]
    states: list[State] = []

    def act(engine: Engine, now: int) -> None:
        if now == turn:
            states.append(engine.scheduler.ledger.sequences[victim].state)
            engine.cancel(victim)

    forked = live(requests, act, depth=depth, max_prefill_tokens=8)
    begun = State.DECODE if turn == 6 else State.JOINING if victim else State.PREFILL
    assert states == [begun]
    same(forked, alone(requests), but=[victim])
    assert forked.counters["forks"] == (3 if turn == 6 or victim == 0 else 2) - (turn < 6 and victim == 0)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_paused_answer_comes_by_itself(depth: int) -> None:
    requests = [request(0, prompt(37, 2), n=4, temperature=1.0, max_tokens=12)]

    def act(engine: Engine, now: int) -> None:
        if now == 1:
            engine.pause(0)
            engine.pause(2)
        elif now == 9:
            engine.resume(0)
            engine.resume(2)

    forked = live(requests, act, depth=depth, max_prefill_tokens=8)
    same(forked, alone(requests))
    assert forked.counters["forks"] == 2


def test_every_rank_of_a_group_forks() -> None:
    requests = families()
    forked = live(
        requests, depth=2, over=lambda **limits: tensor_rig(2, **limits), prefill_buckets=BUCKETS, mixed=MIXED
    )
    same(forked, alone(requests))
    assert forked.counters["forks"] > 5


# ---- mutants ----


class LateKeys:
    """``late``: where the few tokens that draw ask alone, they see the pages as they were before the step."""

    def __init__(self, *, late: bool) -> None:
        self.late = late
        self.asked = 0
        self._before: Tensor | None = None

    def rope_and_cache(self, rope: Op, qkv_TX: Tensor, heads: int, kv_layer: Tensor, *given: Any) -> Any:
        if heads == 0:  # keys and values of all tokens
            self._before = kv_layer.clone()
        return rope(qkv_TX, heads, kv_layer, *given)

    def decode_attention(self, attend: Op, q_THD: Tensor, kv_layer: Tensor, *given: Any, **named: Any) -> Any:
        before, self._before = self._before, None
        self.asked += before is not None
        seen = before if before is not None and self.late else kv_layer
        return attend(q_THD, seen, *given, **named)


@pytest.mark.parametrize("late", [False, True])
def test_a_fork_that_asks_before_its_prompt_is_written_shows(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside rows that decode: its first token is drawn over pages that its parent's chunk writes in the same step."""
    last_layer_for_draws(monkeypatch)
    running = [request(i, prompt(9, i), temperature=1.0, max_tokens=20, stops=()) for i in range(2)]
    family = request(10, prompt(37, 2), n=3, temperature=1.0, max_tokens=6, logprobs=1)
    keys = LateKeys(late=late)
    planted: dict[str, Op] = {"rope_and_cache": keys.rope_and_cache, "decode_attention": keys.decode_attention}
    forked = live(
        running,
        depth=2,
        later={4: [family]},
        rows=8,
        buckets=(8,),
        prefill_buckets=BUCKETS,
        mixed=MIXED,
        kernels=kernels_with(exact_kernels(), **planted),
    )
    (spec,) = (spec for spec in forked.specs if spec.plan.forks)
    assert (spec.plan.kind, len(spec.plan.forks), spec.plan.decode_rows) == (StepKind.MIXED, 2, 2)
    assert keys.asked
    expected = alone([*running, family])
    if not late:
        same(forked, expected)
    else:
        firsts = [
            (life.answers[i][0][0], life.logprobs[i][0]) for life in (forked, expected) for i in family.answer_ids
        ]
        assert not set(firsts[:3]) & set(firsts[3:]), "each answer's first token"

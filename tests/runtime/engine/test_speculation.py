"""Engines with a proposer of the product: answers are those without, and every round gains what it should.

Everything is computed exactly (lives.py), so answers are compared bit for bit with the serial engine, one token a step.
Windows of every outcome, by a proposer that knows the answers, are test_windows.py's; here are the proposers
themselves, what they are shown, and the policy that turns them on and off.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise, product, starmap
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.config import EngineConfig
from runtime.execute.executor import Executor
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.proposer import MakeProposer, Observed, Proposed, Proposer, ProposerParts
from runtime.execute.slot_state import SlotColumns
from runtime.schedule.ledger import Ledger
from runtime.schedule.plan import StepKind, StepPlan, StepResult
from runtime.schedule.request import FinishReason, Request
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.sequence import SequenceState
from runtime.schedule.speculation import Speculation
from runtime.schedule.states import IllegalTransition
from runtime.speculate.methods import proposer_for
from runtime.speculate.ngram import NgramProposer
from runtime.speculative_config import speculative_config
from runtime.window_costs import cost_table, window_times
from tests.plant import reference_kernels
from tests.runtime.engine.conftest import long
from tests.runtime.engine.lives import Life, ending, live, oracle, people, prompt, same, unbroken
from tests.runtime.engine.random_lives import random_life
from tests.runtime.engine.rig import VOCABULARY, request, rig, run
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_depths import outcome
from tests.selection import covering

ROOM: dict[str, Any] = {"blocks": 400}
WIDTHS = [2, 3, 4, 5, 6, 7, 8, 16, 32]
FOUR_HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 64}


def ngram(width: int, *, high: int = 2) -> MakeProposer:
    keys: dict[str, Any] = {"num_speculative_tokens": width - 1, "prompt_lookup_min": 1, "prompt_lookup_max": high}
    return proposer_for(speculative_config({"method": "ngram", **keys}))


def speculating(
    requests: list[Request],
    width: int,
    *,
    proposer: MakeProposer | None = None,
    policy: dict[str, Any] | None = None,
    every: list[Request] | None = None,
    but: set[int] | None = None,
    serial: dict[str, Any] | None = None,
    **limits: Any,
) -> Life:
    """A life with an n-gram proposer, or another, whose answers are those of the serial one without. Rows beside chunks
    have windows, too, unless ``policy`` says otherwise."""
    alone = oracle(every or requests, **(serial or {}))
    rule = Speculation(width, **({"mixed_percent": 100} | (policy or {})))
    how: dict[str, Any] = {"proposer": proposer or ngram(width), "speculation": rule}
    life = live(requests, **(ROOM | how | limits))
    same(life, alone, but=but or ())
    return life


def repeating(count: int, **sampling: Any) -> list[Request]:
    """Requests whose answers repeat themselves now and then, because few tokens are allowed."""
    few = tuple(range(5, 9))
    fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0.6, "allowed_token_ids": few, **sampling}
    return [
        request(i, [20 + i, *(few[j % 4] for j in range(i, i + 8))], **{"stops": (), **fields}) for i in range(count)
    ]


# ---- the same answers ----


@pytest.mark.parametrize(("width", "temperature"), [(3, 0.6), (32, 0.0), *starmap(long, product(WIDTHS, (0.0, 0.6)))])
def test_answers_are_those_without(width: int, temperature: float) -> None:
    requests = [replace(r, sampling=replace(r.sampling, max_tokens=9 + 7 * r.request_id)) for r in repeating(5)]
    requests = [replace(r, sampling=replace(r.sampling, temperature=temperature, logprobs=2)) for r in requests]
    life = speculating(requests, width, depth=(width + 2) % 5)
    counters = life.counters
    assert counters["spec_num_accepted_tokens"] > 20, "proposals are kept"
    assert counters["spec_num_draft_tokens"] == (width - 1) * counters["spec_num_drafts"]
    finished = life.finished.values()
    assert sum(one.rounds for one in finished) == counters["spec_num_drafts"]
    assert sum(one.accepted for one in finished) == counters["spec_num_accepted_tokens"]
    assert all(len(one.token_ids) == 1 + one.rounds + one.accepted for one in finished if one.rounds)


@pytest.mark.parametrize(("depth", "seed"), covering(range(5), range(4), at_once=0, turned=8))
def test_random_lives(depth: int, seed: int) -> None:
    """Arrivals, pauses, cancels, evictions, prefix hits, forks, scored and chunked prompts, penalties; mixed steps,
    with windows or not, or none."""
    life = random_life(5000 + seed).with_windows(2, 60)
    width = WIDTHS[(seed + depth) % len(WIDTHS)]
    limits = dict(life.limits)
    if seed % 2:
        limits["mixed"] = None
    how: dict[str, Any] = {"policy": {"mixed_percent": 100 * ((seed + depth) % 2)}, **limits}
    ran = speculating(
        life.first, width, depth=depth, but=life.cut, every=life.requests, later=life.later, act=life.act, **how
    )
    assert ran.counters["spec_num_drafts"] > 0


@pytest.mark.parametrize(
    ("width", "depth", "seed"),
    [(32, 2, 5010), *starmap(long, product((16, 32), range(5), range(5000, 5010)))],
)
def test_wide_lives_that_hold_everything(width: int, depth: int, seed: int) -> None:
    """W of 16 and 32 with the fewest blocks that serve a request; what a cancelled window reserved comes back."""
    life = random_life(seed).with_windows(2, 60)
    size = life.limits["block_size"]
    limits = life.limits | {"blocks": -(-(128 + width * (depth + 1)) // size) + 1}
    ran = speculating(
        life.first, width, depth=depth, but=life.cut, every=life.requests, later=life.later, act=life.act, **limits
    )
    assert max(map(max, ran.rounds.values())) > 4, "wide windows are kept"
    if seed == 5010:
        for name in ("evictions", "pauses", "prefix_hit_tokens", "mixed_steps", "ghost_rows"):
            assert ran.counters[name] > 0, name
        alone = oracle(life.requests)
        assert any(ran.answers[i][0] != alone.answers[i][0] for i in life.cut), "somebody is cut short"


def released_at_once(ledger: Ledger, sequence: SequenceState, usual: Any = Ledger.release) -> None:
    ledger.pool.give_back(sequence.blocks)
    sequence.blocks = []
    usual(ledger, sequence)


def believed(scheduler: Scheduler, rows: list[SequenceState | None], plan: StepPlan, result: StepResult) -> list[int]:
    return []


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "caught"),
    [
        (Ledger, "release", released_at_once, AssertionError),
        (Scheduler, "_drop_ghosts", believed, IllegalTransition),
    ],
    ids=["blocks released before the last round has landed", "epochs that nobody looks at"],
)
def test_what_guards_rounds_in_flight_is_needed(
    owner: type, name: str, mutant: Any, caught: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The life above, with a mutant: an answer has another's tokens, or a request ends for the second time."""
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(caught, match="request"):
        test_wide_lives_that_hold_everything(4, 2, 5010)


@pytest.mark.parametrize("width", [long(4), 8])
def test_an_eviction_brings_the_history_back(width: int) -> None:
    """What was generated before it is a prompt afterwards, in the slot's history as well."""
    requests = [replace(r, sampling=replace(r.sampling, max_tokens=60, logprobs=1)) for r in repeating(6)]
    life = speculating(requests, width, depth=2, blocks=24, rows=6)
    assert life.counters["evictions"] > 0


@pytest.mark.parametrize("at", [0, 3, 9])
def test_a_stop_id_within_a_block_cuts_the_rest(at: int) -> None:
    requests = ending(at, people(6))
    life = speculating(requests, 8, depth=2)
    for one in requests:
        assert (len(life.answers[one.request_id][0]), life.answers[one.request_id][1]) == (at + 1, FinishReason.STOP)


def test_penalties_and_min_tokens_and_a_window_past_the_context() -> None:
    requests = repeating(4, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=9, max_tokens=100)
    life = speculating(requests, 16, depth=2, serial={"max_model_len": 64}, max_model_len=64)
    assert {len(tokens) for tokens, _ in life.answers.values()} == {64 - 9}


def test_prefix_hits_and_chunked_prompts_are_in_the_history() -> None:
    """The tokens that a hit restores are never computed, yet the lookup finds what follows them."""
    shared = prompt(40)
    later = {9: [request(10 + i, (*shared, 3 + i), max_tokens=20, stops=()) for i in range(3)]}
    requests = [request(1, shared, max_tokens=60, stops=()), request(2, prompt(90, 7), max_tokens=30, stops=())]
    every = [*requests, *later[9]]
    life = speculating(requests, 5, depth=2, every=every, later=later, max_prefill_tokens=32)
    assert life.counters["prefix_hit_tokens"] > 0
    assert life.counters["mixed_steps"] > 0


@pytest.mark.parametrize("ranks", [2, long(4)])
def test_answers_of_several_ranks_are_those_of_one(ranks: int) -> None:
    shape, requests = FOUR_HEADS, repeating(4)

    def over(**limits: Any) -> Any:
        return tensor_rig(ranks, **limits)

    how: dict[str, Any] = {"proposer": ngram(5), "speculation": Speculation(5), "shape": shape}
    alone = live(requests, depth=0, shape=shape, **ROOM)
    one = live(requests, depth=2, **ROOM, **how)
    several = live(requests, depth=2, over=over, **ROOM, **how)
    same(one, alone)
    same(several, alone)
    assert several.rounds == one.rounds


# ---- what a round gains ----


class StaleToken(NgramProposer):
    """A mutant: the latest token is missing from what it looks for."""

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        older = SlotColumns(columns.records.clone(), columns.stop_ids_NK.shape[1])
        older.length.sub_(1).clamp_(min=1)
        return super().propose(rows_B, older, count)


class StaleProposals(NgramProposer):
    """A mutant: every round gets the proposals of the one before it."""

    def __init__(self, parts: ProposerParts) -> None:
        super().__init__(parts, 1, 2)
        self._before_SQ = parts.device.zeros(parts.tables.slots, parts.limits.width - 1, dtype=torch.int64)

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        stale_BQ = self._before_SQ[rows_B]
        self._before_SQ.index_copy_(0, rows_B, super().propose(rows_B, columns, count).tokens_BQ)
        return Proposed(stale_BQ)


class LateLanding(NgramProposer):
    """A mutant: what a round gained is entered into the history a round late."""

    def __init__(self, parts: ProposerParts) -> None:
        super().__init__(parts, 1, 2)
        self._live_SL = self._history_SL
        self._history_SL = self._live_SL.clone()

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        proposed = super().propose(rows_B, columns, count)
        self._history_SL.copy_(self._live_SL)
        return proposed


def whole_lives(make: MakeProposer, depth: int, **limits: Any) -> Life:
    """Everybody is admitted in the first step, so that no round of anybody depends on when a step landed."""
    few = tuple(range(5, 13))
    never_twice = tuple((token, token) for token in few)
    requests = repeating(6, temperature=0.2, allowed_token_ids=few, bad_words_token_ids=never_twice)
    return speculating(requests, 6, proposer=make, depth=depth, **limits)


def test_every_round_gains_the_same_at_any_depth_and_on_any_ranks() -> None:
    serial = whole_lives(ngram(6), 0)
    assert max(map(max, serial.rounds.values())) == 6
    assert min(map(min, serial.rounds.values())) == 1
    for depth in (1, 2, 4):
        assert whole_lives(ngram(6), depth).rounds == serial.rounds
    for ranks in (1, 2):
        over = lambda **limits: tensor_rig(ranks, **limits)  # noqa: B023, E731
        assert whole_lives(ngram(6), 2, over=over).rounds == serial.rounds


@pytest.mark.long  # with weights: test_drafted.py
def test_every_round_gains_the_same_in_float32_at_any_depth_and_on_one_two_and_four_ranks() -> None:
    """As reference kernels compute it."""
    requests = repeating(4, temperature=0.2, max_tokens=24)
    how: dict[str, Any] = {
        "kernels": reference_kernels(),
        "dtype": torch.float32,
        "shape": FOUR_HEADS,
        "rows": 4,
        **ROOM,
    }
    drafting: dict[str, Any] = {"proposer": ngram(4), "speculation": Speculation(4), **how}
    plain = live(requests, depth=0, **how)
    serial = live(requests, depth=0, **drafting)
    assert serial.answers == plain.answers
    assert {gain for gains in serial.rounds.values() for gain in gains} == {1, 2, 3, 4}
    for depth, ranks in ((2, 1), (0, 2), (2, 2), (0, 4), (2, 4)):
        life = live(requests, depth=depth, over=partial(tensor_rig, ranks), **drafting)
        assert (life.answers, life.rounds) == (serial.answers, serial.rounds)


@pytest.mark.parametrize("mutant", [lambda parts: StaleToken(parts, 1, 2), StaleProposals, LateLanding])
def test_what_is_proposed_too_late_shows_in_the_rounds_alone(mutant: MakeProposer) -> None:
    """The text stays right, which ``speculating`` compares; only what rounds gain tells."""
    right = whole_lives(ngram(6), 2)
    wrong = whole_lives(mutant, 2)
    assert wrong.rounds != right.rounds
    assert wrong.counters["spec_num_accepted_tokens"] < 0.9 * right.counters["spec_num_accepted_tokens"]


class HistoryReader(NgramProposer):
    """Writes down the histories that it proposes from."""

    def __init__(self, parts: ProposerParts) -> None:
        super().__init__(parts, 1, 2)
        self.read: set[tuple[int, ...]] = set()

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        lives = zip(rows_B.tolist(), columns.length.tolist(), columns.finished.tolist(), strict=True)
        self.read |= {tuple(self._history_SL[slot, :length].tolist()) for slot, length, over in lives if not over}
        return super().propose(rows_B, columns, count)


def test_a_history_is_prompt_and_answer_so_far() -> None:
    """After prefills, plain steps and windows, mixed steps, prefix hits, forks and evictions."""
    made: list[HistoryReader] = []

    def make(parts: ProposerParts) -> Proposer:
        made.append(HistoryReader(parts))
        return made[-1]

    requests = [replace(r, sampling=replace(r.sampling, max_tokens=50)) for r in repeating(6)]
    requests[0] = replace(requests[0], request_id=90, sampling=replace(requests[0].sampling, n=3))
    later = {4: [request(50 + i, (*requests[1].prompt_token_ids, 9), max_tokens=20, stops=()) for i in range(2)]}
    limits: dict[str, Any] = {"blocks": 24, "rows": 6, "policy": {"most_rows": 5}, "later": later}
    life = speculating(requests, 4, proposer=make, depth=2, every=[*requests, *later[4]], **limits)
    assert min(life.counters[name] for name in ("evictions", "forks", "mixed_steps", "prefix_hit_tokens")) > 0
    prompts = {answer.request_id: one.prompt_token_ids for one in [*requests, *later[4]] for answer in one.answers()}
    whole = [(*prompts[i], *tokens) for i, (tokens, _) in life.answers.items()]
    assert len(made[-1].read) > 60
    assert all(any(text[: len(read)] == read for text in whole) for read in made[-1].read)


# ---- what a proposer is shown ----


class Witness:
    """Proposes nothing of worth, and writes down what it is shown: by slot, which token follows which at a position."""

    name = "witness"
    reads_hidden = True

    def __init__(self, parts: ProposerParts) -> None:
        last = len(parts.model.layers) - 1
        self.layers = tuple(sorted({0, last // 2, last}))
        self._tables = parts.tables
        self._norm = parts.model.final_norm
        self.seen: list[tuple[Tensor, ...]] = []

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        return Proposed(columns.last_token[:, None].expand(-1, count) * 3 % VOCABULARY)

    def observe(self, observed: Observed) -> None:
        inputs = observed.inputs
        assert observed.hidden_TN is not None
        assert observed.features_TF is not None
        last_TN = observed.features_TF[:, -observed.hidden_TN.shape[1] :]
        normed_TN = self._norm.add(last_TN.clone(), None)[0]
        epochs_T = self._tables.columns.epoch[observed.slots_T]
        about = torch.stack(
            [observed.slots_T, epochs_T, inputs.positions_T, inputs.token_ids_T, observed.next_ids_T], 1
        )
        kept = observed.kept_T
        same_hidden = (normed_TN[kept] - observed.hidden_TN[kept]).abs().max() if kept.any() else torch.zeros(())
        self.seen.append((about[kept].clone(), same_hidden))


@pytest.mark.parametrize(
    ("depth", "limits"),
    [
        (0, {}),
        (2, {"max_prefill_tokens": 16}),
        (3, {"mixed": None}),
        (2, {"prefill_buckets": (16, 40, 68), "shape": {"num_hidden_layers": 5}}),
    ],
)
def test_every_token_is_shown_once_with_the_token_that_follows_it(depth: int, limits: dict[str, Any]) -> None:
    made: list[Witness] = []

    def make(parts: ProposerParts) -> Proposer:
        made.append(Witness(parts))
        return made[-1]

    requests = [request(i, prompt(11 + 9 * i, i), max_tokens=12, stops=()) for i in range(4)]
    later = {3: [request(9, prompt(30, 9), max_tokens=9, stops=())]}
    every = [*requests, *later[3]]
    model = {"shape": limits["shape"]} if "shape" in limits else {}
    rule = Speculation(4, mixed_percent=100 if depth else 0)
    how: dict[str, Any] = {"proposer": make, "speculation": rule, "prefix_caching": False, "rows": 4}
    life = live(requests, depth=depth, later=later, **ROOM, **how, **limits)
    same(life, live(every, depth=0, **ROOM, **model))
    shown = torch.cat([about for about, _ in made[-1].seen])
    assert all(float(apart) < 1e-4 for _, apart in made[-1].seen), "the last stream, normed, is hidden"
    pairs = {}
    for slot, epoch, position, token, follows in shown.tolist():
        assert (slot, epoch, position) not in pairs, "once"
        pairs[slot, epoch, position] = token, follows
    stays = {(slot, epoch) for slot, epoch, _ in pairs}
    found = set()
    for stay in stays:
        chain = [pairs[(*stay, position)] for position in range(sum(key[:2] == stay for key in pairs))]
        assert all(a[1] == b[0] for a, b in pairwise(chain))
        found.add((*(token for token, _ in chain), chain[-1][1]))
    assert found == {(*one.prompt_token_ids, *life.answers[one.request_id][0]) for one in every}


# ---- when a step is a window ----


def test_a_batch_that_is_too_large_decodes_token_by_token_and_the_chain_goes_on() -> None:
    """Rows leave one after the other; both kinds of steps are in flight together when the last but three goes."""
    requests = [replace(r, sampling=replace(r.sampling, max_tokens=8 + 6 * r.request_id)) for r in repeating(6)]
    life = speculating(requests, 4, depth=3, policy={"most_rows": 3})
    assert {plan.width for plan in life.real_plans if plan.kind is StepKind.DECODE and len(plan.slots) > 3} == {1}
    assert {plan.width for plan in life.real_plans if plan.kind is StepKind.DECODE and len(plan.slots) <= 3} == {4}
    unbroken(life)
    assert life.counters["graph_captures_after_warmup"] <= 4


def test_nothing_is_proposed_where_no_batch_is_small_enough() -> None:
    life = speculating(repeating(2), 4, depth=2, policy={"most_rows": 0})
    assert life.counters["spec_num_drafts"] == 0
    assert life.counters["speculation_off{batch}"] == life.counters["decode_steps"]


def test_costs_are_measured_over_rows_that_run_and_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = repeating(3)
    how: dict[str, Any] = {"proposer": ngram(4), "speculation": Speculation(4), "rows": 4, "buckets": (1, 2, 3, 4)}
    looked_at: list[tuple[int, list[int]]] = []
    replay_ms = Executor.replay_ms

    def looking(executor: Executor, spec: LaunchSpec, replays: int) -> float:
        took = replay_ms(executor, spec, replays)
        ended = executor.staging._tables.columns.finished[list(spec.plan.slots)]
        looked_at.append((spec.plan.width, ended.tolist()))
        return took

    monkeypatch.setattr(Executor, "replay_ms", looking)
    with rig(depth=2, **how) as engine:
        schedule = replace(engine.scheduler.config, speculation=None)
        ngrams = {"method": "ngram", "num_speculative_tokens": 3}
        config = EngineConfig(
            model="m", device="cpu", max_num_seqs=4, decode_buckets=(1, 2, 3, 4), speculative_config=ngrams
        )
        costs = window_times(config, engine.executor, schedule)
        assert list(costs) == [1, 2, 4]
        assert all(window > 0 < plain for window, plain in costs.values())
        assert looked_at == [(width, [0] * rows) for rows in (1, 2, 4) for width in (4, 1)]
        found = run(engine, requests)
    with rig(depth=0, rows=4, buckets=(4,)) as engine:
        assert outcome(run(engine, requests)) == outcome(found)
    assert cost_table({4: (3.0, 2.0), 2: (1.1, 1.0)}, (1, 2, 3, 4, 6)) == [(2, 1100), (3, 1300), (4, 1500)]


def test_windows_that_do_not_pay_stop_and_are_tried_again() -> None:
    hopeless = people(2, max_tokens=100, temperature=1.0, length=9, logprobs=None)
    life = speculating(hopeless, 4, depth=2, policy={"costs": ((8, 2000),)})
    assert life.counters["speculation_off{gain}"] > 60
    assert 2 <= life.counters["spec_num_drafts"] < 30
    widths = [plan.width for plan in life.real_plans if plan.kind is StepKind.DECODE]
    assert {(4, 1), (1, 4)} <= set(pairwise(widths)), "it goes off, and on again"
    unbroken(life)


NARROWER: dict[str, Any] = {  # 8 tokens pay for one row, 4 for two or three, 2 for more
    "costs": ((1, 1000), (2, 4000), (8, 7900)),
    "narrower": ((4, ((1, 900), (3, 1000), (8, 3900))), (2, ((3, 1000), (8, 1000)))),
}


@pytest.mark.parametrize("depth", [long(0), long(2), 3])
def test_steps_have_the_width_that_pays_and_answers_stay(depth: int) -> None:
    """Rows leave one after the other, so windows grow; all kinds are in flight together."""
    requests = [replace(r, sampling=replace(r.sampling, max_tokens=20 + 25 * r.request_id)) for r in repeating(5)]
    life = speculating(requests, 8, depth=depth, policy=NARROWER, mixed=None)
    widths = {plan.width for plan in life.real_plans if plan.kind is StepKind.DECODE}
    assert {2, 4, 8} <= widths <= {1, 2, 4, 8}
    counters = life.counters
    assert counters["speculation_narrowed{1}"] > 0 < counters["speculation_narrowed{3}"]
    assert counters["spec_num_draft_tokens"] < 7 * counters["spec_num_drafts"]
    finished = life.finished.values()
    assert sum(one.rounds for one in finished) == counters["spec_num_drafts"]
    assert sum(one.accepted for one in finished) == counters["spec_num_accepted_tokens"]
    if depth:
        unbroken(life)


@pytest.mark.parametrize("seed", [5100, *map(long, (5101, 5103))])
def test_narrower_windows_live_beside_everything_else(seed: int) -> None:
    """Arrivals, pauses, cancels, evictions, prefix hits, forks, scored and chunked prompts, and chunks beside which
    windows of all widths are."""
    life = random_life(seed).with_windows(2, 60)
    policy = NARROWER | {"mixed_percent": 60}
    more: dict[str, Any] = {"but": life.cut, "every": life.requests, "later": life.later, "act": life.act}
    ran = speculating(life.first, 8, depth=2, policy=policy, **more, **life.limits)
    assert ran.counters["spec_num_drafts"] > 0
    assert any(name.startswith("speculation_narrowed") for name in ran.counters)
    assert any(plan.kind is StepKind.MIXED and 1 < plan.width < 8 for plan in ran.real_plans)


def test_ranks_agree_on_the_width() -> None:
    requests = [replace(r, sampling=replace(r.sampling, max_tokens=15 + 12 * r.request_id)) for r in repeating(4)]
    later = {6: [request(9, prompt(60, 9), max_tokens=9, stops=())]}

    def over(**limits: Any) -> Any:
        return tensor_rig(2, **limits)

    rule = Speculation(8, mixed_percent=60, **NARROWER)
    how: dict[str, Any] = {"proposer": ngram(8), "speculation": rule, "shape": FOUR_HEADS, "max_prefill_tokens": 12}
    one = live(requests, depth=2, later=later, **ROOM, **how)
    two = live(requests, depth=2, later=later, over=over, **ROOM, **how)
    same(one, live([*requests, *later[6]], depth=0, shape=FOUR_HEADS, **ROOM))
    same(two, one)
    assert two.rounds == one.rounds
    for k in (1, 3):
        name = f"speculation_narrowed{{{k}}}"
        assert two.counters[name] == one.counters[name] > 0
    assert any(plan.kind is StepKind.MIXED and 1 < plan.width < 8 for plan in two.real_plans)

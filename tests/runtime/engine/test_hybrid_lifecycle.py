"""The lifecycle of requests over hybrid targets with speculation: family by proposer by depth, greedy and filtered.

Answers, log-probabilities and ends are those of the serial engine without speculation, in every bit of float64; so is
the state that a slot holds when it becomes free, up to rounding. A slot becomes free when the last round that may touch
it has landed: not a turn earlier, and not a turn later. What belongs to nobody is NaN throughout. What proposers guess
is compared with oracles elsewhere (tests/runtime/speculate).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from models.inputs import StateRows
from runtime.engine import Engine
from runtime.execute.cache.pool import CachePool
from runtime.schedule.request import Request
from runtime.schedule.slots import SlotPool
from tests.runtime.engine.exact_kernels import ExactKernels
from tests.runtime.engine.hybrid_grid import GATED_DELTA, MAMBA_2, MODES, PROPOSERS, WHOLE, lives
from tests.runtime.engine.hybrid_lives import Scenario, Target, Written, play, scenarios
from tests.runtime.engine.lives import same
from tests.runtime.engine.rig import run

HYBRIDS = (GATED_DELTA[0], *MAMBA_2)  # one of each recurrence


class Oracle:
    """The serial engine over a target, which stays open; what it says is remembered."""

    def __init__(self, target: Target, engine: Engine) -> None:
        self.target, self._engine = target, engine
        self._said: dict[tuple[Request, ...], Written] = {}
        self.scenarios = {mode: scenarios(mode, self.alone) for mode in MODES}

    def alone(self, requests: list[Request]) -> Written:
        key = tuple(requests)
        if key not in self._said:
            self._said[key] = play(self._engine, Scenario(requests))
        return self._said[key]

    def engine(self, proposer: str, depth: int, **limits: Any) -> Any:
        if proposer == "replay":
            limits["script"] = self.script()
        return self.target.engine(proposer, depth, **limits)

    def script(self) -> dict[int, tuple[int, ...]]:
        """By seed, prompt and the longest answer that anybody gets."""
        found: dict[int, tuple[int, ...]] = {}
        for scenario in (each for mode in self.scenarios.values() for each in mode.values()):
            answers = self.alone(scenario.everybody).answers
            for one in scenario.everybody:
                whole = (*one.prompt_token_ids, *answers[one.request_id][0])
                assert one.sampling.seed is not None
                found[one.sampling.seed] = max(found.get(one.sampling.seed, ()), whole, key=len)
        return found

    def check(self, life: Written, scenario: Scenario) -> None:
        alone = self.alone(scenario.everybody)
        same(life, alone, but=scenario.cut)
        for request_id, banks in life.states.items():
            if request_id not in scenario.cut:
                expected = alone.states[request_id]
                targets = banks[: len(expected)]  # then the proposer's own
                for bank, serial in zip(targets, expected, strict=True):
                    torch.testing.assert_close(bank, serial, atol=1e-9, rtol=1e-9)


@pytest.fixture(scope="module", params=HYBRIDS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    target = Target.of(request.param, tmp_path_factory.mktemp(request.param))
    with target.engine() as engine:
        yield Oracle(target, engine)


@pytest.mark.parametrize(("oracle", "proposer", "mode", "depth", "happens"), lives(), indirect=["oracle"])
def test_every_life_is_that_of_the_serial_engine(
    oracle: Oracle, proposer: str, mode: str, depth: int, happens: tuple[str, ...]
) -> None:
    """One scenario after the other in one engine."""
    with oracle.engine(proposer, depth) as engine:
        for name in happens:
            scenario = oracle.scenarios[mode][name]
            life = play(engine, scenario)
            oracle.check(life, scenario)
            if name == "all ending":
                assert len({life.last_turns[i] for i in range(4)}) == 1
            assert life.counters["evictions"] > 0 or name != "evict"
            assert life.counters["pauses"] > 0 or name not in ("pause", "several in one step")
        counters = engine.counters
        assert counters["spec_num_accepted_tokens"] > 0
        assert counters["ghost_rows"] > 0 or depth == 0


def test_what_is_not_long_has_every_pair_of_family_and_proposer() -> None:
    """Once; every family with all modes and depths, every proposer with both modes and three depths; all that happens
    with each recurrence and proposer, and in each family."""
    chosen = [one.values for one in lives() if not one.marks]
    pairs = {values[:2] for values in chosen}
    assert pairs == {*product((*GATED_DELTA, *MAMBA_2), PROPOSERS)}
    assert len(chosen) == len(pairs)
    for axis, depths in ((0, 5), (1, 3)):
        for name in {values[axis] for values in chosen}:
            its = [values for values in chosen if values[axis] == name]
            assert {values[2] for values in its} == {*MODES}, name
            assert len({values[3] for values in its}) >= depths, name
    for families in (GATED_DELTA, MAMBA_2):
        for proposer in PROPOSERS:
            assert Counter(
                x for one in chosen if one[0] in families and one[1] == proposer for x in one[4]
            ) == dict.fromkeys(WHOLE, 1)
        for family in families:
            assert {x for one in chosen if one[0] == family for x in one[4]} == {*WHOLE}


def test_the_whole_grid_has_everything_once(oracle: Oracle) -> None:
    cases = Counter((*one.values[:4], name) for one in lives() for name in one.values[4])
    assert len(cases) == 4 * len(PROPOSERS) * len(MODES) * 5 * len(WHOLE)
    assert {*cases.values()} == {1}
    assert {*oracle.scenarios["greedy"]} == {*WHOLE}


# ---- slots ----


@pytest.mark.parametrize("oracle", HYBRIDS[1:], indirect=True)
@pytest.mark.parametrize("late", [0, 1])
def test_slots_that_are_released_in_another_round_show(
    oracle: Oracle, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a request, whatever is in flight of it; or a round after all of that has landed."""
    fenced = SlotPool.retire_after

    def retire(pool: SlotPool, step: int, slot: int) -> None:
        if late:
            fenced(pool, step + 1, slot)
        else:
            pool.give_back(slot)

    monkeypatch.setattr(SlotPool, "retire_after", retire)
    with oracle.engine("ngram", 2) as engine:
        with pytest.raises(AssertionError, match="a slot is kept" if late else "a slot is free"):
            play(engine, oracle.scenarios["greedy"]["stop id"])
        monkeypatch.undo()
        run(engine, ())


# ---- mutants of the state ----


class OfRounds(ExactKernels):
    """Both recurrences; ``advance`` is called in their place."""

    def advance(self, recurrence: Callable[..., Tensor], before: list[Any], rows: StateRows, positions: Tensor) -> Any:
        return recurrence(*before, rows, positions)

    def conv_gated_delta(self, *arguments: Any) -> Tensor:
        *before, rows, positions_T = arguments
        found: Tensor = self.advance(super().conv_gated_delta, before, rows, positions_T)
        return found

    def mamba2(self, *arguments: Any) -> Tensor:
        *before, rows, positions_T = arguments
        found: Tensor = self.advance(super().mamba2, before, rows, positions_T)
        return found


class TakesInAll(OfRounds):
    """Refused guesses as well."""

    def advance(self, recurrence: Callable[..., Tensor], before: list[Any], rows: StateRows, positions: Tensor) -> Any:
        if rows.kept_B is not None:
            rows = replace(rows, kept_B=torch.full_like(rows.kept_B, len(positions) // len(rows.slots_B)))
        return recurrence(*before, rows, positions)


class TakesInAtOnce(OfRounds):
    """While the window is verified, and once more when it is decided."""

    def advance(self, recurrence: Callable[..., Tensor], before: list[Any], rows: StateRows, positions: Tensor) -> Any:
        return recurrence(*before, replace(rows, frozen=False), positions)


class TakesInLate(OfRounds):
    """A round's tokens when the next round is decided."""

    def __init__(self) -> None:
        self._due: dict[int, Callable[[], Tensor]] = {}

    def advance(self, recurrence: Callable[..., Tensor], before: list[Any], rows: StateRows, positions: Tensor) -> Any:
        if rows.kept_B is None:
            return recurrence(*before, rows, positions)
        own = replace(rows, slots_B=rows.slots_B.clone(), kept_B=rows.kept_B.clone())
        layer = before[2].data_ptr()
        due = self._due.get(layer)
        self._due[layer] = partial(recurrence, *before, own, positions.clone())
        return None if due is None else due()


@pytest.mark.parametrize("oracle", HYBRIDS, indirect=True)
@pytest.mark.parametrize("mutant", [OfRounds, TakesInAll, TakesInAtOnce, TakesInLate])
def test_state_that_takes_in_other_tokens_shows(oracle: Oracle, mutant: type[OfRounds]) -> None:
    """The first is none: what it wraps stays right."""
    scenario = oracle.scenarios["filtered"]["finish"]
    with oracle.engine("replay", 2, kernels=mutant) as engine:
        life = play(engine, scenario)
    with nullcontext() if mutant is OfRounds else pytest.raises(AssertionError):
        oracle.check(life, scenario)


# ---- NaN in what refused guesses left behind ----


class MultipliesByZero(OfRounds):
    """Of each window all tokens count, those that were refused as zero times themselves."""

    def advance(self, recurrence: Callable[..., Tensor], before: list[Any], rows: StateRows, positions: Tensor) -> Any:
        found = super().advance(recurrence, before, rows, positions)
        if rows.kept_B is not None:
            made_BWX, state_SHXX = before[0].unflatten(0, (len(rows.slots_B), -1)), before[-1]
            nothing_B = (made_BWX * 0.0).sum((1, 2))
            state_SHXX.index_add_(0, rows.slots_B, nothing_B.view(-1, 1, 1, 1).expand(-1, *state_SHXX.shape[1:]))
        return found


class RefusedAreNan(OfRounds):
    """What layers made of refused guesses, of ghosts and of padding is NaN by the time the rest is taken in.
    ``poisoned``: rounds in which that was so of a live row."""

    def __init__(self) -> None:
        super().__init__()
        self.poisoned = 0

    def advance(self, recurrence: Callable[..., Tensor], before: list[Any], rows: StateRows, positions: Tensor) -> Any:
        if rows.kept_B is not None:
            refused_BW = torch.arange(len(positions) // len(rows.slots_B)) >= rows.kept_B[:, None]
            self.poisoned += bool(refused_BW[rows.kept_B > 0].any())
            before = [before[0].masked_fill(refused_BW.view(-1, 1), float("nan")), *before[1:]]
        return super().advance(recurrence, before, rows, positions)


class PoisonedProduct(RefusedAreNan, MultipliesByZero):
    """The mutant behind the poison."""


@pytest.mark.parametrize("oracle", HYBRIDS, indirect=True)
@pytest.mark.parametrize(("proposer", "mode"), [("replay", "filtered"), ("mtp", "greedy")])
@pytest.mark.parametrize("kernels", [RefusedAreNan, MultipliesByZero, PoisonedProduct])
def test_refused_guesses_reach_no_state(oracle: Oracle, kernels: type[OfRounds], proposer: str, mode: str) -> None:
    """Of chains, and with ``mtp`` also beside chunks. A mask that multiplies is seen by the poison, and not without."""
    made: list[OfRounds] = []

    def make() -> OfRounds:
        made.append(kernels())
        return made[-1]

    scenario = oracle.scenarios[mode]["evict"]
    with oracle.engine(proposer, 2, kernels=make) as engine:
        life = play(engine, scenario)
        assert proposer == "replay" or engine.counters["mixed_steps"] > 0
    with pytest.raises(AssertionError) if kernels is PoisonedProduct else nullcontext():
        oracle.check(life, scenario)
    if type(made[0]) is RefusedAreNan:
        assert made[0].poisoned > 8


# ---- mutants of slots ----


@pytest.mark.parametrize("oracle", HYBRIDS, indirect=True)
def test_a_slot_that_is_not_cleared_for_whom_it_is_given_next_shows(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CachePool, "reset", lambda pool, slots_N: None)
    scenario = oracle.scenarios["greedy"]["finish"]
    with oracle.engine("ngram", 2) as engine:
        oracle.check(play(engine, scenario, poison=False), scenario)
        with pytest.raises(AssertionError):
            oracle.check(play(engine, scenario, poison=False), scenario)

"""What is tried at start-up of all that may be captured late: every role's largest step, in windows too.

Knows: a twin that says it is no CPU and measures what tensors hold (step/test_rehearsal.py), engines with drafters over
it. Does not know: which kinds of sampling are offered for what was found (test_widest_variant.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils._pytree import tree_leaves

from models.kernels import compile_ahead as compiling
from runtime.engine import Engine
from runtime.execute import executor as executors
from runtime.execute.device.cpu_twin import TwinDevice
from runtime.execute.device.protocol import MemoryInfo
from runtime.execute.executor import Executor
from runtime.execute.launch_spec import GREEDY
from runtime.execute.sampling.inputs import EVERY_FEATURE, NARROWER_FEATURES, SamplingVariant
from runtime.execute.sampling.sampler import Draw, Verdict
from runtime.execute.slot_state import SlotColumns, SlotTables
from runtime.execute.step.gather import Rows
from runtime.execute.step.memory import Trial
from runtime.schedule.plan import PADDING_SLOT
from runtime.schedule.request import FinishReason, Request
from runtime.schedule.speculation import Speculation
from tests.plant import Op, plant
from tests.runtime.engine import rig as rigs
from tests.runtime.engine import tensor_ranks
from tests.runtime.engine.conftest import over_model
from tests.runtime.engine.group_rigs import dealt_rig
from tests.runtime.engine.lives import Life, live, same
from tests.runtime.engine.rig import MIXED, rig, run
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_depths import outcome
from tests.runtime.engine.test_groups import LIMITS
from tests.runtime.engine.test_prefill_graphs import EXACT
from tests.runtime.engine.test_speculation import NARROWER, ngram, repeating, speculating
from tests.runtime.engine.test_trees import some, trees
from tests.runtime.execute.step.test_rehearsal import MeasuredTwin
from tests.runtime.speculate.recorded import SHAPE, VOCABULARY, Drafter
from tests.selection import covering

BUCKETS = (2, 4)
TOKENS = (24, 56, 72)
CHAIN: dict[str, Any] = {  # windows of 8, 4 and 2 tokens, beside captured chunks as well
    "proposer": ngram(8),
    "speculation": Speculation(8, mixed_percent=100, **NARROWER),
    "blocks": 200,
    "rows": BUCKETS[-1],
    "buckets": BUCKETS,
    "prefill_buckets": TOKENS,
    "max_prefill_tokens": 40,
}
LATE: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.2, "logprobs": 3}


class SmallTwin(MeasuredTwin):
    """Of whose memory ``left`` bytes are free once the engine has its own, if that is a number."""

    def __init__(self, left: int | None = None) -> None:
        super().__init__()
        self.left: int | None = None
        self._then = left

    def tighten(self) -> None:
        self.left = self._then

    def memory_info(self) -> MemoryInfo:
        info = super().memory_info()
        return info if self.left is None else replace(info, free=self.left)


class Trials:
    """Of an engine's start: what each one held, by role and kind of trial, in the order they ran.

    ``compiled``: roles and buckets whose kernels were to be compiled ahead for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: list[tuple[str, int]] = []
        self.variants: set[SamplingVariant] = set()
        self.compiled: list[tuple[str, int]] = []
        peak_of, widest = Executor._peak_of, Executor._widest_variant
        ahead = Executor._compile_ahead
        searching = False

        def held(executor: Executor, trial: Trial) -> float:
            found = peak_of(executor, trial)
            if isinstance(trial, partial):  # or it makes late tables
                self.held.append((name_of(trial), cast(SmallTwin, executor.device).peaks[-1]))
            return found

        def name_of(trial: Any) -> str:
            owner = trial.func.__self__
            self.variants.add(trial.args[1])
            of_tail = getattr(getattr(owner, "work", None), "__self__", None)
            return str(owner.name) if of_tail is None else f"{of_tail.name} {owner.name}"

        def search(executor: Executor) -> SamplingVariant:
            nonlocal searching
            if isinstance(executor.device, SmallTwin):  # or it is the serial engine's
                executor.device.tighten()
            searching = True
            try:
                return widest(executor)
            finally:
                searching = False

        def noted(executor: Executor, *works: Any) -> None:
            if searching:
                self.compiled += [(name_of(work), work.args[0]) for work in works]
            ahead(executor, *works)

        monkeypatch.setattr(Executor, "_peak_of", held)
        monkeypatch.setattr(Executor, "_widest_variant", search)
        monkeypatch.setattr(Executor, "_compile_ahead", noted)

    def most(self, name: str) -> int:
        return max(held for role, held in self.held if role == name)


ROLES = ["window of 8", "window of 4", "window of 2", "decode"]
TAILS = ["mixed window of 8 tail", "mixed window of 4 tail", "mixed window of 2 tail", "prefill tail"]


def test_every_role_is_tried_with_its_largest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(monkeypatch)
    with rig(device=SmallTwin(), **CHAIN) as engine:
        assert engine.model_config.widest == EVERY_FEATURE
    names = [name for name, _ in trials.held]
    assert sorted(set(names) - {"proposal"}) == sorted(ROLES + TAILS)
    assert names.count("proposal") == 3 * len(BUCKETS), "of each width"
    assert trials.variants == {EVERY_FEATURE, replace(GREEDY, grammars=True)}, "n-grams are not drawn, but forced"
    for first, others in (("window of 8", ROLES[1:]), ("mixed window of 8 tail", TAILS[1:])):
        for name in others:
            assert trials.most(name) < 0.6 * trials.most(first), "which grows with the tokens of a row"
    assert sorted(trials.compiled * len(BUCKETS)) == sorted((name, BUCKETS[0]) for name in names)


@pytest.mark.slow
def test_a_window_without_room_is_not_offered_where_decode_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a byte is missing for the widest window, and where there is room for decode alone."""
    trials = Trials(monkeypatch)
    with rig(device=SmallTwin(), **CHAIN) as engine:
        assert engine.model_config.widest == EVERY_FEATURE
        step = engine.executor.sizing.activation_peak
    most, decode = (peak + max(peak, step) for peak in (trials.most("window of 8"), trials.most("decode")))
    for left, everything in ((most, True), (most - 1, False), (decode, False)):
        with rig(device=SmallTwin(left), **CHAIN) as engine:
            assert (engine.model_config.widest == EVERY_FEATURE) == everything
            refused = engine.model_config.lacks_memory_for(repeating(1, **LATE)[0].sampling)
            assert (refused is None) == everything
            if refused is not None:
                assert "memory for" in refused
                assert "--memory-fraction" in refused
            if left == most - 1:
                assert engine.model_config.widest == NARROWER_FEATURES[0], "without penalties it fits"


@pytest.mark.parametrize(
    "kind",
    [
        "mixed window of 8 tail",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("proposal", "window of 2", "prefill tail")),
    ],
)
def test_each_kind_decides_by_itself(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(monkeypatch)
    peak_of = Executor._peak_of

    def held(executor: Executor, trial: Trial) -> float:
        found = peak_of(executor, trial)
        return math.inf if trials.held[-1:] and trials.held[-1][0] == kind else found

    monkeypatch.setattr(Executor, "_peak_of", held)
    with rig(device=SmallTwin(), **CHAIN) as engine:
        assert engine.model_config.widest == GREEDY


@pytest.mark.parametrize(
    ("exchanges", "widens", "widest"), [((), True, 0), ((16, 64), True, 64), ((16, 64), False, 32), ((8,), True, 32)]
)
def test_a_trial_among_groups_has_the_widest_exchange_that_is_captured(
    exchanges: tuple[int, ...], widens: bool, widest: int
) -> None:
    with rig() as engine:
        step = engine.executor.decode
        config = step._parts.config
        config = replace(config, exchanges=exchanges, limits=replace(config.limits, width=4))
        step._parts, step.widens = replace(step._parts, config=config), widens
        (trial,) = step.trials(8, EVERY_FEATURE)
    assert cast(Any, trial).args == (8, EVERY_FEATURE, widest)


def left_behind(executor: Executor) -> dict[str, Any]:
    """All that a trial could leave, but for what padding writes into slot 0 and the trash block, which nobody reads."""
    tables, ring, columns = executor.tables, executor._ring, executor.tables.columns
    state = {
        feature.name: feature.tables and tuple(table[1:].clone() for table in tree_leaves(feature.tables))
        for feature in tables.features
    }
    return {
        "records": columns.records.clone(),
        "blocks": tables.block_table_SP.clone(),
        **state,
        "history": None if tables.history_SL is None else tables.history_SL[1:].clone(),
        "appended": ring.appended_1.item(),
        "latest": ring.latest,
        "stamps": ring.buffer_EX[:, 0].clone(),
        "staging": replace(executor.staging.counters),
        "results": asdict(executor.results.counters),
        "fallbacks": dict(executor.fallbacks.counts),
        "captures": executor.device.captures,
        "graphs": [(asdict(graphs.counters), dict(graphs.late), set(graphs)) for graphs in executor._row_graphs],
    }


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple) and one and isinstance(one[0], torch.Tensor):
        return all(map(torch.equal, one, other))
    return bool(one == other)


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Inside, each search at start-up adds what it left behind to the list. Some must come."""
    left: list[str] = []
    searches = 0
    widest = Executor._widest_variant

    def search(executor: Executor) -> SamplingVariant:
        nonlocal searches
        searches += 1
        before = left_behind(executor)
        found = widest(executor)
        after = left_behind(executor)
        left.extend(name for name in before if not alike(before[name], after[name]))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Executor, "_widest_variant", search)
        yield left
    assert searches


@pytest.mark.parametrize(
    ("model", "too_small", "late_tables"), covering(("attention", "qwen3.5"), (False, True), (False, True), at_once=1)
)
def test_trials_leave_nothing(model: str, late_tables: bool, too_small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    over_model(model, monkeypatch)
    if late_tables:
        monkeypatch.setattr(executors, "LATE_TABLES_SHARE", 0.0)
    trials = Trials(monkeypatch)
    with watched(monkeypatch) as left, rig(device=SmallTwin(0 if too_small else None), **CHAIN) as engine:
        assert (engine.model_config.widest == GREEDY) == too_small
        assert any(feature.tables is None for feature in engine.executor.tables.features) == late_tables
    assert trials.held
    assert left == []


def not_gathered(_: Op, tables: SlotTables, rows_B: torch.Tensor, block_size: int) -> Rows:
    """As compile_ahead has it on a GPU: the kernel is not launched, and what it would fill is zero."""
    longs, ints = torch.zeros_like(rows_B), torch.zeros_like(rows_B, dtype=torch.int32)
    no = torch.zeros_like(rows_B, dtype=torch.bool)
    columns = SlotColumns(torch.zeros(len(rows_B), tables.record_words, dtype=torch.int32), tables.stop_ids)
    pages = torch.zeros(len(rows_B), tables.max_blocks, dtype=torch.int32)
    zeros = longs[:, None]
    return Rows(rows_B, columns, columns.sampling_at(longs, no), pages, ints, zeros, zeros, zeros, no[:, None])


def test_rehearsals_without_kernels_leave_no_padding_that_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch writes their steps back where log-probabilities are reported, of records that nobody had read."""
    device, reset = SmallTwin(), SlotTables.reset_padding
    live: list[bool] = []
    records: list[torch.Tensor] = []

    def undrawn(draw: Op, *given: Any) -> tuple[Any, ...]:
        drawn, verdict, logprobs = draw(*given)
        return Draw(*map(torch.zeros_like, drawn)), Verdict(*map(torch.zeros_like, verdict)), logprobs

    def launching_nothing(works: Iterator[Callable[[], None]], **how: Any) -> int:
        with monkeypatch.context() as patched:
            plant(patched, not_gathered, part="decode.gather")
            plant(patched, undrawn, part="tail.draw")
            for work in works:
                work()
            device.compute.synchronize()
        return 0

    def noted(tables: SlotTables) -> None:
        live.append(int(tables.columns.finished[PADDING_SLOT]) == FinishReason.NONE)
        tables.columns.records[PADDING_SLOT].fill_(7)
        reset(tables)
        records.append(tables.columns.records[PADDING_SLOT].clone())

    monkeypatch.setattr(compiling, "compile_ahead", launching_nothing)
    monkeypatch.setattr(SlotTables, "reset_padding", noted)
    with watched(monkeypatch) as left, rig(device=device, **CHAIN) as engine:
        tables = engine.executor.tables
        records.append(tables.columns.records[PADDING_SLOT].clone())
    new = SlotTables(TwinDevice(), max_requests=1, max_blocks=1, vocab_size=8, stop_ids=tables.stop_ids)
    assert left == []
    assert any(live), "or there was nothing to put right"
    assert all(torch.equal(record, new.columns.records[PADDING_SLOT]) for record in records)


def late(life: Life) -> float:
    return life.counters["graph_captures_after_warmup"]


def later(requests: list[Request]) -> dict[int, list[Request]]:
    """The same again while others run, under other names."""
    return {9: [replace(one, request_id=one.request_id + 50) for one in requests]}


@pytest.mark.parametrize("late_tables", [pytest.param(False, marks=pytest.mark.long), True])
def test_windows_of_guessed_ngrams_give_the_same_tokens(late_tables: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if late_tables:
        monkeypatch.setattr(executors, "LATE_TABLES_SHARE", 0.0)
    requests = repeating(4, **LATE)
    arriving = later(requests)
    limits = {name: value for name, value in CHAIN.items() if name not in ("proposer", "speculation")}
    with watched(monkeypatch) as left:
        life = speculating(
            requests,
            8,
            every=[*requests, *arriving[9]],
            later=arriving,
            depth=2,
            policy=NARROWER,
            device=SmallTwin(),
            **limits,
        )
    assert left == []
    assert late(life) > 0
    assert life.counters["spec_num_accepted_tokens"] > 0


def test_trees_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(monkeypatch)
    with watched(monkeypatch) as left:
        life = trees(some(4, **LATE), (4, 12), depth=2, device=SmallTwin(), rows=4, buckets=BUCKETS)
    assert left == []
    assert late(life) > 0
    assert trials.most("tree of 12") > 3 * trials.most("decode")


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 0.9])
def test_windows_of_an_mtp_layer_give_the_same_tokens(
    temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = Trials(monkeypatch)
    requests = some(4, **LATE)
    requests = [
        replace(
            one,
            sampling=replace(one.sampling, temperature=temperature),
            prompt_token_ids=tuple(token % VOCABULARY for token in one.prompt_token_ids),
        )
        for one in requests
    ]
    how: dict[str, Any] = {
        **CHAIN,
        "proposer": Drafter("mtp", tmp_path),
        "speculation": Speculation(4, mixed_percent=100),
        "shape": SHAPE,
    }
    with watched(monkeypatch) as left:
        life = live(requests, depth=2, device=SmallTwin(), **how)
    same(life, live(requests, depth=0, shape=SHAPE))
    assert left == []
    assert late(life) > 0
    assert trials.most("mixed window of 4 tail") > 2 * trials.most("prefill tail")


@pytest.mark.parametrize("of", [pytest.param("ranks", marks=pytest.mark.long), "groups"])
def test_two_try_together(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sum, or exchange, of a trial waits for the other's, when kernels are compiled ahead of it, too."""
    requests = repeating(4, **LATE)
    together: dict[str, Callable[..., AbstractContextManager[Engine]]] = {
        "ranks": partial(tensor_rig, 2, **{**EXACT, "mixed": MIXED}),
        "groups": partial(dealt_rig, shape=LIMITS["shape"]),
    }

    def answers(**limits: Any) -> dict[int, Any]:
        with together[of](**limits) as engine:
            return outcome(run(engine, requests))

    def running(works: Iterator[Callable[[], None]], **how: Any) -> int:
        return sum(work() is None for work in works)

    expected = answers(depth=0, rows=BUCKETS[-1])
    for module in (rigs, tensor_ranks):
        monkeypatch.setattr(module, "TwinDevice", lambda **how: SmallTwin())
    monkeypatch.setattr(compiling, "compile_ahead", running)
    trials = Trials(monkeypatch)
    one_width = {"proposer": ngram(4), "speculation": Speculation(4, mixed_percent=100), "prefill_buckets": (24, 56)}
    assert answers(depth=2, **(CHAIN | one_width)) == expected
    tried = Counter(name for name, _ in trials.held)
    assert tried.keys() == {"window of 4", "decode", "mixed window of 4 tail", "prefill tail", "proposal"}
    assert all(times % 2 == 0 for times in tried.values()), "by both"

"""Draft windows and trees in steps with chunks of prompts: the tokens of single steps, in three launches a step.

Lives with such steps, of one width and over every model: test_lives.py. Random lives and drafters: test_speculation.py,
test_drafted.py. The rule: tests/runtime/schedule.

Knows: other widths, several widths, several ranks, and mutants of the step (runtime/execute/step/drafts.py).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.inputs import StateRows, Undecided
from models.row_buckets import token_ladder
from runtime.build import _schedule, _windows_beside
from runtime.config import EngineConfig
from runtime.execute import executor
from runtime.execute.device.cpu_twin import TwinGraph
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.step.gather import Packed
from runtime.schedule.chain import Flight
from runtime.schedule.config import MixedSteps
from runtime.schedule.plan import StepKind, StepOutput, StepPlan, StepResult
from runtime.schedule.request import Request
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculative_config import speculative_config
from tests.models.tiny_delta import FAMILIES
from tests.plant import Op, plant, width_of
from tests.runtime.engine.conftest import long, over_model
from tests.runtime.engine.lives import Life, live, prompt, unbroken
from tests.runtime.engine.mixed_corners import Corners, paths_in_turn
from tests.runtime.engine.rig import request, rig
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_speculation import NARROWER, repeating, speculating
from tests.runtime.engine.test_trees import trees

BUCKETS = (16, 24, 40, 56, 72, 96)


def beside(width: int, *, depth: int, sampling: dict[str, Any] | None = None, **limits: Any) -> Life:
    """Answers that repeat themselves, and prompts that come while they are made, in chunks; several answers to one.
    ``sampling``: of all of them."""
    later_sampling: dict[str, Any] = {"max_tokens": 7, "stops": (), **(sampling or {})}
    requests = repeating(3, **({"logprobs": 2} | (sampling or {})))
    later: dict[int, list[Request]] = {
        3 + 3 * i: [request(20 + 5 * i, prompt(45 + i, i), n=1 + i % 2, **later_sampling)] for i in range(4)
    }
    every = [*requests, *(one for arriving in later.values() for one in arriving)]
    limits = {"rows": 6, "max_prefill_tokens": 16 + 5 * width} | limits
    return speculating(requests, width, every=every, later=later, depth=depth, **limits)


def widths(life: Life) -> Counter[int]:
    return Counter(plan.width for plan in life.real_plans if plan.kind is StepKind.MIXED)


@pytest.mark.parametrize(
    ("width", "depth", "buckets"),
    [
        (2, 2, ()),
        long(4, 0, BUCKETS),
        long(4, 3, BUCKETS),
        long(5, 1, ()),
        long(8, 4, BUCKETS),
        long(16, 2, (72, 120)),
        (32, 2, ()),
    ],
)
def test_answers_are_those_of_single_tokens(width: int, depth: int, buckets: tuple[int, ...]) -> None:
    life = beside(width, depth=depth, prefill_buckets=buckets)
    assert widths(life)[width] > 3
    assert all(
        bool(spec.shape.proposing) is (spec.plan.kind is StepKind.MIXED and spec.shape.width > 1) for spec in life.specs
    )
    assert life.counters["forks"] > 0
    if depth:
        unbroken(life)


def test_penalties_edits_and_every_kind_of_sampling() -> None:
    """They look at the tokens of a window in order, in steps that also sample a prompt's first token."""
    shaped = {"repetition_penalty": 1.3, "min_tokens": 6, "bad_words_token_ids": ((5, 6), (7,)), "top_p": 0.9}
    assert widths(beside(4, depth=2, sampling=shaped))[4] > 3


@pytest.mark.parametrize("buckets", [long(()), BUCKETS], ids=["kernels", "graphs"])
def test_two_ranks_give_what_one_gives(buckets: tuple[int, ...]) -> None:
    several = beside(4, depth=2, over=lambda **limits: tensor_rig(2, **limits), prefill_buckets=buckets)
    assert widths(several)[4] > 3
    assert several.rounds == beside(4, depth=2, prefill_buckets=buckets).rounds


@pytest.mark.parametrize("buckets", [(), (16, 24, 36)], ids=["kernels", "graphs"])
def test_a_script_is_for_rows_that_decode(buckets: tuple[int, ...]) -> None:
    """All draft tokens are accepted in every step, but a prompt's last chunk samples its token itself."""
    keys = {"method": "synthetic", "num_speculative_tokens": 3, "synthetic_acceptance_rates": [1.0, 1.0, 1.0]}
    requests = [request(i, prompt(50, i), max_tokens=21, stops=()) for i in range(5)]
    how: dict[str, Any] = {"rows": 3, "max_prefill_tokens": 24, "prefill_buckets": buckets}
    life = live(
        requests,
        depth=2,
        proposer=proposer_for(speculative_config(keys)),
        speculation=Speculation(4, mixed_percent=100),
        **how,
    )
    assert widths(life)[4] > 3
    first = live(requests, depth=0, max_prefill_tokens=24)
    for request_id, (tokens, _) in life.answers.items():
        assert tokens[0] == first.answers[request_id][0][0]
    assert {(ended.rounds, ended.accepted) for ended in life.finished.values()} == {(5, 15)}


HYBRIDS = ("qwen3.5", "nemotron-h")


@pytest.mark.parametrize(
    ("family", "width", "depth", "buckets"),
    [
        ("qwen3.5", 8, 2, BUCKETS),
        long("qwen3.5", 16, 3, ()),
        long("qwen3.5", 32, 1, ()),
        long("nemotron-h", 8, 3, ()),
        long("nemotron-h", 16, 0, ()),
    ],
)
def test_recurrent_layers_commit_what_is_accepted(
    family: str, width: int, depth: int, buckets: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    over_model(family, monkeypatch)
    life = beside(width, depth=depth, prefill_buckets=buckets)
    assert widths(life)[width] > 3
    assert life.counters["forks"] > 0
    if depth:
        unbroken(life)


def test_no_layer_keeps_what_it_made_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a step is measured, and grows by all of that if it is kept until the step is over."""
    over_model("qwen3.5", monkeypatch)
    made = list[weakref.ref[Tensor]]()

    def keep(usual: Op, undecided: Undecided) -> None:
        assert not [one for one in made if one() is not None]
        made[:] = [weakref.ref(undecided.made_TX)]
        usual(undecided)

    plant(monkeypatch, keep, part="mixed.keep")
    assert widths(beside(4, depth=2))[4] > 3
    assert made


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3.5", "nemotron-h"])
def test_two_ranks_of_recurrent_layers_give_what_one_gives(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    over_model(family, monkeypatch)
    several = beside(4, depth=2, over=lambda **limits: tensor_rig(2, **limits))
    assert widths(several)[4] > 3
    assert several.rounds == beside(4, depth=2).rounds


def test_a_step_is_three_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {"depth": 2, "prefill_buckets": BUCKETS, "policy": {"mixed_percent": 40}}
    beside(4, **how)  # what it is compared with is served here, if it was not before, and is not counted below
    replays: list[TwinGraph] = []
    replay, launch = TwinGraph.replay, executor.Executor.launch
    found: dict[tuple[StepKind, int], set[int]] = {}

    def counted(graph: TwinGraph) -> None:
        replays.append(graph)
        replay(graph)

    def launched(self: executor.Executor, spec: LaunchSpec) -> None:
        before = len(replays)
        launch(self, spec)
        found.setdefault((spec.plan.kind, spec.shape.width), set()).add(len(replays) - before)

    monkeypatch.setattr(TwinGraph, "replay", counted)
    monkeypatch.setattr(executor.Executor, "launch", launched)
    life = beside(4, **how)
    assert found == {
        (StepKind.PREFILL, 1): {2},
        (StepKind.DECODE, 4): {1},
        (StepKind.MIXED, 1): {2},
        (StepKind.MIXED, 4): {3},
    }
    assert life.counters["speculation_off{mixed}"] > 0


# ---- of several widths ----


def narrower(*, depth: int, **limits: Any) -> Life:
    """Windows of 8 tokens for one row, of 4 for two or three, of 2 for more; long prompts come in short chunks."""
    rows = repeating(4, logprobs=2, max_tokens=42)
    prompts = [request(20 + 5 * i, prompt(45 + i, i), n=1 + i % 2, max_tokens=7, stops=()) for i in range(4)]
    later = {3: prompts[:1], 10: [rows[1], prompts[1]], 18: [rows[2], prompts[2]], 24: [rows[3], prompts[3]]}
    every = [*rows, *prompts]
    policy = NARROWER | {"costs": ((1, 700), (2, 4000), (8, 7900))}
    how: dict[str, Any] = {"rows": 6, "max_prefill_tokens": 10, "policy": policy} | limits
    return speculating(rows[:1], 8, every=every, later=later, depth=depth, **how)


@pytest.mark.parametrize(("depth", "buckets"), [long(0, ()), long(2, BUCKETS), long(3, ()), (3, (16, 48, 96))], ids=str)
def test_answers_beside_narrower_windows_are_those_of_single_tokens(depth: int, buckets: tuple[int, ...]) -> None:
    life = narrower(depth=depth, prefill_buckets=buckets)
    assert min(widths(life)[width] for width in (2, 4, 8)) > 2
    mixed = [spec for spec in life.specs if spec.plan.kind is StepKind.MIXED and spec.shape.width > 1]
    assert {(spec.role, spec.shape.width) for spec in mixed} == {
        (f"mixed window of {width}", width) for width in (2, 4, 8)
    }
    assert any(spec.captured for spec in mixed) is bool(buckets)
    assert life.counters["forks"] > 0
    assert life.counters["spec_num_accepted_tokens"] > 20
    finished = life.finished.values()
    assert sum(one.rounds for one in finished) == life.counters["spec_num_drafts"]
    assert sum(one.accepted for one in finished) == life.counters["spec_num_accepted_tokens"]
    if depth:
        unbroken(life)


@pytest.mark.parametrize(
    ("family", "depth", "buckets"), [long("qwen3.5", 2, BUCKETS), ("qwen3.5", 0, ()), long("nemotron-h", 3, BUCKETS)]
)
def test_recurrent_layers_commit_what_is_accepted_of_narrower_windows(
    family: str, depth: int, buckets: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    over_model(family, monkeypatch)
    life = narrower(depth=depth, prefill_buckets=buckets)
    assert min(widths(life)[width] for width in (2, 4, 8)) > 2


@pytest.mark.long
@pytest.mark.parametrize("buckets", [(), BUCKETS], ids=["kernels", "graphs"])
def test_two_ranks_give_what_one_gives_with_narrower_windows(buckets: tuple[int, ...]) -> None:
    several = narrower(depth=2, over=lambda **limits: tensor_rig(2, **limits), prefill_buckets=buckets)
    assert min(widths(several)[width] for width in (2, 4, 8)) > 2
    assert several.rounds == narrower(depth=2, prefill_buckets=buckets).rounds


def test_roles_of_all_widths_have_what_a_step_may_choose() -> None:
    """Graphs for each number of tokens in which a row has room, and one memory for what does not outlive a step."""
    keys = {"method": "synthetic", "num_speculative_tokens": 7, "synthetic_acceptance_length": 2.0}
    how: dict[str, Any] = {"proposer": proposer_for(speculative_config(keys)), "shape": FAMILIES["qwen3.5"]}
    rule = Speculation(8, mixed_percent=100, **NARROWER)
    with rig(speculation=rule, prefill_buckets=(2, 4, 7, 16, 40), **how) as engine:
        roles: list[Any] = [one for one in engine.executor._roles.values() if one.name.startswith("mixed window")]
        assert [(role.name, role.width) for role in roles] == [(f"mixed window of {w}", w) for w in (8, 4, 2)]
        for role in roles:
            assert role.buckets == tuple(size for size in (2, 4, 7, 16, 40) if size >= role.width)
            assert role.decode.tokens_SQ.shape[1] == role.width - 1
            assert {len(made) for made in role.decode.made.values()} == {engine.executor.staging.max_rows * role.width}
        for places in zip(*(role.decode.made.values() for role in roles), strict=True):
            assert len({made.data_ptr() for made in places}) == 1
        assert len({role.decode.tokens_SQ.data_ptr() for role in roles}) == 1


# ---- trees ----


def trees_beside(shape: tuple[int, int], *, depth: int, **limits: Any) -> Life:
    """``beside`` with trees (of W and a tree's tokens): half of the requests sample at random."""

    def asked(request_id: int, length: int, **sampling: Any) -> Request:
        draws: dict[str, Any] = {"temperature": 1.0 * (request_id % 2), "stops": (), **sampling}
        return request(request_id, prompt(length, request_id), **draws)

    requests = [asked(i, 9, max_tokens=26, logprobs=2) for i in range(3)]
    later = {2 + 3 * i: [asked(20 + 5 * i, 45 + i, max_tokens=7, n=1 + i % 2)] for i in range(4)}
    every = [*requests, *(one for arriving in later.values() for one in arriving)]
    limits = {"rows": 6, "max_prefill_tokens": 16 + 5 * shape[1]} | limits
    policy = {"mixed_percent": 100}
    return trees(requests, shape, depth=depth, every=every, later=later, policy=policy, **limits)


@pytest.mark.parametrize(
    ("shape", "depth", "buckets"),
    [
        long((4, 12), 0, (24, 48, 76, 112)),
        long((3, 3), 2, ()),
        ((8, 32), 2, (72, 120, 200)),
        ((5, 33), 3, ()),
    ],
)
def test_answers_beside_trees_are_those_of_single_tokens(
    shape: tuple[int, int], depth: int, buckets: tuple[int, ...]
) -> None:
    life = trees_beside(shape, depth=depth, prefill_buckets=buckets)
    width, size = shape
    assert widths(life)[width] > 3
    mixed = [spec for spec in life.specs if spec.plan.kind is StepKind.MIXED and spec.shape.width > 1]
    assert {spec.plan.row_tokens for spec in mixed} == {size}, "a tree counts whole"
    assert any(spec.captured for spec in mixed) is bool(buckets)
    assert life.counters["forks"] > 0
    assert life.counters["spec_num_accepted_tokens"] > 0.4 * life.counters["spec_num_drafts"]
    if depth:
        unbroken(life)


def test_two_ranks_of_trees_give_what_one_gives() -> None:
    how: dict[str, Any] = {"depth": 2, "prefill_buckets": (24, 48, 76, 112)}
    several = trees_beside((4, 12), over=lambda **limits: tensor_rig(2, **limits), **how)
    assert widths(several)[4] > 3
    assert several.rounds == trees_beside((4, 12), **how).rounds


# ---- the corners of what steps share ----


@pytest.mark.parametrize(
    ("family", "replayed_first"),
    [long("attention", False), ("qwen3.5", True), long("nemotron-h", False)],
)
def test_the_corners_of_what_steps_share_by_both_paths(
    family: str, replayed_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, draft tokens and what layers made of them: no smaller step reads what a larger one left."""
    over_model(family, monkeypatch)
    corners = Corners(width=4)
    paths_in_turn(monkeypatch, replayed_first=replayed_first)
    life = speculating(corners.first, 4, every=corners.everybody, act=corners.act, depth=2, **corners.limits)
    corners.check(life)


# ---- mutants ----


def of_another_row(keep: Op, undecided: Undecided) -> None:
    """State is committed of a neighbour's window."""
    keep(replace(undecided, made_TX=undecided.made_TX.roll(width_of(keep), 0)))


def at_once(state_rows: Op, *given: Any) -> StateRows:
    """State is committed of whole windows, and of what is accepted of them once more."""
    rows: StateRows = state_rows(*given)
    return replace(rows, writes_B=rows.slots_B)


def never(take_in: Op, *given: Any) -> None:
    """No state is committed of windows in steps with chunks."""


def each_family(*mutants: tuple[str, Any]) -> list[Any]:
    """Over one family, in turn; over the other one it is long."""
    cases = [(family, *mutant) for mutant in mutants for family in HYBRIDS]
    return [case if number % 4 in (0, 3) else long(*case) for number, case in enumerate(cases)]


@pytest.mark.parametrize(
    ("family", "part", "mutant"),
    each_family(("mixed.keep", of_another_row), ("mixed.state_rows", at_once), ("mixed.take_in", never)),
)
def test_state_of_other_tokens_is_seen_in_the_text(
    family: str, part: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, mutant, part=part)
    over_model(family, monkeypatch)
    with pytest.raises(AssertionError, match="request"):
        beside(4, depth=2)


def other_hidden_states(drawing: Op, *given: Any) -> Tensor:
    """A window samples from its neighbours' tokens."""
    at_X: Tensor = drawing(*given)
    return at_X.roll(1)


def one_place_on(gather: Op, tables: Any, chunks: Any, *given: Any) -> Packed:
    """Every draft token lies one place further than it should."""
    packed: Packed = gather(tables, chunks, *given)
    return packed._replace(positions_T=packed.positions_T + (chunks.positions_T < -1))


def short_lengths(gather: Op, tables: Any, chunks: Any, size: int, guesses_SQ: Tensor, *given: Any) -> Packed:
    """A window sees no more than its first token would."""
    packed: Packed = gather(tables, chunks, size, guesses_SQ, *given)
    return packed._replace(kv_lengths_R=(packed.kv_lengths_R - guesses_SQ.shape[1]).clamp(min=0))


@pytest.mark.parametrize(
    ("part", "mutant"),
    [("mixed.drawing", other_hidden_states), ("mixed.gather", one_place_on), ("mixed.gather", short_lengths)],
)
def test_a_wrong_window_is_seen_in_the_text(part: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, mutant, part=part)
    with pytest.raises(AssertionError, match="request"):
        beside(4, depth=2)


def depths_of_chains(gather: Op, tables: Any, chunks: Any, size: int, guesses_SQ: Tensor, *depths: Any) -> Packed:
    """A node's position is that of its number."""
    packed: Packed = gather(tables, chunks, size, guesses_SQ)
    return packed


def nothing(usual: Callable[..., Any], *given: Any) -> None:
    """Of a mask: a node sees every one before it. Of a mover: a path's entries stay where its tree's nodes were."""


@pytest.mark.parametrize(
    ("part", "mutant"),
    [("mixed.gather", depths_of_chains), ("mixed.tree_mask", nothing), ("mixed.mover", nothing)],
    ids=["depths of chains", "no mask", "nothing moved"],
)
def test_a_wrong_tree_is_seen_in_the_text(part: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, mutant, part=part)
    with pytest.raises(AssertionError, match="request"):
        trees_beside((4, 12), depth=2)


def test_draft_tokens_of_no_step_are_seen_in_what_steps_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text stays right."""
    right = beside(4, depth=2)
    plant(monkeypatch, nothing, part="mixed.propose")
    wrong = beside(4, depth=2)
    assert wrong.counters["spec_num_accepted_tokens"] < 0.9 * right.counters["spec_num_accepted_tokens"]


def test_a_prompts_last_chunk_gains_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its window looks like: here every draw is token 0, which such rows' draft tokens are."""
    sampling = {"allowed_token_ids": (0,), "logprobs": None}

    def most_of_chunks() -> int:
        most = 0
        apply = Scheduler._apply

        def noted(self: Scheduler, flight: Flight, plan: StepPlan, result: StepResult) -> StepOutput:
            nonlocal most
            most = max([most, *result.counts[plan.decode_rows :]])
            return apply(self, flight, plan, result)

        with monkeypatch.context() as patched:
            patched.setattr(Scheduler, "_apply", noted)
            beside(4, depth=2, sampling=sampling)
        return most

    assert most_of_chunks() == 1
    plant(monkeypatch, lambda proposed, tokens_BQ, **_: proposed(tokens_BQ), part="mixed.Proposed")
    assert most_of_chunks() == 4


WIDEST = 8  # of ``narrower``


def of_the_widest(gather: Op, tables: Any, chunks: Any, size: int, guesses_SQ: Tensor, *given: Any) -> Packed:
    """Narrower windows are read from a table into which nothing was proposed."""
    own = guesses_SQ.shape[1] == WIDEST - 1
    packed: Packed = gather(tables, chunks, size, guesses_SQ if own else torch.zeros_like(guesses_SQ), *given)
    return packed


def made_a_place_on(keep: Op, undecided: Undecided) -> None:
    """What layers made of narrower windows lies a token further."""
    keep(replace(undecided, made_TX=undecided.made_TX.roll(int(width_of(keep) < WIDEST), 0)))


def draws_alike(drawing: Op, *given: Any) -> Tensor:
    """All draws of a narrower window come from its first token."""
    at_X, width = drawing(*given), width_of(drawing)
    found: Tensor = at_X if width == WIDEST else at_X.view(-1, width)[:, :1].expand(-1, width).reshape(-1)
    return found


@pytest.mark.parametrize(
    ("part", "mutant", "family"),
    [
        ("mixed.gather", of_the_widest, ""),
        ("mixed.drawing", draws_alike, ""),
        ("mixed.keep", made_a_place_on, "qwen3.5"),
    ],
)
def test_a_wrong_narrower_window_is_seen_in_the_text(
    part: str, mutant: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, mutant, part=part)
    if family:
        over_model(family, monkeypatch)
    with pytest.raises(AssertionError, match="request"):
        narrower(depth=2)


# ---- where there are none ----


@pytest.mark.parametrize(
    ("keys", "engine", "windows"),
    [
        ({}, {}, True),
        ({"mixed_step_percent": 0}, {}, False),
        ({"disable_by_batch_size": 0}, {}, False),
        ({}, {"data_parallel": 2}, True),
        ({"mixed_step_percent": 0}, {"data_parallel": 2}, True),  # beside another group's
        ({"disable_by_batch_size": 0}, {"data_parallel": 2}, False),
        ({"method": "mtp", "model": "models/demo/mtp"}, {}, True),
        ({"method": "mtp", "model": "models/demo/mtp", "draft_sample_method": "probabilistic"}, {}, True),
    ],
)
def test_who_has_windows_beside_chunks(keys: dict[str, Any], engine: dict[str, Any], windows: bool) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, **keys}
    assert (
        _windows_beside(EngineConfig(model="models/demo", device="cpu", speculative_config=config, **engine)) is windows
    )


@pytest.mark.parametrize(
    ("tokens", "engine"), [(7, {"max_prefill_tokens": 2048}), (15, {"max_num_seqs": 512}), (31, {}), (3, {})]
)
def test_a_start_with_more_window_tokens_than_a_step_holds_serves(tokens: int, engine: dict[str, Any]) -> None:
    """256 rows of 8 tokens fill a step of 2,048: then decode requests in steps with chunks have fewer."""
    keys = {"method": "ngram", "num_speculative_tokens": tokens}
    config = EngineConfig(model="models/demo", device="cuda", speculative_config=keys, **engine)
    executor: Any = SimpleNamespace(
        restores_prefixes=True, sizing=SimpleNamespace(num_blocks=10_000, windows=()), snapshots=0
    )
    schedule = _schedule(config, config.step_limits(4096, 4), executor)
    assert replace(schedule, widths=(1,)).widths == (1,)
    buckets = token_ladder(config.max_prefill_tokens)
    made = replace(schedule, mixed=MixedSteps(buckets=buckets), speculation=Speculation(1 + tokens, mixed_percent=50))
    assert made.mixed is not None


@pytest.mark.parametrize(("shape", "windows"), [(None, True), ("qwen3.5", False)])
def test_trees_over_recurrent_layers_have_one_token_a_row(shape: str | None, windows: bool) -> None:
    keys = {"method": "synthetic", "num_speculative_tokens": 3, "tree_size": 8, "synthetic_acceptance_length": 2.0}
    how: dict[str, Any] = {"proposer": proposer_for(speculative_config(keys)), "tree": 8}
    how |= {"shape": FAMILIES[shape]} if shape else {}
    with rig(speculation=Speculation(4, mixed_percent=100), **how) as engine:
        assert engine.executor.mixes
        assert engine.executor.mixes_windows is windows

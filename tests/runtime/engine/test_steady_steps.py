"""Steady steps on the CPU twin, counted: rounds of speculation, steps of recurrent layers, steps with prompt chunks.

In steady decode a step is one graph launch and one copy home: it sends no byte, waits for nothing, captures and
allocates nothing. A step with chunks is two launches, three beside windows, and sends what its plan says, once. Where a
prompt ends that several answers continue, one copy of its last block, and of its states, follows.

Knows: how much a step may do. Does not know: how that is counted (turn_counts.py), what a GPU does (tests/gpu/
steady_steps.py counts there).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from models.registry import ARCHITECTURES
from runtime.engine import Engine
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.packing import kept_states
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.schedule.config import MixedSteps
from runtime.schedule.plan import StepKind
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculative_config import speculative_config
from tests.models.tiny_delta import FAMILIES
from tests.models.tiny_nemotron import NEMOTRON
from tests.models.toy_hybrid import ARCHITECTURE, HYBRID, ToyHybrid
from tests.plant import Op, plant
from tests.runtime.engine.lives import prompt
from tests.runtime.engine.rig import request, rig
from tests.runtime.engine.turn_counts import Turn, counted
from tests.runtime.speculate.recorded import SHAPE, VOCABULARY, OwnLayer
from tests.runtime.speculate.test_drafted_lives import drafter_of

WIDTH, TREE, ROWS, LENGTH = 4, 8, 4, 256
BEFORE, WATCHED = 7, 12  # turns: all prompts are computed and the first results landed; those that are counted
TARGETS: dict[str, dict[str, object]] = {"attention": {}, "gated delta": FAMILIES["qwen3.5"], "mamba": NEMOTRON}
METHODS = ("ngram", "mtp", "tree", "dflash", "eagle3", "drawn")  # "tree" and "drawn" of an MTP layer's guesses
DRAWN = SamplingVariant(random=True)


@contextmanager
def speculating(method: str, target: str, folder: Path, **limits: Any) -> Iterator[Engine]:
    """An engine whose every step of decode rows is a round, of a product's proposer."""
    keys: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": WIDTH - 1}
    how: dict[str, Any] = {"rows": ROWS, "max_model_len": LENGTH, "block_size": LENGTH, "blocks": 2 * ROWS, "depth": 2}
    how["variants"] = (SamplingVariant(), DRAWN)
    if method == "ngram":
        keys |= {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2}
        how["shape"] = TARGETS[target] | {"vocab_size": VOCABULARY}
    elif target == "attention":
        if method in ("dflash", "eagle3"):
            keys["method"] = method
        keys["model"] = str(drafter_of(keys["method"], WIDTH, folder / "drafter").folder)
        how["shape"] = SHAPE
    else:
        how["folder"] = OwnLayer(TARGETS[target], folder / "target").folder
    if method == "tree":
        keys |= {"tree_size": TREE, "tree_top_k": 4}
        how["tree"] = TREE
    if method == "drawn":
        keys["draft_sample_method"] = "probabilistic"
    proposer = proposer_for(speculative_config(keys), target_folder=how.get("folder"))
    policy = Speculation(WIDTH, mixed_percent=0 if method == "tree" else 100)
    with rig(proposer=proposer, speculation=policy, **(how | limits)) as engine:
        yield engine


def watched(engine: Engine, turns: int = WATCHED, temperature: float = 0.0) -> list[Turn]:
    """``turns`` in which all rows decode and nobody comes or goes, whatever a round gains."""
    longest = engine.scheduler.config.limits.max_model_len - 2 * ROWS - WIDTH
    for i in range(ROWS):
        sampling: dict[str, Any] = {"max_tokens": longest, "temperature": temperature}
        engine.add(request(i, [3 + j % 4 for j in range(5 + i)], stops=(), **sampling))
    for _ in range(BEFORE):
        engine.step()
    with counted(engine) as count:
        found = [count.turn() for _ in range(turns)]
    assert all(turn.spec is not None and turn.spec.plan.kind is StepKind.DECODE for turn in found)
    assert all(len(turn.output.request_ids) == ROWS and not turn.output.finished for turn in found)
    leave(engine, range(ROWS))
    return found


def leave(engine: Engine, requests: Iterable[int]) -> None:
    for request_id in requests:
        engine.cancel(request_id)
    while engine.has_work:
        engine.step()


def check_quiet(turn: Turn) -> None:
    """One launch, one copy home, and nothing else."""
    assert (turn.launches, turn.beside) == (1, 0)
    assert (turn.sent_bytes, turn.sends) == (0, 0)
    check_costs(turn)


def check_costs(turn: Turn) -> None:
    """Of every step: one copy home, no wait, nothing captured or allocated."""
    assert turn.home == 1
    assert turn.waits == 0
    assert (turn.captures, turn.allocations) == (0, 0)


# ---- steady decode ----


@pytest.mark.parametrize(
    ("method", "target"),
    [
        *((method, "attention") for method in METHODS),
        ("ngram", "gated delta"),
        ("tree", "gated delta"),
        ("mtp", "mamba"),
    ],
)
def test_a_steady_round_is_one_launch_and_sends_nothing(method: str, target: str, tmp_path: Path) -> None:
    with speculating(method, target, tmp_path) as engine:
        found = watched(engine, temperature=1.0)
        assert engine.counters["spec_num_drafts"] >= ROWS * WATCHED
        assert engine.counters["spec_num_accepted_tokens"] > 0, "rounds of both outcomes"
    assert {turn.spec.shape.width for turn in found if turn.spec} == {WIDTH}
    for turn in found:
        check_quiet(turn)


@pytest.mark.parametrize("shape", [HYBRID, FAMILIES["qwen3-next"], NEMOTRON], ids=["toy", "qwen3-next", "nemotron-h"])
def test_a_steady_step_of_a_hybrid_is_one_launch_and_sends_nothing(
    shape: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARCHITECTURES, ARCHITECTURE, ToyHybrid)
    with rig(depth=2, rows=ROWS, shape=shape, max_model_len=LENGTH, block_size=LENGTH, blocks=2 * ROWS) as engine:
        for turn in watched(engine):
            check_quiet(turn)


@pytest.mark.parametrize("method", ["ngram", "tree"])
def test_a_round_at_a_blocks_end_sends_new_blocks_and_nothing_else(method: str, tmp_path: Path) -> None:
    """Rows gain at most 4 tokens a round, so with blocks of 32 most rounds need none."""
    turns = 20
    with speculating(method, "attention", tmp_path, block_size=32, blocks=200) as engine:
        found = watched(engine, turns, temperature=1.0)
    sending = [turn for turn in found if turn.sends]
    assert 0 < len(sending) <= turns * WIDTH // 32 + 1
    for turn in found:
        check_costs(turn)
        assert turn.launches == 1
        assert (turn.beside, turn.sends) == ((1, 1) if turn.sent else (0, 0)), "what is sent is put into its table"
        assert turn.sent.keys() <= {"cells_M", "blocks_M"}
        assert turn.sent_bytes == aligned(turn.sent)


# ---- steps with chunks of prompts ----

BUCKETS = (16, 24, 40, 64)


def aligned(sizes: dict[str, int]) -> int:
    """Bytes of a copy that holds them all, each on a boundary of 16."""
    return sum(-(-size // 16) * 16 for size in sizes.values())


def planned(engine: Engine, turn: Turn, tile_tokens: int) -> dict[str, int]:
    """The bytes that the plan of a step with chunks needs on the device, by what they are. ``tile_tokens`` of a tile of
    their attention, 0 where its plan is none of the host's."""
    assert turn.spec is not None
    plan, tables, spec = turn.spec.plan, engine.executor.tables, turn.spec
    tokens, rows = spec.captured, max(spec.shape.rows, min(spec.captured, engine.executor.staging.max_rows))
    assert tokens >= plan.packed_tokens
    sizes = {"chunk_tokens_3T": 3 * 8 * tokens, "chunk_rows_4R": 4 * 8 * rows}
    if tile_tokens:
        sizes["attention_E4"] = 4 * 4 * min(tokens, tokens // tile_tokens + engine.executor.staging.max_rows)
    if plan.slot_writes:
        seated = len(plan.slot_writes)
        sizes |= {"slots_N": 8 * seated, "records_NX": 4 * tables.record_words * seated, "seated_H": 8 * seated}
        if tables.history_SL is not None:
            known = sum(len(write.token_ids) for write in plan.slot_writes)
            sizes |= {"history_cells_T": 8 * known, "history_T": 4 * known}
    if plan.block_writes:
        sizes |= {"cells_M": 8 * len(plan.block_writes), "blocks_M": 4 * len(plan.block_writes)}
    if copied := sum(fork.copied is not None for fork in plan.forks):
        sizes["copied_blocks_2C"] = 2 * 8 * copied
    if kept := kept_states(plan):
        sizes["kept_2C"] = 2 * 8 * kept
    return sizes


@contextmanager
def mixing(method: str, target: str, folder: Path, *, tiled: bool) -> Iterator[tuple[Engine, int]]:
    """An engine whose steps with chunks are captured, and tokens of a tile of their attention; ``tiled``: that is
    planned by a table, which is sent with the rest, else 0."""
    how: dict[str, Any] = {"prefill_buckets": BUCKETS, "mixed": MixedSteps(BUCKETS), "buckets": (1, 2, ROWS)}
    how |= {"block_size": 32, "blocks": 200, "prefix_caching": False}
    tile_tokens = 0
    if tiled:
        pytest.importorskip("triton")
        from tests.runtime.engine.tiled_kernels import TILE, tiled_kernels

        how["kernels"], tile_tokens = tiled_kernels(), TILE
    plain: dict[str, Any] = {"depth": 2, "rows": ROWS, "shape": TARGETS[target], "max_model_len": LENGTH}
    with speculating(method, target, folder, **how) if method else rig(**plain, **how) as engine:
        yield engine, tile_tokens


@pytest.mark.parametrize(
    ("method", "target", "launches", "tiled"),
    [
        ("", "attention", {1: 2}, False),
        ("", "attention", {1: 2}, True),
        ("", "gated delta", {1: 2}, False),
        ("", "mamba", {1: 2}, True),
        ("mtp", "attention", {WIDTH: 3}, False),
        ("mtp", "attention", {WIDTH: 3}, True),
        ("ngram", "gated delta", {WIDTH: 3}, True),
        ("tree", "attention", {1: 2}, False),  # no windows beside chunks: nodes of a tree lie elsewhere
    ],
)
def test_a_mixed_step_sends_its_plan_in_one_copy(
    method: str, target: str, launches: dict[int, int], tiled: bool, tmp_path: Path
) -> None:
    """Prompts arrive while others decode; a step with chunks is so many launches, by what a row that decodes has."""
    with mixing(method, target, tmp_path, tiled=tiled) as (engine, tile_tokens):
        for i in range(2):
            engine.add(request(i, [3 + j % 4 for j in range(5 + i)], max_tokens=150, stops=()))
        for _ in range(BEFORE):
            engine.step()
        found: list[Turn] = []
        arriving = range(0, WATCHED, 3)
        with counted(engine) as count:
            for number in range(WATCHED):
                if number in arriving:
                    tokens = [token % VOCABULARY for token in prompt(25 + 9 * number, number)]
                    engine.add(request(10 + number, tokens, max_tokens=3, stops=()))
                found.append(count.turn())
        mixed = [turn for turn in found if turn.spec is not None and turn.spec.plan.kind is StepKind.MIXED]
        assert len(mixed) > 4
        for turn in mixed:
            assert turn.spec is not None
            check_costs(turn)
            assert not turn.spec.plan.forks
            assert not kept_states(turn.spec.plan)
            assert turn.launches == launches[turn.spec.shape.width]
            assert turn.sends == 1
            assert turn.beside == (1 if tiled else 2), (
                "what was sent is put into its tables; attention's plan, if apart"
            )
            assert turn.sent == planned(engine, turn, tile_tokens)
            assert turn.sent_bytes == aligned(turn.sent)
        for turn in found:
            check_costs(turn)
        leave(engine, [0, 1, *(10 + number for number in arriving)])


@pytest.mark.parametrize(
    ("method", "target", "launches", "copies", "tiled"),
    [
        ("", "attention", 2, 1, False),
        ("", "attention", 2, 1, True),
        ("", "gated delta", 2, 2, False),
        ("mtp", "attention", 3, 2, True),
    ],
)
def test_a_step_that_forks_copies_blocks_before_its_tail(
    method: str, target: str, launches: int, copies: int, tiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of two answers arrives beside a row, and ends within a block in its second step. Before the tail of that
    one, the other answer's own block is written; in the first nothing is. State in slots is a copy behind it."""
    answers = range(10, 12)
    with mixing(method, target, tmp_path, tiled=tiled) as (engine, tile_tokens):
        engine.add(request(0, [3, 4, 5], max_tokens=150, stops=()))
        for _ in range(BEFORE):
            engine.step()
        with counted(engine) as count:
            copied: list[tuple[int, int]] = []  # launches before each, and what it puts on the stream itself

            def noted(copy_forked: Op, spec: LaunchSpec) -> None:
                launched, submitted = count.counts["replays"], count.counts["compute"]
                copy_forked(spec)
                if count.counts["compute"] > submitted:
                    copied.append((launched, count.counts["compute"] - submitted))

            plant(monkeypatch, noted, part="prefill.copy_forked")
            tokens = [token % VOCABULARY for token in prompt(90, 1)]
            engine.add(request(answers[0], tokens, n=len(answers), max_tokens=3, stops=()))
            found = [count.turn() for _ in range(WATCHED)]
        (turn,) = (turn for turn in found if turn.spec is not None and turn.spec.plan.forks)
        assert turn.spec is not None
        assert (turn.spec.plan.kind, turn.spec.plan.decode_rows) == (StepKind.MIXED, 1)
        assert [fork.copied is not None for fork in turn.spec.plan.forks] == [True], "90 tokens end within a block"
        assert turn.launches == launches
        assert copied == [(launches - 1, 1)], "one, before the tail, and in no other turn"
        assert turn.beside == copies + (1 if tiled else 2), "the copies, and what comes before a step without a fork"
        assert turn.sends == 1
        assert turn.sent == planned(engine, turn, tile_tokens)
        assert turn.sent_bytes == aligned(turn.sent)
        for each in found:
            check_costs(each)
        leave(engine, [0, *answers])

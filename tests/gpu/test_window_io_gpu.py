"""A window's two ends in Triton against the same ends in torch: every tensor, table and ring entry, bit for bit.

Without a GPU, as CI does it: ``make interpreted``.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.execute.proposer import Proposed
from runtime.execute.sampling import draft_tree
from runtime.execute.sampling.sampler import Draw, Verdict, stop_check
from runtime.execute.step.commit import Committed, commit, commit_in_torch, show_in_torch
from runtime.execute.step.gather import Rows, gather_window, gather_window_in_torch
from runtime.execute.step.step_io_kernels import triton_kernels
from runtime.schedule.request import FinishReason
from tests.gpu.slot_cases import BLOCK_SIZE, Case, random_case, same, same_state
from tests.gpu.test_device_gpu import no_synchronisation
from tests.gpu.untyped import Stream
from tests.plant import plant

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    importlib.import_module("tests.models.kernels.interpreted_kernels")  # mends Triton's interpreter for today's numpy
DEVICE = "cpu" if INTERPRETED else "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, with which the interpreter computes
]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels take CPU tensors, which would otherwise be given to torch."""
    if INTERPRETED:
        plant(monkeypatch, lambda *_: triton_kernels(), part="step.kernels")
        monkeypatch.setattr(draft_tree, "_kernels_for", lambda tensor: draft_tree._triton_kernels())


def _moved(parts: Any) -> Any:
    return type(parts)(*(part if part is None else part.to(DEVICE) for part in parts))


def _proposed(case: Case, seed: int, width: int, *, tree: int = 0, limited: bool = False, script: bool = False) -> Any:
    """Guesses of few ids, so that draws of few ids meet them."""
    rng = np.random.default_rng(seed + 7)
    rows = len(case.rows_B)
    guesses = (tree or width) - 1

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.from_numpy(rng.integers(low, high, shape))

    parents = None
    if tree:  # a chain of width - 1 first, then children of any node that is not too deep
        parents = torch.empty(rows, guesses, dtype=torch.int64)
        for row in range(rows):
            depth = [0]
            for node in range(1, tree):
                fit = [n for n in range(node) if depth[n] < width - 1]
                parent = node - 1 if node < width else int(rng.choice(fit))
                parents[row, node - 1] = parent
                depth.append(depth[parent] + 1)
    return Proposed(
        ints(0, 3, rows, guesses),
        ints(0, width + 1, rows) if limited else None,
        ints(0, width, rows).to(torch.int32) if script else None,
        parents,
    )


def _drawn(seed: int, window: Rows) -> tuple[Draw, Verdict]:
    """Of three ids, the guess itself in most places, now and then a stop id of the row or unusable logits."""
    rng = np.random.default_rng(seed)
    rows, tokens = window.tokens_BW.shape
    token_BN = torch.from_numpy(rng.integers(0, 3, (rows, tokens)))
    likely = torch.from_numpy(rng.random((rows, tokens - 1)) < 0.7)
    token_BN[:, :-1] = torch.where(likely, window.tokens_BW[:, 1:], token_BN[:, :-1])
    token_B = token_BN.reshape(-1)
    stops = torch.from_numpy(rng.random(len(token_B)) < 0.1)
    token_B = torch.where(stops, window.sampling.stop_ids[:, 0].to(torch.int64), token_B)
    ok_B = torch.from_numpy(rng.random(len(token_B)) < 0.93)
    draw = Draw(torch.where(ok_B, token_B, 0), ok_B)
    return draw, stop_check(draw.token_B, window.sampling, draw.ok_B)


def _same_windows(found: Rows, wanted: Rows) -> None:
    for part in ("page_table_BP", "kv_lengths_B", "tokens_BW", "position_BW", "kv_slots_BW", "live_BW"):
        same(getattr(found, part), getattr(wanted, part), part)
    for ours, theirs in zip(found.groups or (), wanted.groups or (), strict=True):
        same(ours, theirs, "page tables and places of all groups")
    for field in fields(found.sampling)[:-1]:  # but for the processors
        same(getattr(found.sampling, field.name), getattr(wanted.sampling, field.name), field.name)


def _same_committed(found: Committed, wanted: Committed) -> None:
    assert found.shown is not None
    assert wanted.shown is not None
    for ours, theirs in ((found.accepted, wanted.accepted), (found.shown, wanted.shown)):
        for name, one, other in zip(type(theirs)._fields, ours, theirs, strict=True):
            assert (one is None) == (other is None), name
            if one is not None and other is not None:
                same(one, other, name)


def _check(case: Case, seed: int, width: int, **how: Any) -> Committed:
    """Both ends of one window from the state of ``case``, which the torch code then advances."""
    device, proposed = case.on(DEVICE), _proposed(case, seed, width, **how)
    columns = device.tables.gather(device.rows_B)
    window = gather_window(device.tables, device.rows_B, columns, _moved(proposed), BLOCK_SIZE, width)
    columns = case.tables.gather(case.rows_B)
    wanted = gather_window_in_torch(case.tables, case.rows_B, columns, proposed, BLOCK_SIZE, width)
    _same_windows(window, wanted)
    same_state(device, case)
    draw, verdict = _drawn(seed, wanted)
    found = commit(device.tables, device.ring, window, _moved(draw), _moved(verdict), width)
    expected = commit_in_torch(case.tables, case.ring, wanted, draw, verdict, width)
    _same_committed(found, expected)
    same_state(device, case)
    return expected


def _case(seed: int, rows: int, width: int, **how: Any) -> Case:
    """Rows before their end, at it, and with room for a part of a window; blocks enough for a tree."""
    case = random_case(seed, rows, 12, width=width, history=True, **how)
    columns, rng = case.tables.columns, np.random.default_rng(seed)
    slots = case.tables.slots - 1
    columns.length[1:] = torch.from_numpy(rng.integers(1, 150, slots, dtype=np.int32))
    columns.max_length[1:] = columns.length[1:] + torch.from_numpy(
        rng.integers(1, 2 * width + 2, slots).astype(np.int32)
    )
    columns.min_length[1:] = columns.length[1:] + torch.from_numpy(rng.integers(-1, 3, slots).astype(np.int32))
    return case


LIMITS = [{}, {"limited": True}, {"script": True}, {"limited": True, "script": True}]


@pytest.mark.parametrize("how", LIMITS, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 2), (5, 4), (3, 8), (2, 17), (4, 33)])
def test_both_ends_of_chains_are_those_of_torch(rows: int, width: int, how: dict[str, bool]) -> None:
    for seed in range(3):
        _check(_case(seed, rows, width, padding=min(seed, rows)), seed, width, **how)


@pytest.mark.parametrize("how", LIMITS, ids=str)
@pytest.mark.parametrize(("rows", "width", "tree"), [(1, 2, 3), (5, 4, 12), (3, 8, 33)])
def test_both_ends_of_trees_are_those_of_torch(rows: int, width: int, tree: int, how: dict[str, bool]) -> None:
    for seed in range(3):
        _check(_case(seed, rows, width, padding=min(seed, rows)), seed, width, tree=tree, **how)


def test_every_outcome_is_among_the_cases() -> None:
    """Rows that gain nothing, some, and everything; every reason to end, and rows that go on."""
    counts, reasons = set(), set()
    for seed in range(4):
        case = _case(seed, 24, 4, padding=2)
        accepted = _check(case, seed, 4, limited=seed % 2 > 0).accepted
        counts |= set(accepted.count_B.tolist())
        reasons |= set(accepted.finish_B.tolist())
    assert counts == {0, 1, 2, 3, 4}
    ends = (FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR)
    assert reasons == {int(reason) for reason in ends}


def test_more_rows_than_one_round_of_the_program() -> None:
    """2048 lanes at a time are 32 rows of 33 tokens."""
    _check(_case(1, 70, 33, padding=3), 1, 33, limited=True)


@pytest.mark.parametrize(("ended", "padding"), [(1.0, 0), (1.0, 2), (0.0, 5)], ids=["ghosts", "both", "padding"])
def test_rows_of_which_none_lives_change_nothing_but_the_ring(ended: float, padding: int) -> None:
    case = _case(2, 5, 4, ended=ended, padding=padding)
    before = case.on("cpu")
    accepted = _check(case, 2, 4).accepted
    assert not accepted.count_B.any()
    same(case.tables.columns.records, before.tables.columns.records, "records")
    assert int(case.ring.appended_1) == int(before.ring.appended_1) + 1


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_what_a_single_token_shows_is_that_of_torch(rows: int) -> None:
    kernels = triton_kernels()
    assert kernels is not None
    count_B = torch.arange(rows, dtype=torch.int32, device=DEVICE) % 2
    kv_slots_B = torch.arange(7, 7 + rows, device=DEVICE)
    for ours, theirs in zip(kernels.show(count_B, kv_slots_B), show_in_torch(count_B, kv_slots_B), strict=True):
        same(ours, theirs, "shown")


@pytest.mark.skipif(INTERPRETED, reason="about the device, not the arithmetic")
@pytest.mark.parametrize("tree", [0, 12])
def test_a_captured_window_advances_the_same_state_and_never_syncs(tree: int) -> None:
    """Both ends in one graph, replayed; in between draws that are the same every time."""
    case = _case(4, 8, 4, ended=0.2, padding=1)
    case.tables.columns.length[1:] = 5
    case.tables.columns.max_length[1:] = 60
    device, proposed = case.on("cuda"), _proposed(case, 4, 4, tree=tree)
    there, size = _moved(proposed), BLOCK_SIZE
    columns = case.tables.gather(case.rows_B)
    draw, verdict = _drawn(4, gather_window_in_torch(case.tables, case.rows_B, columns, proposed, size, 4))
    moved = _moved(draw), _moved(verdict)

    def step() -> tuple[Rows, Committed]:
        window = gather_window(device.tables, device.rows_B, device.tables.gather(device.rows_B), there, size, 4)
        return window, commit(device.tables, device.ring, window, *moved, 4)

    stream = Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with no_synchronisation(), torch.cuda.stream(stream):
        step()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = step()
    torch.cuda.synchronize()
    fresh = case.on("cuda")
    for ours, theirs in (
        (device.tables.columns.records, fresh.tables.columns.records),
        (device.tables.history_SL, fresh.tables.history_SL),
        (device.ring.stored_EX, fresh.ring.stored_EX),
        (device.ring.appended_1, fresh.ring.appended_1),
    ):
        assert ours is not None
        assert theirs is not None
        ours.copy_(theirs)
    for _ in range(4):
        graph.replay()
        columns = case.tables.gather(case.rows_B)
        wanted = gather_window_in_torch(case.tables, case.rows_B, columns, proposed, size, 4)
        expected = commit_in_torch(case.tables, case.ring, wanted, draw, verdict, 4)
        torch.cuda.synchronize()
        _same_windows(found[0], wanted)
        _same_committed(found[1], expected)
        same_state(device, case)

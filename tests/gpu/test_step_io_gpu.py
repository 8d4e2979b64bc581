"""A step's two ends in Triton against the same ends in torch: every tensor, table and ring entry, bit for bit.

Without a GPU, as CI does it: ``make interpreted``.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.execute.proposer import Proposed
from runtime.execute.sampling.draft_tree import lay_out_in_torch
from runtime.execute.sampling.logprobs import TokenLogprobs
from runtime.execute.sampling.sampler import Draw, Verdict, stop_check
from runtime.execute.slot_state import NEWEST
from runtime.execute.staging import Chunks
from runtime.execute.step.commit import commit, commit_in_torch
from runtime.execute.step.gather import (
    Packed,
    Rows,
    gather_decode,
    gather_decode_in_torch,
    gather_packed,
    gather_packed_in_torch,
    gather_window_in_torch,
)
from runtime.execute.step.step_io_kernels import triton_kernels
from runtime.schedule.request import FinishReason
from tests.gpu.slot_cases import BLOCK_SIZE, Case, random_case, same, same_state, state_of
from tests.gpu.test_device_gpu import no_synchronisation
from tests.gpu.untyped import Stream
from tests.plant import plant

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    importlib.import_module("tests.models.kernels.interpreted_kernels")  # mends Triton's interpreter for today's numpy
DEVICE = "cpu" if INTERPRETED else "cuda"
SIZES = [(1, 1), (3, 65), (8, 1000), (8, 1025), (256, 65), (300, 1)]  # rows, blocks of a slot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, with which the interpreter computes
]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that ran; interpreted ones take CPU tensors, which would otherwise be given to torch."""
    kernels = triton_kernels()
    assert kernels is not None
    ran: list[str] = []

    def begin(*args: Any) -> Any:
        ran.append("begin")
        return kernels.begin(*args)

    def begin_packed(*args: Any) -> Any:
        ran.append("begin_packed")
        return kernels.begin_packed(*args)

    def finish(*args: Any) -> None:
        ran.append("finish")
        kernels.finish(*args)

    noted = kernels._replace(begin=begin, begin_packed=begin_packed, finish=finish)
    plant(monkeypatch, lambda _, tensor: noted if INTERPRETED or tensor.is_cuda else None, part="step.kernels")
    return ran


def _drawn(seed: int, gathered: Rows) -> tuple[Draw, Verdict]:
    """Tokens for the rows, some of them a stop id of the row; some rows without usable logits."""
    rng = np.random.default_rng(seed)
    rows = len(gathered.rows_B)
    sampling = gathered.sampling
    device = gathered.rows_B.device
    token_B = torch.from_numpy(rng.integers(0, 151_936, rows)).to(device)
    stops = torch.from_numpy(rng.random(rows) < 0.3).to(device)
    token_B = torch.where(stops, sampling.stop_ids[:, 0].to(torch.int64), token_B)
    ok_B = torch.from_numpy(rng.random(rows) < 0.9).to(device)
    draw = Draw(torch.where(ok_B, token_B, 0), ok_B)
    return draw, stop_check(draw.token_B, sampling, draw.ok_B)


def _same_gathered(found: Rows, wanted: Rows) -> None:
    same(found.columns.records, wanted.columns.records, "records")
    for part in ("page_table_BP", "kv_lengths_B", "tokens_BW", "position_BW", "kv_slots_BW", "live_BW"):
        same(getattr(found, part), getattr(wanted, part), part)
    assert (found.groups is None) is (wanted.groups is None)
    for ours, theirs in zip(found.groups or (), wanted.groups or (), strict=True):
        same(ours, theirs, "page tables and places of all groups")
    for field in fields(found.sampling)[:-1]:  # but for the processors
        same(getattr(found.sampling, field.name), getattr(wanted.sampling, field.name), field.name)


def _check_a_step(case: Case, seed: int) -> None:
    """Both ends of one step from the state of ``case``, which the torch code then advances."""
    device = case.on(DEVICE)
    gathered = gather_decode(device.tables, device.rows_B, BLOCK_SIZE)
    wanted = gather_decode_in_torch(case.tables, case.rows_B, BLOCK_SIZE)
    _same_gathered(gathered, wanted)
    same_state(device, case)
    draw, verdict = _drawn(seed, wanted)
    moved = Draw(*(part.to(DEVICE) for part in draw)), Verdict(*(part.to(DEVICE) for part in verdict))
    commit(device.tables, device.ring, gathered, *moved, 1)
    commit_in_torch(case.tables, case.ring, wanted, draw, verdict, 1)
    same_state(device, case)


@pytest.mark.parametrize(("rows", "blocks"), SIZES)
def test_both_ends_are_those_of_torch(rows: int, blocks: int, calls: list[str]) -> None:
    for seed in range(3):
        case = random_case(seed, rows, blocks, padding=min(seed, rows), history=seed > 0)
        finished_before = int((case.tables.columns.finished != 0).sum())
        _check_a_step(case, seed)
        if rows > 100:  # the case is one in which rows do end
            assert int((case.tables.columns.finished != 0).sum()) > finished_before
    assert calls == ["begin", "finish"] * 3


@pytest.mark.parametrize(("rows", "blocks"), SIZES)
def test_packed_tokens_are_those_of_torch(rows: int, blocks: int, calls: list[str]) -> None:
    """Some rows decode, ghosts among them, the others have chunks, and tokens and rows are filled up."""
    for seed in range(3):
        case = random_case(seed, rows, blocks)
        chunks = _chunks(case, seed)
        device = case.on(DEVICE)
        there = replace(chunks, **{name: getattr(chunks, name).to(DEVICE) for name in _COLUMNS})
        found = gather_packed(device.tables, there, BLOCK_SIZE)
        wanted = gather_packed_in_torch(case.tables, chunks, BLOCK_SIZE)
        for ours, theirs, what in zip(found, wanted, wanted._fields, strict=True):
            same(ours, theirs, what)
        same_state(device, case)
    assert calls == ["begin_packed"] * 3


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize(("rows", "guesses"), [(1, 1), (3, 3), (8, 15), (300, 2)])
def test_packed_windows_are_those_of_torch(rows: int, guesses: int, tree: bool, calls: list[str]) -> None:
    """Rows that decode have guesses behind their newest token; some reach past the end of their sequences."""
    for seed in range(3):
        case = random_case(seed, rows, 65)
        length = case.tables.columns.length
        length.clamp_(max=65 * BLOCK_SIZE - guesses)
        case.tables.columns.max_length.copy_(length + seed + 1)
        chunks = _chunks(case, seed, guesses)
        rng, size = np.random.default_rng(seed), (case.tables.slots, guesses)
        guesses_SQ = torch.from_numpy(rng.integers(0, 151_936, size))
        parents_SQ = torch.from_numpy(rng.integers(0, np.arange(1, guesses + 1), size)) if tree else None
        depth_SN = None if parents_SQ is None else lay_out_in_torch(parents_SQ, guesses).depth_BN
        device = case.on(DEVICE)
        there = replace(chunks, **{name: getattr(chunks, name).to(DEVICE) for name in _COLUMNS})
        deep = None if depth_SN is None else depth_SN.to(DEVICE)
        found = gather_packed(device.tables, there, BLOCK_SIZE, guesses_SQ.to(DEVICE), deep)
        wanted = gather_packed_in_torch(case.tables, chunks, BLOCK_SIZE, guesses_SQ, depth_SN)
        for ours, theirs, what in zip(found, wanted, wanted._fields, strict=True):
            same(ours, theirs, what)
        _as_a_window(case, chunks, wanted, guesses_SQ, parents_SQ)
    assert calls == ["begin_packed"] * 3


def _as_a_window(case: Case, chunks: Chunks, packed: Packed, guesses_SQ: Tensor, parents_SQ: Tensor | None) -> None:
    """Tokens, positions, places and lengths are those of a window of the same rows."""
    rows_B, width = chunks.slots_R[chunks.decodes_R != 0], guesses_SQ.shape[1] + 1
    proposed = Proposed(guesses_SQ[rows_B], parents_BQ=None if parents_SQ is None else parents_SQ[rows_B])
    window = gather_window_in_torch(case.tables, rows_B, case.tables.gather(rows_B), proposed, BLOCK_SIZE, width)
    here = slice(0, len(rows_B) * width)
    same(packed.token_ids_T[here], window.tokens_BW.flatten(), "tokens")
    same(packed.positions_T[here], window.position_BW.flatten(), "positions")
    same(packed.kv_slots_T[..., here], window.places.flatten(-2), "places")
    same(packed.kv_lengths_R[: len(rows_B)], window.kv_lengths_B, "lengths")


_COLUMNS = ("token_ids_T", "positions_T", "slots_T", "slots_R", "emitting_R", "logit_rows_R", "decodes_R")


def _chunks(case: Case, seed: int, guesses: int = 0) -> Chunks:
    rng = np.random.default_rng(seed)
    slots = case.rows_B.tolist()
    decoding = (len(slots) + 1) // 2
    width = guesses + 1
    newest = [NEWEST - guess for guess in range(width)]
    columns: list[list[int]] = [[0] * decoding * width, newest * decoding, list(np.repeat(slots[:decoding], width))]
    for slot in slots[decoding:]:
        length = int(rng.integers(1, 5))
        start = int(rng.integers(0, case.tables.max_blocks * BLOCK_SIZE - length + 1))
        columns[0] += rng.integers(0, 151_936, length).tolist()
        columns[1] += range(start, start + length)
        columns[2] += [slot] * length
    tokens_3T = torch.zeros(3, len(columns[0]) + seed, dtype=torch.int64)
    tokens_3T[:, : len(columns[0])] = torch.tensor(columns)
    rows_2R = torch.zeros(2, len(slots) + seed, dtype=torch.int64)
    rows_2R[:, : len(slots)] = torch.tensor([slots, [1] * decoding + [0] * (len(slots) - decoding)])
    (ids_T, positions_T, slots_T), (slots_R, decodes_R) = tokens_3T, rows_2R
    return Chunks(ids_T, positions_T, slots_T, slots_R, slots_R, slots_R, decodes_R)


@pytest.mark.parametrize("stop_ids", [1, 2, 5])
def test_records_of_other_sizes(stop_ids: int) -> None:
    _check_a_step(random_case(1, 8, 65, padding=2, stop_ids=stop_ids), 1)


@pytest.mark.parametrize(("ended", "padding"), [(1.0, 0), (1.0, 3), (0.0, 8)], ids=["ghosts", "both", "padding"])
def test_rows_of_which_none_lives_change_nothing_but_the_ring(ended: float, padding: int) -> None:
    case = random_case(2, 8, 65, ended=ended, padding=padding)
    before = case.on("cpu")
    _check_a_step(case, 2)
    same(case.tables.columns.records, before.tables.columns.records, "records")
    assert int(case.ring.appended_1) == int(before.ring.appended_1) + 1


def test_the_ring_and_its_stamps_wrap() -> None:
    case = random_case(0, 3, 1)
    stamps = case.ring.stamps
    assert stamps == 2**31  # of four entries: the largest there is
    case.ring.appended_1.fill_(stamps - 3)
    for step in range(6):
        _check_a_step(case, step)
    assert int(case.ring.appended_1) == 3
    assert case.ring.stored_EX[:, 0].tolist() == [0, 1, 2, stamps - 1]


def test_log_probabilities_take_the_way_of_torch(calls: list[str]) -> None:
    case = random_case(0, 3, 1)
    device = case.on(DEVICE)
    gathered = gather_decode(device.tables, device.rows_B, BLOCK_SIZE)
    draw, verdict = _drawn(0, gathered)
    values = torch.rand(3, 1, device=DEVICE)
    logprobs = TokenLogprobs(values[:, 0], verdict.count_B, verdict.count_B[:, None], values)
    commit(device.tables, device.ring, gathered, draw, verdict, 1, logprobs)
    assert calls == ["begin"]
    packed = device.ring.buffer_EX[0].cpu()
    assert packed[1:4].tolist() == draw.token_B.tolist()
    assert packed[10:13].view(torch.float32).tolist() == values[:, 0].tolist()


@pytest.mark.skipif(INTERPRETED, reason="about the device, not the arithmetic")
@pytest.mark.parametrize("rows", [1, 8, 256])
def test_a_captured_graph_advances_the_same_state_and_never_syncs(rows: int) -> None:
    """Both ends in one graph, replayed; in between a draw that is the same every time."""
    case = random_case(4, rows, 65, ended=0.2, padding=rows // 8)
    columns = case.tables.columns
    columns.length[1:] = 5
    columns.max_length[1:] = 6 + torch.arange(len(columns.length) - 1, dtype=torch.int32) % 9
    device = case.on("cuda")
    draw, _ = _drawn(4, gather_decode_in_torch(case.tables, case.rows_B, BLOCK_SIZE))
    moved = Draw(*(part.cuda() for part in draw))

    def verdict_of(gathered: Rows, ok_B: Tensor) -> Verdict:
        full_B = gathered.sampling.position + 1 >= gathered.sampling.max_length
        return Verdict(
            (gathered.live_BW[:, 0] & ok_B).to(torch.int32),
            (gathered.live_BW[:, 0] & full_B).to(torch.int32) * int(FinishReason.LENGTH),
        )

    def step() -> Rows:
        gathered = gather_decode(device.tables, device.rows_B, BLOCK_SIZE)
        verdict = verdict_of(gathered, moved.ok_B)
        commit(device.tables, device.ring, gathered, moved, verdict, 1)
        return gathered

    stream = Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with no_synchronisation(), torch.cuda.stream(stream):
        step()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            gathered = step()
    torch.cuda.synchronize()
    for ours, theirs in zip(state_of(device), state_of(case), strict=True):
        ours.copy_(theirs)
    for _ in range(6):
        graph.replay()
        wanted = gather_decode_in_torch(case.tables, case.rows_B, BLOCK_SIZE)
        verdict = verdict_of(wanted, draw.ok_B)
        commit_in_torch(case.tables, case.ring, wanted, draw, verdict, 1)
        torch.cuda.synchronize()
        _same_gathered(gathered, wanted)
        same_state(device, case)

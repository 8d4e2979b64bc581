"""What a plan changes arrives where steps read it, in one copy; the ring never loses a race, and its guards matter."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from runtime.execute.device.cpu_twin import TwinDevice
from runtime.execute.device.protocol import DeviceError
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.sampling.penalties import PenaltyFeature, SeenTokens
from runtime.execute.slot_state import SlotTables
from runtime.execute.staging import Staging
from runtime.schedule.plan import Chunk, Fork, SlotUpdate
from runtime.schedule.request import SamplingParams
from tests.runtime.execute.plans import decode_step, prefill_step, slot_write


@pytest.fixture
def device() -> Iterator[TwinDevice]:
    with TwinDevice() as opened:
        yield opened


def seen_of(tables: SlotTables) -> SeenTokens:
    return next(feature.need() for feature in tables.features if isinstance(feature, PenaltyFeature))


def make_staging(device: TwinDevice, *, max_prefill_tokens: int = 64, entries: int = 4) -> tuple[SlotTables, Staging]:
    tables = SlotTables(device, max_requests=8, max_blocks=6, vocab_size=11)
    return tables, Staging(device, tables, max_prefill_tokens=max_prefill_tokens, max_rows=8, entries=entries)


def run(device: TwinDevice, staging: Staging, spec: LaunchSpec) -> None:
    staged = staging.stage(spec)
    assert staged is not None
    staging.apply(staged)
    device.synchronize()


# ---- contents ----


def test_slot_and_block_writes_arrive(device: TwinDevice) -> None:
    tables, staging = make_staging(device)
    writes = (slot_write(5, (4, 6), epoch=2, stop_token_ids=(1, 2)), slot_write(2, (9, 9, 8)))
    run(device, staging, decode_step(1, (5, 2), slot_writes=writes, block_writes=((5, 0, 7), (5, 3, 9), (2, 5, 4))))
    assert tables.columns.last_token.tolist() == [0, 0, 8, 0, 0, 6, 0, 0, 0]
    assert tables.columns.length.tolist() == [0, 0, 3, 0, 0, 2, 0, 0, 0]
    assert tables.columns.epoch[5].item() == 2
    assert tables.columns.finished.tolist() == [1, 1, 0, 1, 1, 0, 1, 1, 1]
    assert tables.columns.stop_ids_NK[5, :3].tolist() == [1, 2, -1]
    assert tables.block_table_SP[5].tolist() == [7, 0, 0, 9, 0, 0]
    assert tables.block_table_SP[2].tolist() == [0, 0, 0, 0, 0, 4]
    assert tables.block_table_SP.sum().item() == 7 + 9 + 4


def test_tables_of_several_groups_lie_one_after_the_other(device: TwinDevice) -> None:
    """Page i of the n-th window is entry n * max_blocks + i of a plan; copies have a pair of rows a group."""
    tables = SlotTables(device, max_requests=8, max_blocks=6, vocab_size=11, groups=3)
    staging = Staging(device, tables, max_prefill_tokens=64, max_rows=8, entries=4)
    run(device, staging, decode_step(1, (5, 2), block_writes=((5, 0, 7), (5, 6, 8), (2, 11, 4), (5, 12, 9))))
    cells = [tuple(cell) for cell in tables.block_tables_GSP.nonzero().tolist()]
    assert cells == [(0, 5, 0), (1, 2, 5), (1, 5, 0), (2, 5, 0)]
    assert tables.block_tables_GSP[1, 5, 0] == 8
    assert tables.block_table_SP.data_ptr() == tables.block_tables_GSP.data_ptr()
    with pytest.raises(ValueError, match="names block 18 of a request"):
        staging.stage(decode_step(2, (5, 2), block_writes=((5, 18, 7),)))
    forks = (
        Fork(5, 0, copied=(8, 9), in_windows=((2, 3), (1, 4))),
        Fork(1, 0, copied=(8, 6), in_windows=((2, 7), (1, 5))),
    )
    plan = prefill_step(3, (Chunk(3, 4, (10, 11, 12), last=True),), forks=forks)
    run(device, staging, plan)
    assert staging.copied_blocks(plan).tolist() == [[8, 8], [9, 6], [2, 2], [3, 7], [1, 1], [4, 5]]


def test_row_maps_are_padded_with_slot_0_and_keep_their_tensor(device: TwinDevice) -> None:
    _, staging = make_staging(device)
    row_map = staging.row_map("decode", 4)
    run(device, staging, decode_step(1, (3, 1, 2), bucket=4))
    assert row_map.tolist() == [3, 1, 2, 0]
    run(device, staging, decode_step(2, (6,), bucket=4))
    assert row_map.tolist() == [6, 0, 0, 0]
    assert staging.row_map("decode", 4) is row_map


def test_a_steady_step_stages_nothing(device: TwinDevice) -> None:
    _, staging = make_staging(device)
    slots, others = (3, 1), (4,)
    run(device, staging, decode_step(1, slots))
    run(device, staging, decode_step(2, others, bucket=1))
    sent = staging.counters.host_to_device_bytes
    assert sent > 0
    for step in range(3, 50):  # back and forth between buckets whose rows did not change
        assert staging.stage(decode_step(step, slots if step % 2 else others)) is None
    assert staging.counters.host_to_device_bytes == sent
    assert staging.counters.copies == 2


def test_one_copy_whatever_changes(device: TwinDevice) -> None:
    _, staging = make_staging(device)
    writes = tuple(slot_write(slot) for slot in (1, 2, 3))
    run(device, staging, decode_step(1, (1, 2, 3), slot_writes=writes, block_writes=((1, 0, 1), (2, 0, 2))))
    assert staging.counters.copies == 1


def test_chunks_are_packed_with_positions_slots_and_emitting_rows(device: TwinDevice) -> None:
    _, staging = make_staging(device)
    plan = prefill_step(1, (Chunk(3, 4, (10, 11, 12), last=True), Chunk(7, 0, (20, 21), last=False)), bucket=4)
    run(device, staging, plan)
    chunks = staging.chunks(plan)
    assert chunks.token_ids_T.tolist() == [10, 11, 12, 20, 21]
    assert chunks.positions_T.tolist() == [4, 5, 6, 0, 1]
    assert chunks.slots_T.tolist() == [3, 3, 3, 7, 7]
    assert chunks.slots_R.tolist() == [3, 7, 0, 0]
    assert chunks.emitting_R.tolist() == [3, 0, 0, 0]
    assert chunks.logit_rows_R.tolist() == [2, 4, 0, 0]
    run(device, staging, prefill_step(2, (Chunk(1, 0, (5,), last=True),), bucket=4))
    assert staging.chunks(plan).slots_R.tolist() == [1, 0, 0, 0]  # nothing of the earlier rows is left


def test_rows_that_guesses_are_proposed_for_are_none_of_an_earlier_step(device: TwinDevice) -> None:
    """A graph of guesses has more rows than a step that is launched kernel by kernel."""
    _, staging = make_staging(device)
    run(device, staging, prefill_step(1, tuple(Chunk(slot, 0, (5,), last=True) for slot in (4, 5, 6, 7)), bucket=4))
    spec = prefill_step(2, (Chunk(3, 0, (5,), last=True),), bucket=1)
    run(device, staging, spec._replace(shape=spec.shape._replace(proposing=4)))
    assert staging.padded_chunks(4).slots_R.tolist() == [3, 0, 0, 0]
    assert staging.padded_chunks(4).emitting_R.tolist() == [3, 0, 0, 0]


def test_forks_are_packed_as_rows_that_draw_behind_another_ones_chunk(device: TwinDevice) -> None:
    _, staging = make_staging(device)
    chunks = Chunk(3, 4, (10, 11, 12), last=True), Chunk(7, 0, (20, 21), last=True)
    forks = Fork(5, 1, copied=(8, 9)), Fork(1, 0), Fork(2, 0, copied=(4, 6))
    plan = prefill_step(1, chunks, forks=forks, bucket=6)
    run(device, staging, plan)
    packed = staging.chunks(plan)
    assert packed.slots_R.tolist() == [3, 7, 0, 0, 0, 0], "forks have no tokens, so no pages to attend to"
    assert packed.emitting_R.tolist() == [3, 7, 5, 1, 2, 0]
    assert packed.logit_rows_R.tolist() == [2, 4, 4, 2, 2, 0]
    assert packed.decodes_R.tolist() == [0] * 6
    assert staging.copied_blocks(plan).tolist() == [[8, 4], [9, 6]]
    ends_B = packed.state_rows().ends_B
    assert ends_B is not None
    assert ends_B.tolist() == [3, 5, 5, 5, 5, 5]
    assert staging.copied_blocks(prefill_step(2, chunks)).shape == (2, 0)


def test_a_prefill_leaves_row_maps_alone(device: TwinDevice) -> None:
    _, staging = make_staging(device)
    slots = (3, 1)
    run(device, staging, decode_step(1, slots))
    run(device, staging, prefill_step(2, (Chunk(5, 0, (1,), last=True), Chunk(6, 0, (1,), last=True))))
    assert staging.row_map("decode", 2).tolist() == [3, 1]
    assert staging.stage(decode_step(3, slots)) is None


def test_what_a_long_answer_repeats_is_counted_as_far_as_a_count_goes(device: TwinDevice) -> None:
    """As if it had been counted token by token: recomputed it is the same answer."""
    tables, staging = make_staging(device)
    tokens = (7, 7, *[7, 5] * 32_770, *[7] * 40_000, 4)
    write = slot_write(2, tokens, prompt_length=2, sampling=SamplingParams(seed=1, repetition_penalty=1.2))
    run(device, staging, decode_step(0, (2,), slot_writes=(write,)))
    counts = seen_of(tables).counts[2]
    assert counts[[4, 5, 6, 7]].tolist() == [1, 32_767, 0, 32_767]
    assert seen_of(tables).prompt[2].nonzero().flatten().tolist() == [7]


def test_penalised_requests_start_with_their_own_tokens_seen(device: TwinDevice) -> None:
    tables, staging = make_staging(device)
    seen = seen_of(tables)
    seen.counts.fill_(5)
    seen.prompt.fill_(True)
    penalised = SamplingParams(seed=1, repetition_penalty=1.2)
    writes = (
        slot_write(2, (4, 4, 6, 7, 7, 7), prompt_length=3, sampling=penalised),  # recomputed: three generated tokens
        slot_write(3, (1, 2)),
    )
    run(device, staging, decode_step(1, (2, 3), slot_writes=writes))
    assert seen.counts[2].tolist() == [0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0]
    assert seen.prompt[2].nonzero().flatten().tolist() == [4, 6]
    assert (seen.counts[3] == 5).all()  # not penalised: its rows are nobody's business


# ---- plans of attention ----


def chunked(step: int, tokens: int, *, role: str = "prefill") -> LaunchSpec:
    """A captured step of a chunk of so many tokens."""
    spec = prefill_step(step, (Chunk(3, 0, tuple(range(tokens)), last=True),))
    return spec._replace(role=role, captured=tokens)


def entries_of(spec: LaunchSpec) -> npt.NDArray[np.int32]:
    """As many as the step has tokens, each with the step's number."""
    entries_X4 = np.full((spec.captured, 4), spec.plan.step, np.int32)
    entries_X4[:, 1] = np.arange(spec.captured)
    return entries_X4


def attention_of(device: TwinDevice, staging: Staging, role: str = "prefill") -> Tensor:
    """Where that role's plans are put."""
    place_E4 = device.zeros(70, 4, dtype=torch.int32)
    staging.bring_attention_plans(role, lambda spec: entries_of(spec) if spec.captured else None, place_E4)
    return place_E4


def test_plans_of_attention_travel_in_the_copy_of_everything_else(device: TwinDevice) -> None:
    _, staging = make_staging(device)
    run(device, staging, chunked(1, 40))
    alone = staging.counters.host_to_device_bytes
    place_E4 = attention_of(device, staging)
    run(device, staging, chunked(2, 40))
    assert staging.counters.copies == 2
    assert staging.counters.host_to_device_bytes == 2 * alone + 16 * 40
    assert place_E4[:40].tolist() == [[2, i, 2, 2] for i in range(40)]
    assert not place_E4[40:].any()
    run(device, staging, chunked(3, 7))
    assert place_E4[:, 0].tolist() == [3] * 7 + [2] * 33 + [0] * 30, "only what the step's launch reads"


def test_plans_of_attention_are_put_where_their_role_reads_them(device: TwinDevice) -> None:
    _, staging = make_staging(device)
    places = {role: attention_of(device, staging, role) for role in ("prefill", "mixed window of 4")}
    run(device, staging, chunked(1, 5))
    run(device, staging, chunked(2, 5, role="mixed window of 4"))
    run(device, staging, chunked(3, 5, role="somebody without plans"))
    assert [int(place_E4.max()) for place_E4 in places.values()] == [4, 4]
    assert [int(place_E4[0, 0]) for place_E4 in places.values()] == [1, 2]


def test_steps_that_read_no_plan_of_attention_bring_none(device: TwinDevice) -> None:
    _, staging = make_staging(device)
    place_E4 = attention_of(device, staging)
    launched = chunked(1, 40)._replace(captured=0)
    run(device, staging, launched)
    run(device, staging, decode_step(2, (3,)))
    assert not place_E4.any()


def test_the_ring_has_room_for_the_longest_plan_of_attention(device: TwinDevice) -> None:
    _, staging = make_staging(device, max_prefill_tokens=70_000)
    place_E4 = device.zeros(70_000, 4, dtype=torch.int32)
    staging.bring_attention_plans("prefill", entries_of, place_E4)
    for step in range(5):
        run(device, staging, chunked(step, 70_000))
    assert (staging.counters.growths, int(place_E4[-1, 0])) == (0, 4)


@pytest.mark.parametrize("slow", ["stage", "compute"])
def test_every_step_reads_its_own_plan_of_attention(slow: str) -> None:
    """However slow a stream is: the last one is overwritten when the step before has read it, and no sooner."""
    with TwinDevice() as device:
        _, staging = make_staging(device, entries=2)
        place_E4 = attention_of(device, staging)
        device.stream(slow).slow(0.0003)
        seen = torch.zeros(HISTORY, 64, dtype=torch.int32)

        def read(step: int, tokens: int) -> None:
            seen[step, :tokens] = place_E4[:tokens, 0]

        sizes = [1 + step * 29 % 64 for step in range(HISTORY)]
        for step, tokens in enumerate(sizes):
            staged = staging.stage(chunked(step, tokens))
            assert staged is not None
            staging.apply(staged)
            device.compute.submit(partial(read, step, tokens))
        device.synchronize()
    assert seen.tolist() == [[step] * tokens + [0] * (64 - tokens) for step, tokens in enumerate(sizes)]


def test_a_plan_of_attention_without_room_is_refused_and_changes_nothing(device: TwinDevice) -> None:
    _, staging = make_staging(device)

    def refused(spec: LaunchSpec) -> npt.NDArray[np.int32]:
        if spec.captured > 5:
            raise ValueError("there is room for 5")
        return entries_of(spec)

    place_E4 = device.zeros(5, 4, dtype=torch.int32)
    staging.bring_attention_plans("prefill", refused, place_E4)
    with pytest.raises(ValueError, match="there is room for 5"):
        staging.stage(chunked(1, 6))
    assert staging.counters.copies == 0
    run(device, staging, chunked(2, 5))
    assert place_E4[:, 0].tolist() == [2] * 5


# ---- plans that cannot be staged ----


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (decode_step(9, (1,), slot_writes=(slot_write(0),)), r"step 9: a slot write names slots 0\.\.0, .* 1\.\.8"),
        (decode_step(9, (1,), slot_writes=(slot_write(9),)), r"step 9: a slot write names slots 9\.\.9"),
        (decode_step(9, (1,), slot_writes=(slot_write(2), slot_write(2))), "step 9: two slot writes for the same"),
        (decode_step(9, (1,), slot_updates=(SlotUpdate(9, 5, True),)), r"step 9: a slot update names slots 9\.\.9"),
        (
            decode_step(9, (1,), slot_writes=(slot_write(2),), slot_updates=(SlotUpdate(2, 5, False),)),
            "step 9: two slot updates or writes for the same place",
        ),
        (decode_step(9, (1,), block_writes=((0, 0, 3),)), r"step 9: a block write names slots 0\.\.0"),
        (decode_step(9, (1,), block_writes=((1, 6, 3),)), "step 9: .*block 6 of a request.*has 6; see --max-model-len"),
        (decode_step(9, (1,), block_writes=((1, 2, 3), (1, 2, 4))), "step 9: two block writes for the same place"),
        (prefill_step(9, (Chunk(1, 0, (1,) * 65, last=True),)), "step 9: 65 prefill tokens, there is room for 64"),
        (prefill_step(9, (Chunk(1, 0, (1,), last=True),), bucket=9), "step 9: 9 prefill rows, there is room for 8"),
    ],
)
def test_a_bad_plan_is_refused_and_changes_nothing(device: TwinDevice, spec: LaunchSpec, message: str) -> None:
    _, staging = make_staging(device)
    with pytest.raises(ValueError, match=message):
        staging.stage(spec)
    assert staging.counters.copies == 0
    run(device, staging, decode_step(10, (1, 2)))
    assert staging.row_map("decode", 2).tolist() == [1, 2]


def test_staging_twice_without_applying_is_refused(device: TwinDevice) -> None:
    _, staging = make_staging(device)
    assert staging.stage(decode_step(1, (1,))) is not None
    with pytest.raises(RuntimeError, match="step 2 is staged, but step 1 was not applied"):
        staging.stage(decode_step(2, (2,)))


def test_an_entry_that_is_too_small_grows_and_is_counted(device: TwinDevice) -> None:
    tables, staging = make_staging(device)
    long = tuple(token % 11 for token in range(4000))
    penalised = SamplingParams(seed=1, presence_penalty=0.5)
    run(device, staging, decode_step(1, (1,), slot_writes=(slot_write(1, long, sampling=penalised),)))
    assert staging.counters.growths == 1
    assert seen_of(tables).prompt[1].all()


# ---- races ----

HISTORY = 60


def snapshot_history(
    device: TwinDevice, staging: Staging, tables: SlotTables, *, hold: str | None = None
) -> list[list[int]]:
    """Stage a new row map and a block write each step; after each apply the device notes what it then sees.

    The stream ``hold`` does not move until every step is submitted.
    """
    row_map = staging.row_map("decode", 2)
    seen: Tensor = torch.zeros(HISTORY, 3, dtype=torch.int64)

    def note(step: int) -> None:
        seen[step, :2] = row_map
        seen[step, 2] = tables.block_table_SP[1, 0]

    if hold is not None:
        device.stream(hold).pause()
    for step in range(HISTORY):
        slots = (1 + step % 7, 1 + step % 5)
        staged = staging.stage(decode_step(step, slots, block_writes=((1, 0, step + 1),)))
        assert staged is not None
        staging.apply(staged)
        device.compute.submit(partial(note, step))
    if hold is not None:
        device.stream(hold).resume()
    device.synchronize()
    return seen.tolist()


EXPECTED_HISTORY = [[1 + step % 7, 1 + step % 5, step + 1] for step in range(HISTORY)]


@pytest.mark.parametrize("slow", ["stage", "compute"])
def test_every_step_sees_its_own_changes_however_slow_a_stream_is(slow: str) -> None:
    with TwinDevice() as device:
        tables, staging = make_staging(device, entries=2)
        device.stream(slow).slow(0.0003)
        assert snapshot_history(device, staging, tables) == EXPECTED_HISTORY


@pytest.mark.parametrize("seed", range(6))
def test_every_step_sees_its_own_changes_under_jitter(seed: int) -> None:
    with TwinDevice(jitter_s=0.0002, seed=seed) as device:
        tables, staging = make_staging(device, entries=random.Random(seed).choice((1, 2, 3)))
        assert snapshot_history(device, staging, tables) == EXPECTED_HISTORY


def test_the_host_waits_for_an_entry_whose_copy_has_not_left(device: TwinDevice) -> None:
    _, staging = make_staging(device, entries=1)
    device.stream("stage").pause()
    first = staging.stage(decode_step(1, (1, 2)))
    assert first is not None
    staging.apply(first)
    later = threading.Thread(target=lambda: run(device, staging, decode_step(2, (3, 4))))
    later.start()
    while staging.counters.waits == 0:
        time.sleep(0.001)
    device.stream("stage").resume()
    later.join()
    assert staging.row_map("decode", 2).tolist() == [3, 4]


def test_without_the_host_guard_a_copy_in_flight_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Staging, "_await_copied", lambda self, entry: None)
    with TwinDevice() as device:
        tables, staging = make_staging(device, entries=2)
        history = snapshot_history(device, staging, tables, hold="stage")
        assert history[0] == EXPECTED_HISTORY[HISTORY - 2]  # the first step saw what a later one had packed


def test_without_the_device_guard_an_apply_reads_a_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Staging, "_await_applied", lambda self, entry: None)
    with TwinDevice() as device:
        tables, staging = make_staging(device, entries=2)
        history = snapshot_history(device, staging, tables, hold="compute")
        assert history[0][2] > 1  # the first step's block write was a later one's


def test_without_the_copied_event_an_apply_reads_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    with TwinDevice() as device:
        _, staging = make_staging(device)
        monkeypatch.setattr(device.compute, "wait", lambda event: None)
        device.stream("stage").pause()
        staged = staging.stage(decode_step(1, (1,), block_writes=((1, 0, 5),)))
        assert staged is not None
        staging.apply(staged)
        with pytest.raises(DeviceError, match="index -1 is out of bounds"):  # what empty memory is filled with
            device.compute.synchronize()


def test_ends_move_and_only_who_is_new_in_a_slot_begins_with_fresh_state(device: TwinDevice) -> None:
    tables, staging = make_staging(device)
    fresh: list[list[int]] = []
    staging.on_seated = lambda slots_N: fresh.append(slots_N.tolist())
    resumed = replace(slot_write(2, (1, 2, 3)), resumes=True)
    run(device, staging, decode_step(1, (1, 2), slot_writes=(slot_write(1), resumed)))
    run(device, staging, decode_step(2, (1, 2), slot_writes=(resumed,)))
    run(device, staging, decode_step(3, (1, 2), slot_updates=(SlotUpdate(1, 77, False), SlotUpdate(2, 78, True))))
    assert fresh == [[1]]
    assert tables.columns.max_length.tolist()[1:3] == [77, 78]

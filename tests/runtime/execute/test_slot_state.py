"""Slot records: what is written is what the sampler reads, column by column."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from runtime.execute.device.cpu_twin import TwinDevice
from runtime.execute.sampling.penalties import PenaltyFeature
from runtime.execute.slot_state import SlotColumns, SlotTables, check_stop_ids, fill_record, record_dtype
from runtime.schedule.request import FinishReason, SamplingParams
from tests.runtime.execute.plans import slot_write


@pytest.fixture
def device() -> Iterator[TwinDevice]:
    with TwinDevice() as opened:
        yield opened


SAMPLING = SamplingParams(
    temperature=0.75,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.25,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    seed=12345678901234567,
)


@pytest.mark.parametrize("stop_ids", [1, 2, 5, 16])
def test_every_field_arrives_in_its_column(stop_ids: int) -> None:
    write = slot_write(3, (7, 8, 9), epoch=4, stop_token_ids=(5,), sampling=SAMPLING)
    records = np.zeros(2, record_dtype(stop_ids))
    fill_record(records[1:2], write, stop_ids)
    words = torch.from_numpy(records.view(np.int32).reshape(2, -1))
    columns = SlotColumns(words, stop_ids)
    assert columns.last_token.tolist() == [0, 9]
    assert columns.seed.tolist() == [0, 12345678901234567]
    assert columns.length.tolist() == [0, 3]
    assert columns.epoch.tolist() == [0, 4]
    assert columns.finished.tolist() == [0, 0]
    assert columns.min_length.tolist() == [0, 3]
    assert columns.max_length.tolist() == [0, 19]
    assert columns.top_k.tolist() == [0, 40]
    assert columns.temperature.tolist() == [0.0, 0.75]
    assert columns.top_p[1].item() == pytest.approx(0.9)
    assert columns.min_p[1].item() == pytest.approx(0.05)
    assert columns.repetition_penalty.tolist() == [0.0, 1.25]
    assert columns.presence_penalty.tolist() == [0.0, 0.5]
    assert columns.frequency_penalty.tolist() == [0.0, -0.5]
    assert columns.stop_ids_NK[1].tolist() == [5] + [-1] * (stop_ids - 1)


@pytest.mark.parametrize(("seed", "held"), [(-1, -1), (2**63, -(2**63)), (2**64 + 5, 5), (0, 0)])
def test_any_integer_is_a_seed(seed: int, held: int) -> None:
    records = np.zeros(1, record_dtype(2))
    fill_record(records, slot_write(1, sampling=SamplingParams(seed=seed)), 2)
    assert records["seed"].tolist() == [held]


def test_too_many_stop_ids_are_refused_with_both_numbers() -> None:
    check_stop_ids(7, (1, 2), 2)
    with pytest.raises(ValueError, match=r"request 7: 3 stop token ids.*a slot holds 2"):
        check_stop_ids(7, (1, 2, 3), 2)


def test_a_request_without_a_drawn_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="request 101: the seed must be drawn"):
        fill_record(np.zeros(1, record_dtype(2)), slot_write(1, sampling=SamplingParams()), 2)


def test_every_slot_starts_finished_with_trash_blocks(device: TwinDevice) -> None:
    tables = SlotTables(device, max_requests=3, max_blocks=5, vocab_size=11)
    assert tables.columns.finished.tolist() == [int(FinishReason.STOP)] * 4
    assert tables.block_table_SP.shape == (4, 5)
    assert not tables.block_table_SP.any()


def test_gather_copies_and_store_writes_by_slot(device: TwinDevice) -> None:
    tables = SlotTables(device, max_requests=4, max_blocks=2, vocab_size=11)
    rows = torch.tensor([3, 1, 0, 0])
    before = tables.gather(rows)
    finished = torch.tensor([0, 2, 1, 1], dtype=torch.int32)
    tables.store(
        rows,
        torch.tensor([30, 10, 0, 0]),
        torch.tensor([33, 11, 0, 0], dtype=torch.int32),
        finished,
    )
    assert tables.columns.last_token.tolist() == [0, 10, 0, 30, 0]
    assert tables.columns.length.tolist() == [0, 11, 0, 33, 0]
    assert tables.columns.finished.tolist() == [1, 2, 1, 0, 1]
    assert before.length.tolist() == [0, 0, 0, 0]
    sampling = tables.gather(rows).sampling()
    assert sampling.position.tolist() == [33, 11, 0, 0]
    assert sampling.position.dtype == torch.int64
    assert sampling.finished.tolist() == [False, True, True, True]


def test_large_late_tables_wait_for_the_first_request_that_needs_them(device: TwinDevice) -> None:
    at_once = SlotTables(device, max_requests=3, max_blocks=1, vocab_size=100, late_bytes=1200)
    assert all(feature.tables is not None for feature in at_once.features)
    late = SlotTables(device, max_requests=3, max_blocks=1, vocab_size=100, late_bytes=1199)
    (waiting,) = (feature for feature in late.features if feature.tables is None)
    assert isinstance(waiting, PenaltyFeature)
    first = waiting.need()
    assert waiting.need() is first
    assert first.counts.shape == first.prompt.shape == (4, 100)


def test_an_end_that_moves_revives_only_who_is_to_go_on(device: TwinDevice) -> None:
    """Slot 1 is revived; slot 2 has been ended by a stop id in a step that the host has not read yet, and stays ended;
    slot 3 runs. Nothing else of the records changes."""
    tables = SlotTables(device, max_requests=4, max_blocks=2, vocab_size=8)
    columns = tables.columns
    columns.finished[1:4] = torch.tensor([int(FinishReason.LENGTH), int(FinishReason.STOP), int(FinishReason.NONE)])
    columns.max_length[1:4] = torch.tensor([10, 20, 30], dtype=torch.int32)
    before = columns.records.clone()
    tables.move_ends(*torch.tensor([[1, 2, 3], [14, 24, 34], [1, 0, 0]]))
    assert columns.max_length.tolist()[1:4] == [14, 24, 34]
    assert columns.finished.tolist()[1:4] == [FinishReason.NONE, FinishReason.STOP, FinishReason.NONE]
    columns.max_length[1:4] = torch.tensor([10, 20, 30], dtype=torch.int32)
    columns.finished[1] = int(FinishReason.LENGTH)
    assert torch.equal(columns.records, before)

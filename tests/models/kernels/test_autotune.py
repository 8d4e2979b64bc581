"""The table of kernel choices: its keys, its file, and candidates that fit the shape they are for."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch

from models.kernels.matmul import autotune, candidates, choice_table
from models.kernels.matmul.choice_table import Blas, ChoiceTable, CublasLt, Gemv, LinearShape, Skinny, Wide

BF16 = torch.bfloat16
SHAPES = [
    LinearShape(rows, outputs, inner, dtype, normed, gate_up)
    for rows in (1, 2, 4, 11, 64, 200, 4096)
    for outputs, inner in ((6144, 4096), (1024, 3072), (4096, 12288), (151936, 1024), (96, 60), (24576, 4096))
    for dtype in (BF16, torch.float32)
    for normed, gate_up in ((False, False), (True, False), (True, True))
]
TABLE = ChoiceTable(
    {
        LinearShape(1, 6144, 4096, BF16).key: Gemv(4, 1024, 4, 2048),
        LinearShape(8, 6144, 4096, BF16, normed=True).key: Skinny(8, 64, 128, 2, 5, 4, 128, fold=True),
        LinearShape(128, 24576, 4096, BF16, normed=True, gate_up=True).key: CublasLt("00ff" * 32, 130400),
        LinearShape(256, 4096, 4096, torch.float16).key: Blas(),
    }
)


def test_rows_share_a_choice_up_to_the_next_power_of_two() -> None:
    keys = {rows: LinearShape(rows, 8, 8, BF16).key for rows in range(1, 18)}
    assert keys[3] == keys[4] != keys[5]
    assert keys[9] == keys[16] != keys[17]
    forms = {LinearShape(1, 8, 8, BF16, normed, gate_up).key for normed in (False, True) for gate_up in (False, True)}
    assert len(forms) == 4


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "table.json"
    assert choice_table.load(path) == ChoiceTable()
    choice_table.save(path, TABLE)
    assert choice_table.load(path) == TABLE
    assert [entry.name for entry in path.parent.iterdir()] == ["table.json"], "no temporary file stays behind"


def test_a_cache_that_cannot_be_used_ends_no_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may be torn, or of another version; the home folder of a compute node may be read-only."""
    torn = tmp_path / "table.json"
    torn.write_text('{"format": 1, "cho')
    not_a_folder = tmp_path / "file"
    not_a_folder.write_text("")
    with caplog.at_level(logging.WARNING):
        assert choice_table.recall(torn) == ChoiceTable()
        choice_table.keep(not_a_folder / "table.json", TABLE)
    read, written = [record.getMessage() for record in caplog.records]
    assert str(torn) in read
    assert str(not_a_folder) in written
    assert "--kernel-cache" in written
    choice_table.keep(torn, TABLE)
    assert choice_table.recall(torn) == TABLE


def test_updating_takes_over_the_other_table() -> None:
    mine = ChoiceTable({next(iter(TABLE.choices)): Blas(), "kept": Blas()})
    mine.update(TABLE)
    assert mine.choices == TABLE.choices | {"kept": Blas()}


def test_filling_keeps_its_own_choices() -> None:
    first, *rest = TABLE.choices
    mine = ChoiceTable({first: Blas()})
    mine.fill(TABLE)
    assert mine.choices == {key: TABLE.choices[key] for key in rest} | {first: Blas()}


def test_decode_steps_and_full_prefill_steps_are_worth_measuring() -> None:
    rows = (1, 7, 200, 256, 300, 8191, 8192)
    measured = [count for count in rows if candidates.worth_measuring(LinearShape(count, 6144, 4096, BF16))]
    assert measured == [1, 7, 200, 256, 8192]


def test_a_start_up_tries_nothing_that_must_be_compiled_for_it() -> None:
    algorithms = [CublasLt(f"{i:02x}", 1) for i in range(20)]
    for shape in SHAPES:
        tried = candidates.quick_candidates(shape, algorithms)
        compiled = [choice for choice in tried if isinstance(choice, Gemv | Skinny | Wide)]
        assert compiled == [choice for choice in [candidates.default_choice(shape)] if choice != Blas()]
        assert tried.count(Blas()) == 1
        assert tried[-8:] == algorithms[:8]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 2, "choices": {}}',
        '{"format": 1, "choices": {"x": ["spell", {}]}}',
        '{"format": 1, "choices": {"x": ["gemv", {"block_o": 1}]}}',
        '{"format": 1, "choices": ["x"]}',
    ],
)
def test_a_damaged_file_is_refused_with_what_to_do(text: str) -> None:
    with pytest.raises(ValueError, match="delete the file"):
        ChoiceTable.from_json(text)


def test_shipped_tables_are_readable() -> None:
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    from models.kernels.matmul.dispatch import SHIPPED_CHOICES

    shipped = list(SHIPPED_CHOICES.glob("*.json"))
    assert shipped
    for path in shipped:
        assert choice_table.load(path).choices


@pytest.mark.parametrize("rows", sorted({shape.rows for shape in SHAPES}))
def test_candidates_fit_their_shape(rows: int) -> None:
    for shape, choice in [(s, c) for s in SHAPES if s.rows == rows for c in candidates.candidates_for(s.bucket)]:
        bucket = shape.bucket
        if isinstance(choice, Gemv):
            assert bucket.rows <= 4
            assert shape.inner % choice.chunk == 0
            assert (shape.outputs // (2 if shape.gate_up else 1)) % choice.block_o == 0
            assert choice.prefetch <= shape.inner - choice.chunk
        elif isinstance(choice, Wide):
            assert shape.dtype is BF16
            assert bucket.rows <= choice.block_m <= 4 * choice.block_o
            assert shape.outputs % choice.block_o == 0
            assert shape.inner % (choice.block_k * choice.split) == 0
            assert choice.stages * 2 * choice.block_k * (choice.block_m + choice.block_o) <= 227 << 10
            assert choice.prefetch <= shape.inner // choice.split
        else:
            assert isinstance(choice, Skinny)
            assert shape.dtype is BF16
            assert shape.outputs % choice.block_o == 0
            assert shape.inner % (choice.block_k * choice.split) == 0
            assert choice.block_m == min(128, max(8, bucket.rows))
            assert choice.prefetch <= shape.inner // choice.split
            assert not choice.fold or shape.normed


def test_the_default_is_a_candidate_or_cublas() -> None:
    for shape in SHAPES:
        default = candidates.default_choice(shape)
        assert default == Blas() or default in candidates.candidates_for(shape.bucket)
        if shape.rows > 32:
            assert default == Blas()
        if shape.rows == 1 and shape.inner % 1024 == 0:
            assert isinstance(default, Gemv)


def test_no_prefetch_is_worth_less_than_a_line_or_half_the_cache() -> None:
    assert candidates.prefetch_columns(4096, 4096) == 2048
    assert candidates.prefetch_columns(1024, 1024) == 1024
    assert candidates.prefetch_columns(1024, 63) == 0
    assert candidates.prefetch_columns(1 << 20, 4096) == 0


def test_fastest_passes_over_what_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = LinearShape(1, 8, 8, BF16)
    times: dict[choice_table.Choice, float] = {Blas(): 3.0, Gemv(4, 8, 1): float("inf"), Gemv(2, 8, 1): 2.0}
    monkeypatch.setattr(autotune, "measure", lambda shape, choices, run, device: [(c, times[c]) for c in choices])

    def run(x: torch.Tensor, weight: torch.Tensor, choice: choice_table.Choice) -> torch.Tensor:
        raise AssertionError("measure was replaced")

    assert autotune.fastest(shape, times, run, torch.device("cpu")) == (Gemv(2, 8, 1), 2.0)
    with pytest.raises(RuntimeError, match=dataclasses.replace(shape).key):
        autotune.fastest(shape, [Gemv(4, 8, 1)], run, torch.device("cpu"))

"""The table of kernel choices: its keys, its file, and candidates that fit the shape they are for."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.kernels.matmul import autotune, candidates, choice_table
from models.kernels.matmul.choice_table import Blas, ChoiceTable, CublasLt, Gemv, LinearShape, Skinny, Wide
from models.kernels.traits import H200
from models.row_buckets import every_bucket, power_of_two_from
from parallel.layers.weight import Weight

BF16 = torch.bfloat16
H100 = dataclasses.replace(H200, l2_bytes=50 << 20, memory_rate=3.35e12, name="NVIDIA H100 80GB HBM3")
SHAPES = [
    LinearShape(rows, outputs, inner, dtype, normed, gate_up)
    for rows in (1, 2, 4, 11, 40, 64, 200, 224, 4096)
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


def test_a_product_is_keyed_by_its_real_bucket() -> None:
    keys = {rows: LinearShape(rows, 8, 8, BF16).key for rows in range(1, 8193)}
    ladders = every_bucket(256, 8192)
    assert {40, 48, 192, 224, 320, 384, 448, 1152, 7680} <= set(ladders)
    assert [keys[rows] for rows in ladders] == [f"bfloat16 8x8 x{rows}" for rows in ladders]
    assert keys[3] == keys[4] != keys[5] == keys[8] != keys[9] == keys[16] != keys[17] == keys[24]
    assert keys[300] == keys[320] != keys[288], "a row count of neither ladder has the key of the next rung"
    forms = {LinearShape(1, 8, 8, BF16, normed, gate_up).key for normed in (False, True) for gate_up in (False, True)}
    assert len(forms) == 4


def test_a_key_says_what_it_stands_for() -> None:
    for shape in SHAPES:
        assert LinearShape.from_key(shape.key) == shape.bucket
    for wrong in (
        "bfloat16 8x8 x7",
        "bfloat16 8x8",
        "nosuch 8x8 x8",
        "bfloat16 8x8 gate_up normed x8",
        "bfloat16 8 x8",
    ):
        with pytest.raises(ValueError):  # noqa: PT011 - whichever part is wrong
            LinearShape.from_key(wrong)


@pytest.mark.parametrize(
    ("measured", "rows", "expected"),
    [
        ((32, 64), 40, [64]),  # a smaller bucket never stands in
        ((40, 64), 40, [40, 64]),
        ((48, 56, 64, 128), 41, [48, 56, 64]),  # the nearest first, and no further than the next power of two
        ((64,), 32, []),
        ((64,), 33, [64]),
        ((128, 256), 112, [128]),
        ((256, 512), 160, []),  # from here on time follows the rows: a quarter more at most
        ((192, 256), 160, [192]),
        ((256, 512), 224, [256]),
        ((256, 512), 257, []),
        ((384, 448, 512), 320, [384]),
        ((2304, 4096), 2048, [2304]),
        ((8192,), 8190, [8192]),
        ((4,), 3, [4]),
    ],
)
def test_the_next_larger_measured_bucket_stands_in(measured: tuple[int, ...], rows: int, expected: list[int]) -> None:
    table = ChoiceTable()
    for number in measured:
        table.put(LinearShape(number, 6144, 4096, BF16), Gemv(1, number, 4))
        table.put(LinearShape(number, 6144, 4096, BF16, normed=True), Blas())
    found = list(table.near(LinearShape(rows, 6144, 4096, BF16)))
    assert found == [(number, Gemv(1, number, 4)) for number in expected]


def test_a_table_for_powers_of_two_means_what_it_meant() -> None:
    """Format 1 rounded rows up to a power of two. Of more than 128, those far below it are measured anew."""
    rows = [1 << power for power in range(9)]
    table = ChoiceTable({f"bfloat16 6144x4096 x{number}": Gemv(1, number, 4) for number in rows})
    old = table.to_json().replace('"format": 2', '"format": 1')
    table = ChoiceTable.from_json(old)
    assert table.gpu is None
    for number in range(1, 257):
        found = [choice for _, choice in table.near(LinearShape(number, 6144, 4096, BF16))]
        assert found == [Gemv(1, power_of_two_from(number), 4)] * (number not in range(129, 193))


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "table.json"
    assert choice_table.load(path) == ChoiceTable()
    choice_table.save(path, TABLE)
    assert choice_table.load(path) == TABLE
    measured = dataclasses.replace(TABLE, gpu=H100)
    choice_table.save(path, measured)
    assert choice_table.load(path) == measured
    assert [entry.name for entry in path.parent.iterdir()] == ["table.json"], "no temporary file stays behind"


@pytest.mark.parametrize("step", ["write_text", "replace"])
def test_a_full_disk_leaves_the_old_table_and_no_temporary_file(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    choice_table.save(path, TABLE)

    def full(file: Path, *rest: Any) -> None:
        if step == "write_text":
            file.write_bytes(b"{")  # as much as fits
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, step, full)
        with pytest.raises(OSError, match="No space left"):
            choice_table.save(path, ChoiceTable())
    assert choice_table.load(path) == TABLE
    assert [entry.name for entry in tmp_path.iterdir()] == ["table.json"]


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


def test_a_table_is_found_by_name_else_by_what_the_gpu_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine, faster = (ChoiceTable({"bfloat16 8x8 x8": choice}) for choice in (Blas(), Gemv(1, 8, 1)))
    choice_table.save(tmp_path / "any-name.json", dataclasses.replace(mine, gpu=H100))
    choice_table.save(tmp_path / "nvidia-h200.json", faster)  # of format 1, the file's name is all there is
    found = {
        name: choice_table.shipped_for(tmp_path, dataclasses.replace(H100, name=name)) for name in (H100.name, "x")
    }
    assert found[H100.name].choices == found["x"].choices == mine.choices
    assert choice_table.shipped_for(tmp_path, H200).choices == faster.choices
    with caplog.at_level(logging.INFO):
        choice_table.shipped_for(tmp_path, dataclasses.replace(H100, name="NVIDIA H800"))
    assert "no kernels were measured on a NVIDIA H800: those of a NVIDIA H100 80GB HBM3 are used" in caplog.text
    for other in (
        {"multiprocessors": 114},
        {"capability": (10, 0)},
        {"memory_rate": 4.0e12},
        {"memory_rate": 0.0},  # the driver does not tell
    ):
        gpu = dataclasses.replace(H100, name="another", **other)
        assert choice_table.shipped_for(tmp_path, gpu).choices == {}, other


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
        '{"format": 3, "choices": {}}',
        '{"format": 2, "gpu": {"name": "NVIDIA H200"}, "choices": {}}',
        '{"format": 1, "choices": {"x": ["spell", {}]}}',
        '{"format": 1, "choices": {"x": ["gemv", {"block_o": 1}]}}',
        '{"format": 1, "choices": ["x"]}',
        '{"format": 2, "choices": {"bfloat16 8x8 x7": ["blas", {}]}}',
        '{"format": 2, "choices": {}, "attention": {"bfloat16 4x128 x8": {"tma": true}}}',
        '{"format": 2, "choices": {}, "all_reduce": {"two": {"one_shot": 1, "two_shot": 0}}}',
    ],
)
def test_a_damaged_file_is_refused_with_what_to_do(text: str) -> None:
    with pytest.raises(ValueError, match="delete the file"):
        ChoiceTable.from_json(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"choices": {"bfloat16 8x8 x8": ["gemv", {"block_o": "1", "chunk": 8, "warps": 4}]}',
         "block_o of choices 'bfloat16 8x8 x8' is '1', but must be int"),
        ('"choices": {"bfloat16 8x8 x8": ["gemv", {"block_o": 1, "chunk": 8.0, "warps": 4}]}',
         "chunk of choices 'bfloat16 8x8 x8' is 8.0, but must be int"),
        ('"choices": {"bfloat16 8x8 x8": ["gemv", {"block_o": 1, "chunk": 8, "warps": true}]}',
         "warps of choices 'bfloat16 8x8 x8' is True, but must be int"),
        ('"choices": {"bfloat16 8x8 x8": ["cublaslt", {"algorithm": 5, "version": 1}]}',
         "algorithm of choices 'bfloat16 8x8 x8' is 5, but must be str"),
        ('"choices": {}, "attention": {"k": {"tma": 1, "block_n": 64, "stages": 2, "warps": 4}}',
         "tma of attention 'k' is 1, but must be bool"),
        ('"choices": {}, "all_reduce": {"2": {"one_shot": null, "two_shot": 0}}',
         "one_shot of all_reduce '2' is None, but must be int"),
        ('"choices": {}, "gpu": {"capability": [9, "0"], "multiprocessors": 1, "shared_bytes": 1}',
         "capability of gpu is (9, '0'), but must be tuple[int, int]"),
        ('"choices": {}, "gpu": {"capability": [9], "multiprocessors": 1, "shared_bytes": 1}',
         "capability of gpu is (9,), but must be tuple[int, int]"),
        ('"choices": {}, "gpu": {"capability": [9, 0], "multiprocessors": 1, "shared_bytes": 1, "memory_rate": "4e12"}',
         "memory_rate of gpu is '4e12', but must be float"),
    ],
)  # fmt: skip
def test_a_field_of_a_wrong_type_is_refused_by_its_name_and_the_file_s(
    text: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "table.json"
    path.write_text('{"format": 2, ' + text + "}")
    assert choice_table.recall(path) == ChoiceTable()
    (logged,) = caplog.messages
    assert str(path) in logged
    assert said in logged


def test_a_number_without_a_fraction_is_a_float_too() -> None:
    text = dataclasses.replace(TABLE, gpu=dataclasses.replace(H100, memory_rate=4)).to_json()
    assert ChoiceTable.from_json(text).gpu == dataclasses.replace(H100, memory_rate=4.0)


def test_shipped_tables_are_readable() -> None:
    shipped = list(choice_table.SHIPPED_CHOICES.glob("*.json"))
    assert shipped
    for path in shipped:
        table = choice_table.load(path)
        assert table.gpu is not None
        assert path.stem == choice_table.file_name(table.gpu.name)
        assert [LinearShape.from_key(key).key for key in table.choices] == list(table.choices)


@pytest.mark.parametrize("rows", sorted({shape.rows for shape in SHAPES}))
def test_candidates_fit_their_shape(rows: int) -> None:
    for shape, choice in [(s, c) for s in SHAPES if s.rows == rows for c in candidates.candidates_for(s.bucket)]:
        bucket = shape.bucket
        if isinstance(choice, Gemv):
            assert bucket.rows <= 4
            assert shape.inner % choice.chunk == 0 or (shape.inner % 512 and 2 * choice.chunk <= shape.inner)
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
            assert choice.block_m == min(128, max(8, power_of_two_from(bucket.rows)))
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


class _WarmingGpu:
    """Stands in for the GPU and its graphs: a kernel has a time while the GPU is cool, and another after LOAD seconds.

    ``seconds`` of work so far; ``ran``: the kernel of the latest launch.
    """

    LOAD = 0.05

    def __init__(self, cool: dict[choice_table.Choice, float], hot: dict[choice_table.Choice, float]) -> None:
        self._cool, self._hot, self.seconds = cool, hot, 0.0
        self.ran: choice_table.Choice | None = None

    def run(self, x: torch.Tensor, weight: Weight, choice: choice_table.Choice) -> torch.Tensor:
        if choice not in self._cool:
            raise RuntimeError("not on this GPU")
        self.ran = choice
        return x

    def median_graph_us(self, launch: Callable[[], None], device: torch.device, replays: int = 12) -> float:
        launch()
        assert self.ran is not None
        us = (self._cool if self.seconds < self.LOAD else self._hot)[self.ran]
        self.seconds += us * replays / 1e6
        return us


@pytest.fixture
def timed_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[_WarmingGpu], None]:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(autotune, "_COLD_BYTES", 1)

    def put(gpu: _WarmingGpu) -> None:
        monkeypatch.setattr(autotune, "median_graph_us", gpu.median_graph_us)

    return put


CPU = torch.device("cpu")


def test_fastest_passes_over_what_does_not_run(timed_by: Callable[[_WarmingGpu], None]) -> None:
    for rows in (1, 512):
        shape = LinearShape(rows, 8, 8, BF16)
        times: dict[choice_table.Choice, float] = {Blas(): 3.0, Gemv(2, 8, 1): 2.0}
        gpu = _WarmingGpu(times, times)
        timed_by(gpu)
        tried: list[choice_table.Choice] = [Gemv(4, 8, 1), Blas(), Gemv(4, 8, 2), Gemv(2, 8, 1)]
        assert autotune.fastest(shape, tried, gpu.run, CPU) == (Gemv(2, 8, 1), 1.0)  # of one of two weights
        with pytest.raises(RuntimeError, match=shape.key):
            autotune.fastest(shape, [Gemv(4, 8, 1)], gpu.run, CPU)


def test_of_many_rows_the_fastest_is_that_of_a_warm_gpu(timed_by: Callable[[_WarmingGpu], None]) -> None:
    """In whatever order they come: a cool GPU would give each first one 200 us, and hungry ones more than they hold."""
    names: list[choice_table.Choice] = [Blas(), CublasLt("00", 1), CublasLt("01", 1), CublasLt("02", 1)]
    cool = dict(zip(names, (200.0, 220.0, 180.0, 230.0), strict=True))
    hot = dict(zip(names, (240.0, 232.0, 300.0, 236.0), strict=True))
    for tried in itertools.permutations(names):
        gpu = _WarmingGpu(cool, hot)
        timed_by(gpu)
        assert autotune.fastest(LinearShape(4096, 8, 8, BF16), tried, gpu.run, CPU) == (names[1], 116.0)
        assert gpu.seconds < 1.0, "of a start"


def test_of_many_rows_what_drifts_hits_all_alike(timed_by: Callable[[_WarmingGpu], None]) -> None:
    """Each measurement takes longer than the one before, by more than the kernels differ."""
    names: list[choice_table.Choice] = [Blas(), CublasLt("00", 1), CublasLt("01", 1)]
    held = dict(zip(names, (210.0, 208.0, 209.0), strict=True))

    class Drifting(_WarmingGpu):
        drift = 0.0

        def median_graph_us(self, launch: Callable[[], None], device: torch.device, replays: int = 12) -> float:
            self.drift += 2.0
            return super().median_graph_us(launch, device, replays) + self.drift

    for tried in itertools.permutations(names):
        gpu = Drifting(held, held)
        timed_by(gpu)
        assert autotune.fastest(LinearShape(4096, 8, 8, BF16), tried, gpu.run, CPU)[0] == names[1]


def test_few_rows_are_timed_once(timed_by: Callable[[_WarmingGpu], None]) -> None:
    times: dict[choice_table.Choice, float] = {Blas(): 30.0, Gemv(2, 8, 1): 29.0}
    gpu = _WarmingGpu(times, times)
    timed_by(gpu)
    assert autotune.fastest(LinearShape(256, 8, 8, BF16), times, gpu.run, CPU)[0] == Gemv(2, 8, 1)
    assert gpu.seconds == pytest.approx(12 * 59e-6)

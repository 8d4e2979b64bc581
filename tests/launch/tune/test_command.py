"""`launch tune` from its command line to a table that a start-up finds, over a GPU that is played (fake_gpu.py)."""

from __future__ import annotations

import dataclasses
import errno
import importlib
import io
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import launch.__main__ as entry
from launch.cli import parse
from launch.errors import UsageError
from launch.ranks.rendezvous import discover
from launch.tune import command as tune
from launch.tune.journal import Journal, Measured
from launch.tune.options import PARTS, TuneCommand
from models.kernels.matmul import choice_table
from models.kernels.matmul.choice_table import Blas, ChoiceTable, LinearShape
from models.kernels.traits import H200
from tests.launch.tune.fake_gpu import FAST, SLOW, FakeGpu

SHAPES = Path(__file__).parents[3] / "models" / "shapes"
GPU = dataclasses.replace(H200, name="NVIDIA Of Tests")
TWO_RANKS = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def refused(words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(entry, "_end_with_launcher", lambda: None)
    assert entry.main(["tune", *words]) == 2
    said = capfd.readouterr().err
    assert said.startswith("lockstride tune: error: ")
    assert said.count("\n") == 1, said
    return said


# ---- what is refused ----


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    said = refused(["--model", "qwen3-8b"], monkeypatch, capfd)
    assert "measures on a GPU, and torch" in said
    assert "(CUDA_VISIBLE_DEVICES=-1)" in said
    assert "python -m launch doctor" in said


def test_an_unknown_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert "--model qwen9: there is no such folder, and no such shape" in refused(
        ["--model", "qwen9"], monkeypatch, capfd
    )
    assert f"{tmp_path} holds no config.json" in refused(["--model", str(tmp_path)], monkeypatch, capfd)
    (tmp_path / "config.json").write_text(
        (SHAPES / "qwen3-8b" / "config.json").read_text().replace("Qwen3ForCausalLM", "NoSuchModel")
    )
    assert "NoSuchModel" in refused(["--model", str(tmp_path)], monkeypatch, capfd)


def test_a_split_that_cannot_be(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "qwen3-8b", "--tensor-parallel-size", "3"]
    said = refused(words, monkeypatch, capfd)
    assert "cannot be split over 3 tensor-parallel ranks" in said
    assert "use a tensor-parallel size out of [1, 2, 4, 8" in said


def test_more_ranks_than_were_started() -> None:
    with pytest.raises(UsageError, match="--tensor-parallel-size is 4, but 2 ranks were started: leave it out"):
        tune.rank_share(TuneCommand("qwen3-8b", tensor_parallel=4), discover(TWO_RANKS))
    assert tune.rank_share(TuneCommand("qwen3-8b"), discover(TWO_RANKS)).ranks == 2
    four = {**TWO_RANKS, "WORLD_SIZE": "4", "GROUP_RANK": "0"}
    with pytest.raises(UsageError, match="2 nodes were started"):
        tune.rank_share(TuneCommand("qwen3-8b"), discover(four))


def test_products_of_a_checkpoint_that_is_quantised_at_load() -> None:
    share = tune.rank_share(TuneCommand("qwen3-8b", quantization="fp8"), discover({}))
    tasks = tune.tasks_of(TuneCommand("qwen3-8b", rows=(8,)), share)
    keys = {task.what.key for task in tasks if isinstance(task.what, LinearShape)}
    assert {key for key in keys if "fp8_1xall" in key}
    assert {key for key in keys if "151936" in key and "fp8" not in key}, "the head stays"


def test_rows_of_no_bucket() -> None:
    share = tune.rank_share(TuneCommand("qwen3-0.6b"), discover({}))
    with pytest.raises(UsageError, match=r"--rows 41,8191: no step has so many rows; choose from 1,2,4,8,16,24"):
        tune.tasks_of(TuneCommand("qwen3-0.6b", rows=(8, 41, 8191)), share)
    assert {task.rows for task in tune.tasks_of(TuneCommand("qwen3-0.6b", rows=(8, 320)), share)} == {8, 320}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "--model"),
        (["--model", "m", "--parts", "products,sampling"], "'sampling' is not one of all-reduce, products, attention"),
        (["--model", "m", "--rows", "8,8"], "names a number twice"),
        (["--model", "m", "--budget-minutes", "0"], "0 is not at least 0.1"),
        (["--model", "m", "--dtype", "int8"], "invalid choice"),
        (["--mod", "m"], "--model"),
    ],
)
def test_a_wrong_command_line(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["tune", *words])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_defaults_are_those_of_the_engine() -> None:
    assert parse(["tune", "--model", "m"]) == TuneCommand("m")
    assert parse(["tune", "--model", "m", "--parts", "attention", "--budget-minutes", "7.5", "--fresh"]) == TuneCommand(
        "m", parts=("attention",), budget_minutes=7.5, fresh=True
    )
    assert (TuneCommand("m").max_num_seqs, TuneCommand("m").max_prefill_tokens) == (256, 8192)
    assert TuneCommand("m").parts == PARTS


# ---- a run ----


class Machine:
    """Runs of `tune` on one machine, whose GPU is fake."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.gpu, self.told = folder, FakeGpu(), list[str]()
        kernels = Mock()
        kernels.matmul.candidates.return_value = []
        monkeypatch.setattr(tune, "gpu_of", lambda rendezvous, environ: torch.device("cuda", 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: GPU.name)
        monkeypatch.setattr(tune, "traits_of", lambda device: GPU)
        monkeypatch.setattr(tune.Session, "_kernels", lambda session: kernels)
        monkeypatch.setattr("launch.tune.gpu_runner.GpuRunner", lambda share, kernels: self.gpu)
        monkeypatch.setattr(time, "monotonic", lambda: self.gpu.clock)

    def run(self, environ: dict[str, str] | None = None, **more: Any) -> int:
        self.told.clear()
        command = TuneCommand("qwen3-0.6b", rows=(8, 40, 64), out=self.folder, **more)
        return tune.run(command, environ or {}, self.told.append)

    @property
    def text(self) -> str:
        return "\n".join(self.told)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    return Machine(tmp_path / "cache", monkeypatch)


def test_a_run_leaves_a_table_that_a_start_up_finds(machine: Machine) -> None:
    assert machine.run() == 0
    assert "on NVIDIA Of Tests: 17 choices at 3 row counts, by estimate" in machine.text
    assert "| products bfloat16 4096x1024 normed x64 " in machine.text
    assert "15 products" not in machine.text
    assert machine.told[-1] == f"start engines with --kernel-cache {machine.folder}"
    table = choice_table.load(choice_table.tuned_file(machine.folder, GPU.name))
    assert (table.gpu, len(table.choices), len(table.attention)) == (GPU, 15, 2)
    report = (machine.folder / "kernels" / "nvidia-of-tests.tune.md").read_text()
    assert report.count("\n| products ") == 15

    dispatch: Any = importlib.import_module("models.ops.tuned")
    made = object.__new__(dispatch.TunedProducts)
    made.device, made.traits, made.pdl = torch.device("cuda", 0), GPU, True
    made.choices, made._resolved, made._runs, made._lt = ChoiceTable(), {}, {}, None
    made._partial = torch.empty(1 << 24, device="meta")
    shape = LinearShape(40, 4096, 1024, torch.bfloat16, normed=True)
    assert made.choice(shape) == Blas()
    made.tune([shape], machine.folder, quick=True)
    assert made.choice(shape) == FAST


def test_out_of_budget_and_on_again(machine: Machine) -> None:
    assert machine.run(budget_minutes=0.3) == 0
    assert "choices are left (out of budget): type the same command to go on" in machine.text
    first = choice_table.load(choice_table.tuned_file(machine.folder, GPU.name))
    assert 0 < len(first.choices) < 15
    machine.gpu = FakeGpu()
    assert machine.run() == 0
    assert "of them measured before)" in machine.text
    assert "are left" not in machine.text
    whole = choice_table.load(choice_table.tuned_file(machine.folder, GPU.name))
    assert len(whole.choices) == 15
    assert first.choices.items() <= whole.choices.items()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_keeps_what_was_measured(machine: Machine, number: signal.Signals, code: int) -> None:
    machine.gpu.after_each = lambda: os.kill(os.getpid(), number)
    assert machine.run() == code
    assert "16 of 17 choices are left (interrupted): type the same command to go on" in machine.text
    machine.gpu = FakeGpu()
    assert machine.run() == 0
    assert "(1 of them measured before)" in machine.text


def test_a_lost_gpu_is_told_and_the_candidate_is_not_tried_again(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.gpu = FakeGpu(lost_at=SLOW)
    assert machine.run() == 1
    assert "broke this process's use of the GPU" in caplog.text
    assert "nvidia-of-tests.tune.jsonl says which" in caplog.text


@pytest.mark.parametrize("parts", [("products",), ("all-reduce",)])
def test_a_disk_that_fills_up_is_told_in_one_line_and_the_old_table_stays(
    parts: tuple[str, ...], machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert machine.run() == 0
    path = choice_table.tuned_file(machine.folder, GPU.name)
    before = path.read_text()
    machine.gpu = FakeGpu()
    fill_the_disk(monkeypatch)
    caplog.clear()
    assert machine.run(parts=parts, fresh=True) == 1
    assert told_once(caplog) == (
        f"{path} cannot be written (No space left on device): make room there, or name another folder with --out"
    )
    assert path.read_text() == before
    assert not list(path.parent.glob("*.tmp"))


def test_a_disk_that_fills_up_behind_the_all_reduces_is_told_too(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tune, "_time_all_reduces", lambda rendezvous, share: ([], None))
    fill_the_disk(monkeypatch)
    assert machine.run(environ=TWO_RANKS) == 1
    assert "No space left on device" in told_once(caplog)


def test_a_journal_that_cannot_be_written_any_more_is_told_in_one_line(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def close(self) -> None:
            self.flush()  # as a file's does, of what the disk had no room for

    class OnAFullDisk(Journal):
        def add(self, measured: Measured) -> None:
            self._file.close()
            file: Any = Full()
            self._file = file
            super().add(measured)

    monkeypatch.setattr("launch.tune.journal.Journal", OnAFullDisk)
    assert machine.run() == 1
    assert "nvidia-of-tests.tune.jsonl cannot be written any more (No space left on device)" in told_once(caplog)


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tables: a journal's next lines may still fit."""

    def full(file: Path, *_: object) -> None:
        file.write_bytes(b"{")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)


def told_once(caplog: pytest.LogCaptureFixture) -> str:
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "\n" not in said
    return said


def test_nothing_is_tuned_twice_at_once_or_where_nothing_can_be_written(machine: Machine, tmp_path: Path) -> None:
    refusals: list[str] = []

    def again() -> None:
        with pytest.raises(UsageError) as refusal:
            machine.run()
        refusals.append(str(refusal.value))

    once: Callable[[], None] = lambda: None if refusals else again()  # noqa: E731
    machine.gpu.after_each = once
    assert machine.run() == 0
    assert "another launch tune is writing" in refusals[0]
    file = tmp_path / "file"
    file.write_text("")
    machine.folder = file
    with pytest.raises(UsageError, match=r"cannot be written .*: name another folder with --out"):
        machine.run()

"""How choices are made and merged, without a GPU: times are made up, products are not computed."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")

from models.kernels.matmul import choice_table
from models.kernels.matmul.choice_table import Blas, Choice, ChoiceTable, Gemv, LinearShape, Wide
from tests.bench import merge_choices
from tests.bench import tune as bench_tune
from tests.bench.dense_shapes import MODELS
from tests.bench.measure import PARTS, Part

FAST, BRIEFLY_FAST, SLOW = Wide(64, 64, 64, 1, 4, 4, 64), Wide(64, 96, 64, 1, 4, 4, 64), Gemv(1, 1024, 4)
BRIEF: dict[Choice, float] = {FAST: 10.0, BRIEFLY_FAST: 9.8, SLOW: 30.0, Blas(): 12.0}  # microseconds of a product
LASTING = BRIEF | {BRIEFLY_FAST: 11.0}
OTHER = LinearShape(8, 4096, 4096, torch.bfloat16)


class Chosen:
    """A MatmulDispatch as far as a tuner asks; the shipped table knows one product of another model."""

    def __init__(self) -> None:
        self.choices = ChoiceTable({OTHER.key: Gemv(2, 1024, 4)})

    def choice(self, shape: LinearShape) -> Choice:
        return self.choices.get(shape) or Blas()

    def choose(self, shape: LinearShape, choice: Choice) -> None:
        self.choices.put(shape, choice)

    def candidates(self, shape: LinearShape) -> list[Choice]:
        return list(BRIEF)

    def runner(self, shape: LinearShape) -> Any:
        return None

    def microseconds(self, times: dict[Choice, float], rows: int) -> float:
        return sum(times[self.choice(s)] for name, s in MODELS["8B-tp8"].products(rows).items() if name != "head")


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A tuner of 8B-tp8 at 32 rows whose layers take what the chosen products take."""
    matmul = Chosen()
    kernels: Any = SimpleNamespace(matmul=matmul)
    autotune = SimpleNamespace(
        fastest=lambda shape, choices, run, device: (FAST, 1.0),
        median_graph_us=lambda run, device, replays: matmul.microseconds(BRIEF, 32),
    )
    for name, stand_in in {"StepBench": Mock(), "Cache": Mock(), "autotune": autotune}.items():
        monkeypatch.setattr(bench_tune, name, stand_in)
    monkeypatch.setattr(bench_tune, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(bench_tune, "captured", lambda run: None)
    monkeypatch.setattr(bench_tune, "replay_for", lambda graph, seconds: matmul.microseconds(LASTING, 32))
    return bench_tune.Tuner(kernels, 0.2, 4, tmp_path / "tune.jsonl")


def test_what_lasts_is_chosen_and_only_what_was_measured_is_found(tuner: Any, tmp_path: Path) -> None:
    tuner.tune("8B-tp8", 32)
    assert tuner.found.choices == {shape.key: FAST for shape in MODELS["8B-tp8"].products(32).values()}
    measured = [json.loads(line) for line in (tmp_path / "tune.jsonl").read_text().splitlines()]
    assert len(measured) == 4 * len(BRIEF)
    assert {what for what, *_ in measured} == {f"8B-tp8 {name} x32" for name in bench_tune.ORDER}


TUNING = [part for part in PARTS if "tests.bench.tune" in part.command]


@pytest.mark.parametrize("part", TUNING, ids=lambda part: part.name)
def test_a_part_of_the_measurements_tunes_what_it_says(
    part: Part, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Side by side with the others, so in a folder of its own."""
    tuner = Mock(found=ChoiceTable({OTHER.key: Blas()}))
    for name in ("compile_all", "sampled"):
        monkeypatch.setattr(bench_tune, name, Mock(return_value=MagicMock()))
    monkeypatch.setattr(bench_tune, "NvidiaKernels", Mock())
    monkeypatch.setattr(bench_tune, "Tuner", Mock(return_value=tuner))
    monkeypatch.setattr(sys, "argv", ["bench_tune", *shlex.split(part.command.format(out=tmp_path))[2:]])
    bench_tune.main()
    tuned = [call.args for call in tuner.tune.call_args_list]
    assert {rows for _, rows in tuned} <= {1, 8, 32, 64, 128, 256}
    if part.name != "tune":
        assert {f"tune-{model.lower()}" for model, _ in tuned} == {part.name.rsplit("-", 1)[0]}
        [written] = tmp_path.rglob("choices.json")
        assert written.parent.name == part.name
        assert choice_table.load(written) == tuner.found


def test_only_the_gpu_in_use_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, power = tmp_path / "nvidia-smi", tmp_path / "power.csv"
    script.write_text('#!/bin/sh\necho "$@"\nexec sleep 60\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with bench_tune.sampled(power):
        while not power.read_text():
            time.sleep(0.001)
    assert power.read_text().startswith("-i 3 --query-gpu=timestamp,clocks.sm")


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """What two GPUs found, as measure.py leaves it: for products of their own, and one for both, alike."""
    found: tuple[dict[str, Choice], ...] = (
        {"bfloat16 768x4096 x8": FAST, "bfloat16 4096x512 x8": SLOW},
        {"bfloat16 768x4096 x128": BRIEFLY_FAST, "bfloat16 768x4096 x8": FAST},
    )
    for number, choices in enumerate(found):
        choice_table.save(tmp_path / "results" / f"tune-{number}" / "choices.json", ChoiceTable(choices))
    return [tmp_path / "results"]


def test_a_merge_keeps_what_was_not_measured(folders: list[Path], tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    before = choice_table.load(merge_choices.SHIPPED)
    before.choices |= {"bfloat16 768x4096 x8": SLOW}
    choice_table.save(table, before)
    written = table.read_text()
    assert merge_choices.main([*map(str, folders), "--into", str(table), "--dry-run"]) == 0
    assert table.read_text() == written
    assert merge_choices.main([*map(str, folders), "--into", str(table)]) == 0
    after = choice_table.load(table)
    assert after.choices == before.choices | {
        "bfloat16 768x4096 x8": FAST,
        "bfloat16 4096x512 x8": SLOW,
        "bfloat16 768x4096 x128": BRIEFLY_FAST,
    }


def test_two_that_chose_differently_are_named(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, third = tmp_path / "table.json", tmp_path / "third"
    choice_table.save(third / "choices.json", ChoiceTable({"bfloat16 4096x512 x8": Blas()}))
    assert merge_choices.main([*map(str, folders), str(third), "--into", str(table)]) == 1
    both = f"{third}/choices.json and {folders[0]}/tune-0/choices.json chose differently for bfloat16 4096x512 x8"
    assert both in capsys.readouterr().err
    assert not table.exists()


def test_a_folder_without_choices_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert merge_choices.main([str(tmp_path), "--into", str(tmp_path / "table.json")]) == 1
    assert f"{tmp_path} holds no choices.json" in capsys.readouterr().err

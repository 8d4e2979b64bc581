"""Tables of `launch tune` merged into the shipped one, and the parts of the GPU measurements that make them."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest

from launch.cli import parse
from launch.tune.options import TuneCommand
from models.kernels.attention.decode_variant import DecodeVariant
from models.kernels.matmul import choice_table
from models.kernels.matmul.choice_table import Blas, ChoiceTable, Gemv, Wide
from models.kernels.traits import H200
from parallel.comm.symmetric_all_reduce import SizeLimits
from tests.bench import merge_choices
from tests.bench.measure import PARTS, Part

FAST, BRIEFLY_FAST, SLOW = Wide(64, 64, 64, 1, 4, 4, 64), Wide(64, 96, 64, 1, 4, 4, 64), Gemv(1, 1024, 4)
VARIANT, LIMITS = DecodeVariant(True, 32, 3, 1), SizeLimits(1 << 20, 0)
H100 = dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3", memory_rate=3.35e12)
SHIPPED = choice_table.SHIPPED_CHOICES / "nvidia-h200.json"


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """What two GPUs found, as measure.py leaves it: for products of their own, and one for both, alike."""
    found = (
        ChoiceTable({"bfloat16 768x4096 x8": FAST, "bfloat16 4096x512 x8": SLOW}, {"bfloat16 4x128 x64": VARIANT}),
        ChoiceTable({"bfloat16 768x4096 x128": BRIEFLY_FAST, "bfloat16 768x4096 x8": FAST}, all_reduce={2: LIMITS}),
    )
    for number, table in enumerate(found):
        folder = tmp_path / "results" / f"tune-{number}"
        choice_table.save(choice_table.tuned_file(folder, H200.name), dataclasses.replace(table, gpu=H200))
    return [tmp_path / "results"]


def test_a_merge_keeps_what_was_not_measured(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.json"
    before = choice_table.load(SHIPPED)
    before.choices |= {"bfloat16 768x4096 x8": SLOW}
    choice_table.save(table, before)
    written = table.read_text()
    assert merge_choices.main([*map(str, folders), "--into", str(table), "--dry-run"]) == 0
    assert table.read_text() == written
    assert f"bfloat16 768x4096 x8: {FAST}, was {SLOW}" in capsys.readouterr().out
    assert merge_choices.main([*map(str, folders), "--into", str(table)]) == 0
    after = choice_table.load(table)
    assert after.choices == before.choices | {
        "bfloat16 768x4096 x8": FAST,
        "bfloat16 4096x512 x8": SLOW,
        "bfloat16 768x4096 x128": BRIEFLY_FAST,
    }
    assert (after.attention, after.all_reduce, after.gpu) == ({"bfloat16 4x128 x64": VARIANT}, {2: LIMITS}, H200)


def test_the_table_of_the_gpu_is_the_one_that_is_written(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU without a table gets one; start-ups find it."""
    monkeypatch.setattr(merge_choices, "SHIPPED_CHOICES", tmp_path / "shipped")
    choice_table.save(tmp_path / "new" / "gpu.tuned.json", ChoiceTable({"bfloat16 8x8 x8": FAST}, gpu=H100))
    assert merge_choices.main([str(tmp_path / "new")]) == 0
    assert merge_choices.main([*map(str, folders)]) == 0
    assert {path.name for path in (tmp_path / "shipped").iterdir()} == {
        "nvidia-h100-80gb-hbm3.json",
        "nvidia-h200.json",
    }
    assert choice_table.shipped_for(tmp_path / "shipped", H100).choices == {"bfloat16 8x8 x8": FAST}


def test_two_that_chose_differently_are_named(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, third = tmp_path / "table.json", tmp_path / "third" / "gpu.tuned.json"
    choice_table.save(third, ChoiceTable({"bfloat16 4096x512 x8": Blas()}, gpu=H200))
    assert merge_choices.main([*map(str, folders), str(third.parent), "--into", str(table)]) == 1
    first = choice_table.tuned_file(folders[0] / "tune-0", H200.name)
    assert f"{third} and {first} chose differently for bfloat16 4096x512 x8" in capsys.readouterr().err
    assert not table.exists()


def test_tables_of_different_gpus_are_not_mixed(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, table = tmp_path / "other" / "gpu.tuned.json", tmp_path / "table.json"
    choice_table.save(other, ChoiceTable({"bfloat16 8x8 x8": FAST}, gpu=H100))
    assert merge_choices.main([*map(str, folders), str(other.parent), "--into", str(table)]) == 1
    assert merge_choices.main([str(other.parent), "--into", str(SHIPPED), "--dry-run"]) == 1
    choice_table.save(other, ChoiceTable({"bfloat16 8x8 x8": FAST}))
    assert merge_choices.main([str(other.parent), "--into", str(table)]) == 1
    first, second, third = capsys.readouterr().err.splitlines()
    assert "is of a NVIDIA H100 80GB HBM3, others are of a NVIDIA H200: name one of them" in first
    assert "nvidia-h200.json is of a NVIDIA H200, what was found of a NVIDIA H100 80GB HBM3" in second
    assert "does not say on which GPU it was measured" in third


def test_a_folder_without_a_table_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert merge_choices.main([str(tmp_path), "--into", str(tmp_path / "table.json")]) == 1
    assert f"{tmp_path} holds no *.tuned.json" in capsys.readouterr().err


def tuning() -> dict[str, tuple[Part, TuneCommand]]:
    found = {}
    for part in PARTS:
        if "launch tune" in part.command:
            command = parse(shlex.split(part.command.format(out="out"))[2:])
            assert isinstance(command, TuneCommand)
            found[part.name] = part, command
    return found


def test_parts_of_the_measurements_end_before_their_limits_in_folders_of_their_own() -> None:
    assert {"tune-8b", "tune-0.6b", "tune-30b-a3b", "tune-8b-tp2", "tune-all-reduce"} <= tuning().keys()
    outs = [command.out for _, command in tuning().values()]
    assert len(set(outs)) == len(outs)
    for part, command in tuning().values():
        assert command.budget_minutes is None or 60 * command.budget_minutes + 30 < part.seconds
        assert part.torchrun == (command.parts == ("all-reduce",))

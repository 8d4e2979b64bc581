"""`python -m launch`: what torchrun is told of an error, and what is refused before anything heavy is imported."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import launch.__main__ as entry

ROOT = Path(__file__).resolve().parents[2]
GENERATE = ["generate", "--model", "m", "--input", "in.jsonl", "--output", "out.jsonl"]


@pytest.mark.parametrize("line", [GENERATE, ["bench", "latency", "--model", "m"]], ids=["generate", "bench"])
def test_an_error_that_nobody_expected_reaches_torchrun(
    line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every entry point of ranks is decorated with @record: the traceback is in the agent's error file."""

    def broken(_: object) -> int:
        raise ZeroDivisionError("a step of length nothing")

    monkeypatch.setattr(entry, "_run", broken)
    monkeypatch.setattr(entry, "_end_with_launcher", lambda: None)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(ZeroDivisionError):
        entry.main(line)
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    assert "ZeroDivisionError: a step of length nothing" in told["message"]
    assert "in broken" in told["extraInfo"]["py_callstack"]


def test_a_wrong_world_is_refused_without_torch() -> None:
    """Both numbers are named. Torch would take seconds, and minutes on a file system that many ranks read from."""
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "RANK": "0", "WORLD_SIZE": "1"}
    script = (
        f"import sys; import launch.__main__ as entry; entry._end_with_launcher = lambda: None\n"
        f"code = entry.main({GENERATE}); print(code, 'torch' in sys.modules)"
    )
    environment = {**os.environ, **step, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.stdout.split() == ["2", "False"], ended.stderr
    assert "SLURM_STEP_NUM_TASKS is 2, but WORLD_SIZE is 1" in ended.stderr


def test_a_sweep_starts_without_torch() -> None:
    """Its processes are many: two a point under Slurm."""
    script = "import sys; import launch.sweep.command; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.stdout.split() == ["False"], ended.stderr


@pytest.mark.parametrize(
    ("module", "kind", "said"),
    [
        (
            "runtime.execute.step.graphs",
            "CaptureError",
            "capturing the decode graph of 256 rows failed: out of memory. Lower --max-num-seqs",
        ),
        ("runtime.speculative_config", "SpeculativeConfigError", "token_map is 99999, but the vocabulary has 384 ids"),
    ],
)
def test_what_an_engine_cannot_be_opened_with_is_one_line(
    module: str, kind: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    error = getattr(importlib.import_module(module), kind)

    def refused(*_: object) -> int:
        raise error(said)

    monkeypatch.setattr("launch.generate.command.run", refused)
    monkeypatch.setattr(entry, "_end_with_launcher", lambda: None)
    assert entry.main(GENERATE) == 2
    assert capfd.readouterr().err == f"lockstride generate: error: {said}\n"


@pytest.mark.parametrize("line", [GENERATE, ["serve", "--model", "m"], ["bench", "latency", "--model", "m"]])
def test_an_interrupt_before_anything_has_begun_is_one_line(
    line: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """While torch is imported, and while a model is loaded."""

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    for name in ("discover", "_run_its_module"):
        monkeypatch.setattr(entry, "_end_with_launcher", lambda: None)
        monkeypatch.setattr(entry, name, interrupted)
        assert entry.main(line) == 130
        assert capfd.readouterr().err == f"lockstride {line[0]}: interrupted\n"
        monkeypatch.undo()


def test_a_terminal_that_lacks_a_character_gets_its_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of models are printed by `generate --show` and `chat`."""
    raw = io.BytesIO()

    def answers(_: object) -> int:
        print("5\u20ac", flush=True)
        return 0

    monkeypatch.setattr(entry, "_main", answers)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    assert entry.main(GENERATE) == 0
    assert raw.getvalue() == b"5\\u20ac\n"

"""Parts side by side on a host's GPUs, without a GPU: who runs beside whom, on which GPUs, and what a signal leaves.

Parts are scripts that wait for each other's files, so that a wrong order is a part that runs into its limit.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

import pytest

from tests.bench import measure
from tests.bench.lanes import Outcome
from tests.bench.measure import Part

LIMIT = 30

# python SCRIPT FOLDER NAME [AWAITED ...]: writes NAME, waits for the files AWAITED, ends. ``log``: begin and end.
SCRIPT = """
import os, sys, time
from pathlib import Path
folder, name, awaited = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
def log(what):
    with (folder / "log").open("a") as file:
        file.write(f"{what} {name} {os.environ['CUDA_VISIBLE_DEVICES']}\\n")
log("begin")
(folder / name).touch()
while not all((folder / other).exists() for other in awaited):
    time.sleep(0.01)
log("end")
print("last line of", name)
"""

# python SCRIPT FOLDER: starts a process of its own, and both keep the pipe FOLDER/alive open for ever.
SLEEPER = """
import subprocess, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
pipe = (folder / "alive").open("wb")
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[pipe.fileno()])
(folder / "sleeper").touch()
time.sleep(600)
"""

# python SCRIPT FOLDER SIGNAL: sends it to whoever started this part, when the sleeper is there.
SENDER = """
import os, sys, time
from pathlib import Path
while not (Path(sys.argv[1]) / "sleeper").exists():
    time.sleep(0.01)
os.kill(os.getppid(), int(sys.argv[2]))
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("logs", "results", "files"):
        (tmp_path / name).mkdir()
    return tmp_path


def part(folder: Path, name: str, gpus: int, *awaited: str) -> Part:
    script = folder / "part.py"
    script.write_text(SCRIPT)
    return Part(name, gpus, LIMIT, " ".join([str(script), str(folder / "files"), name, *awaited]))


def log_of(folder: Path) -> list[str]:
    return (folder / "files" / "log").read_text().splitlines()


def codes(outcome: Outcome) -> dict[str, int]:
    return {one.name: one.code for one in outcome.ran}


def test_two_parts_run_at_the_same_time_on_gpus_of_their_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [part(folder, "left", 1, "right"), part(folder, "right", 1, "left")]
    outcome = measure.run_all(parts, folder, ["0", "1"], seconds=600)
    assert codes(outcome) == {"left": 0, "right": 0}
    assert {one.name: one.beside for one in outcome.ran} == {"left": ("right",), "right": ("left",)}
    assert {"begin left 0", "begin right 1"} <= set(log_of(folder))
    rows = (folder / "summary.md").read_text().splitlines()[2:]
    assert sorted(row.split(" | ")[3] for row in rows) == ["left |", "right |"]
    printed = capsys.readouterr().out.splitlines()
    for name in ("left", "right"):
        block = printed.index(f"--- last lines of {name}")
        assert printed[block + 1] == f"last line of {name}"
        assert printed[block + 2].startswith(f"<== {name}: exit code 0")


def test_a_wide_part_waits_for_all_gpus_and_none_overtakes_it(folder: Path) -> None:
    """``after`` would fit beside ``left`` while ``wide`` waits; it begins behind it all the same."""
    parts = [
        part(folder, "left", 1, "right"),
        part(folder, "right", 1),
        part(folder, "wide", 2),
        part(folder, "after", 1),
    ]
    outcome = measure.run_all(parts, folder, ["0", "1"], seconds=600)
    assert codes(outcome) == dict.fromkeys(("left", "right", "wide", "after"), 0)
    log = log_of(folder)
    assert sorted(log[:4]) == ["begin left 0", "begin right 1", "end left 0", "end right 1"]
    assert log[4:] == ["begin wide 0,1", "end wide 0,1", "begin after 0", "end after 0"]
    assert {one.name: one.beside for one in outcome.ran if one.name in ("wide", "after")} == {"wide": (), "after": ()}


def test_no_gpu_is_given_twice(folder: Path) -> None:
    """Pairs that wait for each other, so that both GPUs of each pair are taken at once, with a wide part between."""
    pairs = [("a", "b"), ("c", "d"), ("e", "f")]
    parts = [part(folder, one, 1, other) for pair in pairs for one, other in (pair, pair[::-1])]
    parts.insert(2, part(folder, "wide", 3))
    outcome = measure.run_all(parts, folder, ["4", "5", "7"], seconds=600)
    assert set(codes(outcome).values()) == {0}
    busy: list[str] = []
    for line in log_of(folder):
        what, _, its = line.split()
        for gpu in its.split(","):
            if what == "begin":
                assert gpu in ("4", "5", "7")
                assert gpu not in busy, line
                busy.append(gpu)
            else:
                busy.remove(gpu)


def test_too_large_and_too_late_are_told_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = Part("late", 1, 10_000, "-c print('never')")
    parts = (part(folder, "wide", 3), late, part(folder, "fits", 2))
    monkeypatch.setattr(measure, "PARTS", parts)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    words = ["--out", str(folder), "--gpus", "2", "--seconds", "600", "--parts", "wide", "late", "fits"]
    monkeypatch.setattr(sys, "argv", ["measure", *words])
    assert measure.main() == 1
    assert log_of(folder) == ["begin fits 0,1", "end fits 0,1"]
    printed = capsys.readouterr().out.splitlines()
    assert "not begun, too late: --parts late" in printed
    assert "not begun, more GPUs needed than the 2 in use: --parts wide" in printed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: signal.Signals(number).name)
def test_a_signal_kills_all_that_runs(folder: Path, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(folder / "files" / "alive")
    alive = os.open(folder / "files" / "alive", os.O_RDONLY | os.O_NONBLOCK)
    inherited = signal.signal(
        number, signal.default_int_handler
    )  # a shell's background jobs ignore SIGINT, and so do we
    before = signal.getsignal(number)
    for name, source in (("sleeper", SLEEPER), ("sender", SENDER)):
        (folder / f"{name}.py").write_text(source)
    parts = [
        Part("sleeper", 1, LIMIT, f"{folder / 'sleeper.py'} {folder / 'files'}"),
        Part("sender", 1, LIMIT, f"{folder / 'sender.py'} {folder / 'files'} {int(number)}"),
        part(folder, "never", 1),
    ]
    try:
        with pytest.raises(SystemExit) as stopped:
            measure.run_all(parts, folder, ["0", "1"], seconds=600)
        assert select.select([alive], [], [], 10)[0], "a process of the part, or one that it started, is alive"
        assert os.read(alive, 1) == b""
        assert signal.getsignal(number) == before
    finally:
        os.close(alive)
        signal.signal(number, inherited)
    assert stopped.value.code == 128 + number
    assert "killed what ran: sleeper, sender" in capsys.readouterr().err
    assert not (folder / "files" / "never").exists()


def test_gpus_are_those_that_we_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_gpus_here", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert measure.gpu_names(None) == ["0"]
    assert measure.gpu_names(4) == ["0", "1", "2", "3"]
    monkeypatch.setattr(measure, "_gpus_here", lambda: 2)
    assert measure.gpu_names(None) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6")
    assert measure.gpu_names(None) == ["3", "5", "6"]
    assert measure.gpu_names(2) == ["3", "5"]
    with pytest.raises(ValueError, match="names 3: unset it, or ask less"):
        measure.gpu_names(4)
    with pytest.raises(ValueError, match="at least 1"):
        measure.gpu_names(0)


def test_a_part_named_twice_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["measure", "--out", "out", "--parts", "doctor", "host", "doctor"])
    with pytest.raises(SystemExit):
        measure.main()
    assert "named more than once: doctor" in capsys.readouterr().err

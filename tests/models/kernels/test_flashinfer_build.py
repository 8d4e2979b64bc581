"""FlashInfer's build beside a run: it is done once, cut off with its parent, and goes on where it was.

With ninja, over a FlashInfer whose compiler is the shell (stand_in_flashinfer.py).
"""

from __future__ import annotations

import fcntl
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch.ranks.flashinfer_switches import flashinfer_switches
from tests.models.kernels.stand_in_flashinfer import Spec, modules

pytestmark = pytest.mark.skipif(shutil.which("ninja") is None, reason="ninja is not installed")
NAME = "models.kernels.attention.flashinfer_build"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    (tmp_path / "a.cu").write_text("source")
    return Spec(tmp_path)


@pytest.fixture
def build(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, module in modules(spec).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


PATIENCE = 900.0  # seconds: a build has the lowest priority, and gets a hundredth of a core beside a few busy processes


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


def ended(build: Any) -> int:
    code: int = build._started[-1].wait(PATIENCE)
    return code


def test_what_is_built_aside_is_built(build: Any, spec: Spec) -> None:
    assert not build.is_built(spec)
    said = build.build_in_background(spec)
    assert ended(build) == 0, said.read_text()
    assert build.is_built(spec)
    assert spec.library.read_text() == "source"
    assert not list(spec.folder.glob("build-aside.*.ninja"))
    build.build_in_background(spec)
    assert ended(build) == 0
    assert (spec.folder / "compiled").read_text().count("a.cu") == 1, "nothing is built twice"


def test_what_was_built_of_something_else_is_not_built(build: Any, spec: Spec) -> None:
    build.build_in_background(spec)
    assert ended(build) == 0
    spec.command = "cat $in > $out"  # other flags: FlashInfer would write another ninja file
    assert not build.is_built(spec)
    spec.command = "cp $in $out"
    assert build.is_built(spec)
    os.utime(spec.folder / "a.cu", (time.time() + 10, time.time() + 10))  # a header of another version
    assert not build.is_built(spec)


def test_half_a_library_is_not_built(build: Any, spec: Spec) -> None:
    spec.ninja_path.write_text(spec.ninja_file)
    spec.library.write_text("sou")
    assert not build.is_built(spec)


def test_a_module_that_came_with_the_package_is_built(build: Any, spec: Spec) -> None:
    spec.is_aot = True
    assert build.is_built(spec)


def test_whoever_builds_is_left_alone(build: Any, spec: Spec) -> None:
    with spec.lock_path.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        build.build_in_background(spec)
        assert ended(build) == 0
    assert not spec.library.exists()
    assert not list(spec.folder.glob("build-aside.*.ninja"))


@pytest.mark.parametrize("killed", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_build_ends_with_its_parent_and_goes_on_later(build: Any, spec: Spec, killed: signal.Signals) -> None:
    """Compilers too, which ninja gives sessions of their own; what was finished is not done again."""
    slow = "echo $$$$ > pid && sleep 300 && cp $in $out"
    command = [sys.executable, "-m", "tests.models.kernels.stand_in_flashinfer", str(spec.folder), slow]
    with killed_at_the_end(command) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "begun\n"
        until(lambda: (spec.folder / "pid").exists() and (spec.folder / "pid").read_text().endswith("\n"))
        compiler = int((spec.folder / "pid").read_text())
        assert _stat(compiler)[16] == "19", "niceness"
        parent.send_signal(killed)
        parent.wait(PATIENCE)
    until(lambda: _stat(compiler)[0] in ("gone", "Z"))
    with spec.lock_path.open("a") as held:
        until(lambda: _free(held.fileno()))
    spec.command = slow
    assert not build.is_built(spec)
    spec.command = "cp $in $out"
    build.build_in_background(spec)
    assert ended(build) == 0
    assert build.is_built(spec)
    assert (spec.folder / "compiled").read_text().count("a.cu") == 1


@contextmanager
def killed_at_the_end(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """It sleeps for ten minutes, and a test that fails shall not wait for that."""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _stat(pid: int) -> list[str]:
    """State, parent and so on, as in /proc; the state of a process that ended and was waited for is "gone"."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["gone"]


def _free(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(lock, fcntl.LOCK_UN)
    return True


def test_what_keeps_a_machine_from_building_is_named(
    build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    build.cpp_ext.get_cuda_path = lambda: str(tmp_path)
    assert str(nvcc) in build.obstacle(flashinfer_switches({}))
    nvcc.parent.mkdir()
    nvcc.touch()
    assert build.obstacle(flashinfer_switches({})) is None
    assert "FLASHINFER_DISABLE_JIT" in build.obstacle(flashinfer_switches({"FLASHINFER_DISABLE_JIT": "1"}))
    elsewhere = flashinfer_switches({"FLASHINFER_NVCC": str(tmp_path / "nvcc")})
    assert f"no {tmp_path / 'nvcc'}" in build.obstacle(elsewhere)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "ninja" in build.obstacle(flashinfer_switches({}))

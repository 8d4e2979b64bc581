"""The runs of `make test-all PART=portable` cover what it promises, and its variables reach torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.portable import FOLDERS, NO_FLOATS, Run, lacking, runs_of, widths_of

ROOT = Path(__file__).resolve().parents[1]
# What computes floats here: torch itself, an engine, or a job of ranks that have one.
COMPUTES = re.compile(
    r"^(import|from) (torch|runtime\.build|runtime\.engine|tests\.runtime\.engine|tests\.faults\.job)\b", re.MULTILINE
)
OWN_WIDTH = widths_of(torch.backends.cpu.get_cpu_capability())[-1]
GOLDEN = "tests/runtime/engine/test_demo.py::test_golden_outputs[2]"
DEEP = "tests/runtime/engine/test_depths.py::test_a_mixture_of_everything[attention-2-2]"
ALONE = "tests/runtime/engine/test_depths.py::test_the_same_tokens_alone_and_together[hybrid]"


@pytest.mark.parametrize(
    ("capability", "widths"),
    [
        ("AVX512", ("default", "avx2", "avx512")),
        ("AVX2", ("default", "avx2")),
        ("DEFAULT", ("default",)),
        ("SVE256", ("default", "sve256")),
    ],
)
def test_every_width_runs_with_one_thread_and_one_with_four_beside_busy_loops(
    capability: str, widths: tuple[str, ...]
) -> None:
    assert widths_of(capability) == widths
    assert runs_of(widths) == [*(Run(width, 1) for width in widths), Run(widths[-1], 4, busy=2)]
    assert runs_of(widths, 9)[-1] == Run(widths[-1], 4, busy=9)


def test_what_is_run_and_what_is_left_out_exists() -> None:
    assert all((ROOT / path).exists() for path in (*FOLDERS, *NO_FLOATS))


def test_whatever_computes_floats_is_run() -> None:
    """But for tests/gpu, which needs other machines, tests/network, which needs root, and this file, which would start
    itself."""
    others = [*FOLDERS, "tests/gpu", "tests/network", "tests/test_portable.py"]
    files = [(str(file.relative_to(ROOT)), file.read_text()) for file in sorted((ROOT / "tests").rglob("test_*.py"))]
    computing = [path for path, text in files if COMPUTES.search(text)]
    assert [path for path in computing if not any(f"{path}/".startswith(f"{other}/") for other in others)] == []


def test_files_that_need_what_this_python_lacks_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("import os\nfrom no_such_package.deep import x\n")
    (tmp_path / "test_b.py").write_text('import pytest\nx = """\n  import no_such_package"""\n')
    (tmp_path / "rig.py").write_text("import no_such_package\n")
    assert lacking([str(tmp_path)]) == {str(tmp_path / "test_a.py"): "no_such_package"}
    assert lacking([str(tmp_path / "test_b.py")]) == {}
    assert lacking([str(ROOT / folder) for folder in FOLDERS]) == {}, "where all is installed, nothing"


@pytest.mark.slow
def test_torch_takes_the_variables() -> None:
    program = "import torch; print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())"
    environ = {**os.environ, **Run("default", 4).environ}
    found = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["DEFAULT", "4"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("width", "tests"), [("default", (GOLDEN, DEEP, ALONE)), ("avx2", (DEEP, ALONE))], ids=("default", "avx2")
)
def test_answers_hold_under_another_width(width: str, tests: tuple[str, ...]) -> None:
    """The few tests whose answers hang most on the last bits of sums; the others: `make test-all PART=portable`."""
    if width == OWN_WIDTH or width not in widths_of(OWN_WIDTH):
        pytest.skip(f"{width}: this CPU has {OWN_WIDTH}, in which all tests run, and narrower ones")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "", *tests]
    found = subprocess.run(
        command, cwd=ROOT, env={**environ, **Run(width, 4).environ}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    assert f"{len(tests)} passed" in found.stdout

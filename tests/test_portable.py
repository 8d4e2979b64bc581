"""The runs of `make test-portable` cover what it promises, and its variables reach torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.portable import FOLDERS, NO_FLOATS, Run, lacking, runs_of, widths_of

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("capability", "widths"),
    [
        ("AVX512", ("default", "avx2", "avx512")),
        ("AVX2", ("default", "avx2")),
        ("DEFAULT", ("default",)),
        ("SVE256", ("default", "sve256")),
    ],
)
def test_every_width_runs_with_one_thread_and_with_four_and_one_beside_busy_loops(
    capability: str, widths: tuple[str, ...]
) -> None:
    assert widths_of(capability) == widths
    quiet = [run for run in runs_of(widths) if not run.busy]
    assert {(run.width, run.threads) for run in quiet} == {(width, threads) for width in widths for threads in (1, 4)}
    (beside,) = (run for run in runs_of(widths) if run.busy)
    assert beside.busy == 2
    assert runs_of(widths, 9)[-1] == Run(widths[-1], 1, busy=9)


def test_what_is_run_and_what_is_left_out_exists() -> None:
    assert all((ROOT / path).exists() for path in (*FOLDERS, *NO_FLOATS))


def test_files_that_need_what_this_python_lacks_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("import os\nfrom no_such_package.deep import x\n")
    (tmp_path / "test_b.py").write_text('import pytest\nx = """\n  import no_such_package"""\n')
    (tmp_path / "rig.py").write_text("import no_such_package\n")
    assert lacking([str(tmp_path)]) == {str(tmp_path / "test_a.py"): "no_such_package"}
    assert lacking([str(tmp_path / "test_b.py")]) == {}
    assert lacking([str(ROOT / folder) for folder in FOLDERS]) == {}, "where all is installed, nothing"


def test_torch_takes_the_variables() -> None:
    program = "import torch; print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())"
    environ = {**os.environ, **Run("default", 4).environ}
    found = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["DEFAULT", "4"]

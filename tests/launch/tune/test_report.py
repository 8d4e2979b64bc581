"""The table at the end: shape, old choice, new choice, microseconds before and after."""

from __future__ import annotations

from launch.tune.journal import Measured, shown, summary, table
from models.kernels.matmul.choice_table import Blas, CublasLt, Gemv, Wide
from tests.launch.tune.fake_gpu import FAST, VARIANT

CHANGED = Measured("products bfloat16 6144x4096 x40", 40, Blas(), FAST, 20.0, 15.0)
SAME = Measured("products bfloat16 4096x4096 x40", 40, FAST, FAST, 10.0, 10.0)
NEW = Measured("attention bfloat16 4x128 x64", 8, None, VARIANT, None, 3.0)


def test_a_line_says_what_was_and_what_is() -> None:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table([CHANGED, SAME, NEW]).splitlines()]
    assert lines[0] == ["shape", "before", "after", "us before", "us after", "gain"]
    assert lines[2] == [
        "products bfloat16 6144x4096 x40",
        "cuBLAS",
        "Wide 64,64,64,1,4,4,64,0",
        "20.00",
        "15.00",
        "25.0%",
    ]
    assert lines[3][1:] == ["Wide 64,64,64,1,4,4,64,0", "the same", "10.00", "10.00", "0.0%"]
    assert lines[4][1:] == ["built-in rule", "TMA 32,3,1", "does not run", "3.00", ""]
    assert len({len(line) for line in table([CHANGED, SAME, NEW]).splitlines()}) == 1


def test_algorithms_of_cublaslt_are_told_apart() -> None:
    assert len({shown(CublasLt(f"{number:02x}" * 64, 1)) for number in range(20)}) == 20
    assert shown(Gemv(4, 1024, 4, 64)) != shown(Gemv(4, 1024, 4, 0))
    assert shown(Wide(64, 64, 64, 1, 4, 4, 64)).startswith("Wide ")


def test_the_summary_counts() -> None:
    told = summary([CHANGED, SAME, NEW], 3)
    assert told.startswith("3 measured, 2 with another choice, 25.0% less time in these; 3 candidates did not run")
    assert summary([SAME], 0) == "1 measured, 0 with another choice"

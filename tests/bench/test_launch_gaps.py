"""How gaps are shown; what variants do is shown by running them on a GPU."""

from __future__ import annotations

from tests.bench.launch_gaps import table


def test_a_line_a_kernel_and_a_column_a_variant() -> None:
    found = {
        "usual": {"tpot_ms": 5.27, "gaps": {"norm": 0.32, "attend": 0.0, "plan": 1.0}},
        "tails": {"tpot_ms": 5.2349, "gaps": {"attend": -0.319, "norm": 0.0}},
    }
    assert table(found) == [
        "| gap before, us | usual | tails |",
        "| --- | ---: | ---: |",
        "| norm | 0.32 | 0.00 |",
        "| attend | 0.00 | -0.32 |",
        "| plan | 1.00 | - |",
        "| TPOT, ms | 5.270 | 5.235 |",
    ]

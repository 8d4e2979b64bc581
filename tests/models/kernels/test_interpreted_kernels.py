"""The Triton kernels without a GPU: through Triton's interpreter, in processes of their own: whether Triton interprets
is decided when it is imported.
"""

from __future__ import annotations

import pytest

from tests.torchrun import python


@pytest.mark.parametrize(
    "module",
    [
        *(
            f"models.kernels.interpreted_{part}"
            for part in ("decode", "experts", "invariant", "kernels", "mamba", "prefill", "push", "recurrent")
        ),
        *(f"parallel.comm.interpreted_{part}" for part in ("all_reduce", "exchange", "keys")),
    ],
)
def test_the_interpreter_finds_what_the_formulas_say(module: str) -> None:
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    ran = python(f"tests.{module}", TRITON_INTERPRET="1")
    assert ran.returncode == 0, ran.errors[-3000:]

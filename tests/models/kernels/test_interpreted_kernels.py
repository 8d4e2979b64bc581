"""The Triton kernels without a GPU: through Triton's interpreter, in processes of their own: whether Triton interprets
is decided when it is imported.
"""

from __future__ import annotations

import pytest

from tests.torchrun import python

MODULES = (
    *(
        f"models.kernels.interpreted_{part}"
        for part in (
            "decode",
            "experts",
            "float8",
            "four_bits",
            "invariant",
            "kernels",
            "kinds",
            "mamba",
            "prefill",
            "push",
            "recurrent",
        )
    ),
    *(f"parallel.comm.interpreted_{part}" for part in ("all_reduce", "exchange", "keys")),
)
WITH_MORE = tuple(f"models.kernels.interpreted_{part}" for part in ("decode", "mamba", "recurrent"))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        *((module, ()) for module in MODULES),
        *(pytest.param(module, ("--all",), marks=pytest.mark.long) for module in WITH_MORE),
    ],
)
def test_the_interpreter_finds_what_the_formulas_say(module: str, words: tuple[str, ...]) -> None:
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    ran = python(f"tests.{module}", *words, TRITON_INTERPRET="1")
    assert ran.returncode == 0, ran.errors[-3000:]

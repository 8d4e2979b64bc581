"""FlashInfer's own environment variables, as a value for the kernels: what is said of a build agrees with what it does.

Knows: their names and FlashInfer's reading of them (0.6.13, jit/core.py and jit/cpp_ext.py).
Does not know: what is done with them (models/kernels/attention/flashinfer_build.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from models.kernels.interface import FlashInferSwitches


def flashinfer_switches(environ: Mapping[str, str]) -> FlashInferSwitches:
    return FlashInferSwitches(
        compiles=not environ.get("FLASHINFER_DISABLE_JIT"), nvcc=environ.get("FLASHINFER_NVCC") or None
    )

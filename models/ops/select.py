"""Selects the kernels of a device: the NVIDIA kernels where they can run, the torch reference otherwise.

Knows: the order of preference, and the warning about a slower choice.
Does not know: how any kernel works.
"""

from __future__ import annotations

import logging

import torch

from models.kernels.interface import NO_SWITCHES, FlashInferSwitches, PrefillWanted
from models.kernels.traits import FLOAT8_CAPABILITY
from models.ops import rows_reference
from models.ops.contract import Ops
from models.ops.rows_reference import invariant
from models.ops.table import TableOps

log = logging.getLogger(__name__)


def select_kernels(
    device: torch.device | str, dtype: torch.dtype, head_dim: int, prefill_attention: PrefillWanted = "auto",
    flashinfer: FlashInferSwitches = NO_SWITCHES, *, deterministic: bool = False, depth: int = 2,
    fp8_activations: str = "auto",
) -> Ops:  # fmt: skip
    """The fastest kernels that run on ``device``; the reference on CPUs and wherever the others cannot run.

    One warning says what is slower, why, and how to change it. ``prefill_attention``: the implementation to prefer
    (prefill_choice.py); ``Ops.agree_on_kernels`` makes the final choice. ``flashinfer``: its environment variables.
    ``deterministic``: batch-invariant ones, of which there is one set a kind of device; the reference, which is not,
    where they cannot run. ``depth``: steps in flight besides the one that lands next, for which FlashInfer's plans have
    places. ``fp8_activations``: as EngineConfig has it; "never" where a GPU has no FP8 tensor cores.
    """
    device = torch.device(device)
    kernels: Ops
    if device.type == "cpu":
        kernels = reference_ops(deterministic=deterministic)
        kernels.fp8_activations = fp8_activations
        return kernels
    try:  # here: triton exists on GPU machines only
        from models.ops.nvidia import InvariantNvidiaOps, NvidiaOps, unsupported
    except ImportError as missing:
        return _reference(device, f"{missing}; install the extra: pip install 'lockstride[cuda]'")
    reason = unsupported(device)
    if reason is not None:
        return _reference(device, reason)
    if deterministic:
        return InvariantNvidiaOps(device)
    kernels = NvidiaOps(device, prefill=prefill_attention, flashinfer=flashinfer, depth=depth)
    if kernels.traits.capability < FLOAT8_CAPABILITY:
        fp8_activations = "never"
    kernels.fp8_activations = kernels.matmul.fp8_activations = fp8_activations
    kernels.prepare_prefill(dtype, head_dim)
    return kernels


def fp8_path(kernels: Ops) -> str:
    """How products with FP8 weights take activations, for logs and the doctor."""
    if kernels.batch_invariant:
        return "as they are, of decoded weights"
    on_gpu = kernels.name != "reference"
    said = {
        "auto": "as FP8 codes from two rows on, or where faster" if on_gpu else "as they are",
        "always": "as FP8 codes",
    }
    return said.get(kernels.fp8_activations, "as they are")


def reference_ops(*, deterministic: bool = False) -> TableOps:
    """Ops in plain torch, for any device and float dtype. ``deterministic``: token by token, for CPUs; slow, for a
    prompt takes a pass over the weights for each token."""
    ops = TableOps()
    ops.name = "deterministic reference" if deterministic else "reference"
    rows = (*invariant.ROWS, *rows_reference.ROWS) if deterministic else rows_reference.ROWS
    ops.bind_rows(rows, invariant=deterministic)
    return ops


def _reference(device: torch.device, reason: str) -> Ops:
    log.warning("every operation on %s runs in plain torch, several times slower than it could: %s", device, reason)
    kernels = reference_ops()
    kernels.slower = reason
    return kernels

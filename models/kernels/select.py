"""Selects the kernels of a device: the NVIDIA kernels where they can run, the torch reference otherwise.

Knows: the order of preference, and what to tell the user about a slower choice.
Does not know: how any kernel works.
"""

from __future__ import annotations

import logging

import torch

from models.kernels.deterministic_reference import DeterministicReferenceKernels
from models.kernels.interface import NO_SWITCHES, FlashInferSwitches, Kernels, PrefillWanted
from models.kernels.reference import ReferenceKernels

log = logging.getLogger(__name__)


def select_kernels(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    prefill_attention: PrefillWanted = "auto",
    flashinfer: FlashInferSwitches = NO_SWITCHES,
    *,
    deterministic: bool = False,
    depth: int = 2,
) -> Kernels:
    """The fastest kernels that run on ``device``; the reference on CPUs and wherever the others cannot run.

    One warning says what is slower, why, and how to change it. ``prefill_attention``: the implementation to prefer
    (prefill_choice.py); ``Kernels.agree_on_kernels`` makes the final choice. ``flashinfer``: its environment variables.
    ``deterministic``: batch-invariant ones, of which there is one set a kind of device; the reference, which is not,
    where they cannot run. ``depth``: steps in flight beside the one that lands next, for which FlashInfer's plans have
    places.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return DeterministicReferenceKernels() if deterministic else ReferenceKernels()
    try:
        from models.kernels.nvidia import NvidiaKernels, unsupported  # here: triton exists on GPU machines only
    except ImportError as missing:
        return _reference(device, f"{missing}; install the extra: pip install 'lockstride[cuda]'")
    reason = unsupported(device)
    if reason is not None:
        return _reference(device, reason)
    if deterministic:
        from models.kernels.deterministic import DeterministicKernels

        return DeterministicKernels(device)
    kernels = NvidiaKernels(device, prefill=prefill_attention, flashinfer=flashinfer, depth=depth)
    kernels.prepare_prefill(dtype, head_dim)
    return kernels


def _reference(device: torch.device, reason: str) -> ReferenceKernels:
    log.warning("every operation on %s runs in plain torch, several times slower than it could: %s", device, reason)
    kernels = ReferenceKernels()
    kernels.slower = reason
    return kernels

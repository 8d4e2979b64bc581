"""Which kernels run: those for Hopper where they can, the torch reference otherwise.

Knows: the order of preference, and what a user should be told about a slower choice.
Does not know: how any kernel works.
"""

from __future__ import annotations

import logging

import torch

from models.kernels.interface import Kernels
from models.kernels.reference import ReferenceKernels

log = logging.getLogger(__name__)


def select_kernels(device: torch.device | str, dtype: torch.dtype, head_dim: int) -> Kernels:
    """The fastest kernels that run on this device; the reference on CPUs and wherever the others cannot run.

    One warning says what is slower, why and how to change it: the whole step without Hopper kernels, or prefill
    attention where FlashInfer lacks the dtype or head_dim.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return ReferenceKernels()
    try:
        # Imported here: triton and flashinfer exist on GPU machines only.
        from models.kernels.flashinfer_attention import HALF_DTYPES, PREFILL_HEAD_DIMS, PagedPrefill
        from models.kernels.hopper import HopperKernels, unsupported
    except ImportError as missing:
        _warn_reference(device, f"{missing}; install the extra: pip install 'lockstride[cuda]'")
        return ReferenceKernels()
    reason = unsupported(device)
    if reason is not None:
        _warn_reference(device, reason)
        return ReferenceKernels()
    if not PagedPrefill.supports(dtype, head_dim):
        log.warning(
            "prefill attention runs in plain torch, several times slower: FlashInfer takes %s with head_dim %s, "
            "not %s with head_dim %d; a half dtype (--dtype bfloat16) helps where head_dim is one of these",
            " or ".join(str(half) for half in HALF_DTYPES),
            ", ".join(map(str, PREFILL_HEAD_DIMS)),
            dtype,
            head_dim,
        )
    kernels = HopperKernels(device)
    kernels.build_prefill_ahead(dtype, head_dim)
    return kernels


def _warn_reference(device: torch.device, reason: str) -> None:
    log.warning("every operation on %s runs in plain torch, several times slower than it could: %s", device, reason)

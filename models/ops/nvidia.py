"""Ops of NVIDIA GPUs: their rows, bound to one device; tuned for Hopper (sm_90).

Knows: the workspaces that kernels share, and what is agreed on with other ranks. Does not know: which kernel serves
which call (rows_nvidia), models, steps or graphs.

One object serves one stream: its kernels share workspaces that are safe only in stream order. Everything that a decode
step calls can be captured after one warm-up call of the same shape outside a capture, on a stream that waited for the
current one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from models.kernels.attention import decode_work
from models.kernels.attention import invariant as invariant_attention
from models.kernels.attention.decode_choice import DecodeChoice
from models.kernels.attention.prefill_choice import Prefill
from models.kernels.interface import NO_SWITCHES, FlashInferSwitches, PrefillWanted
from models.kernels.matmul import invariant as invariant_products
from models.kernels.matmul.choice_table import ChoiceTable
from models.kernels.traits import DeviceTraits, traits_of
from models.ops import rows_nvidia, rows_reference
from models.ops.table import TableOps
from models.ops.tuned import TunedProducts

_PRODUCT_BYTES = 64 << 20  # of sums of segments of invariant products
_ATTENTION_BYTES = 128 << 20  # of partial results of splits


class _NvidiaOps(TableOps):
    """``attention_sums`` float32, ``attention_counters`` int32 [COUNTERS]: workspace of decode attention."""

    expert_tile = 16  # of tensor cores

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        reason = unsupported(device)
        if reason is not None:
            raise RuntimeError(f"the {self.name} kernels cannot run on {device}: {reason}")
        self._place(device, traits_of(device))

    def _place(self, device: torch.device, traits: DeviceTraits) -> None:
        self.device, self.traits, self.pdl = device, traits, traits.dependent_launch
        self.attention_sums = torch.empty(_ATTENTION_BYTES // 4, dtype=torch.float32, device=device)
        most = max(decode_work.COUNTERS, invariant_attention.COUNTERS)
        self.attention_counters = torch.zeros(most, dtype=torch.int32, device=device)


class NvidiaOps(_NvidiaOps):
    """The fastest ops. ``choices`` overrules the shipped choice table. ``prefill``: which prefill attention to run.
    ``flashinfer``: FlashInfer's environment variables. ``depth``: steps in flight besides the one that lands next, for
    which FlashInfer's plans have places.

    Takes about 0.6 GiB of device memory for workspaces. Raises RuntimeError on a device ``unsupported`` refuses.
    """

    name = "hopper"

    def __init__(
        self, device: torch.device | str, *, choices: ChoiceTable | None = None, prefill: PrefillWanted = "auto",
        flashinfer: FlashInferSwitches = NO_SWITCHES, depth: int = 2,
    ) -> None:  # fmt: skip
        super().__init__(device)
        self.matmul = TunedProducts(self.device, self.traits, choices)
        self.prefill = Prefill(self.device, prefill, self.traits, flashinfer, depth)
        self.bind()

    def bind(self) -> None:
        """The rows of this device."""
        self.bind_rows((*rows_nvidia.ROWS, *rows_reference.ROWS), rows_nvidia.KEYS)

    @property
    def decode_choice(self) -> DecodeChoice:
        """By the table of choices as it is now: ``forget`` what was bound to an earlier one."""
        choices = self.matmul.choices.attention
        return DecodeChoice(self.traits, self.pdl, choices, self.attention_sums.numel())

    def tune_seen(self, folder: Path | None, share: Callable[[Callable[[], str]], str]) -> int:
        measured = self.matmul.tune_seen(folder, share)
        self.forget()
        return measured

    def prepare_prefill(self, dtype: torch.dtype, head_dim: int) -> None:
        """Starts loading what prefill of this dtype and head size needs; ``agree_on_kernels`` waits for it."""
        self.prefill.prepare(dtype, head_dim)

    def agree_on_kernels(self, agree_min: Callable[[int], int]) -> None:
        self.prefill.agree(agree_min)

    @property
    def prefill_name(self) -> str:
        return self.prefill.name

    @property
    def slower_prefill(self) -> str | None:
        return self.prefill.slower

    @property
    def slower_kernels(self) -> Mapping[str, str]:
        return {**self.matmul.slower, **self.stood_in}


class InvariantNvidiaOps(_NvidiaOps):
    """Those of the deterministic mode: no result depends on who shares a step. docs/determinism.md says what the mode
    promises, and which tests show it.

    ``sums`` float32, ``counters`` int32: workspace of products. Takes 0.2 GiB of device memory. Raises RuntimeError on
    a device that ``unsupported`` refuses, and for shapes without an invariant row.
    """

    name = "deterministic"

    def _place(self, device: torch.device, traits: DeviceTraits) -> None:
        super()._place(device, traits)
        self.sums = torch.empty(_PRODUCT_BYTES // 4, dtype=torch.float32, device=device)
        self.counters = torch.zeros(invariant_products.COUNTERS, dtype=torch.int32, device=device)
        self.bind()

    def bind(self) -> None:
        """The rows of this device that promise it."""
        rows = (*rows_nvidia.INVARIANT_ROWS, *rows_nvidia.ROWS, *rows_reference.ROWS)
        self.bind_rows(rows, rows_nvidia.KEYS, invariant=True)


def unsupported(device: torch.device) -> str | None:
    """Why these ops cannot run on ``device``; None where they can."""
    if device.type != "cuda":
        return f"it is a {device.type} device; these kernels need an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return (
            f"its compute capability is {major}.{minor}; the Triton kernels need bfloat16 tensor cores (8.0 or later)"
        )
    return None

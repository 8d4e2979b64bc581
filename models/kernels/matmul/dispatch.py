"""Norms and matrix products on NVIDIA GPUs, and the choice of a kernel for each shape of a product.

Knows: tables of choices, how a shape without one is measured, and the workspaces that split products share.
Does not know: attention and experts (nvidia.py), how a product is computed (gemv.py, skinny.py,
wide.py, cublaslt.py), how candidates are measured (autotune.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from models.kernels.interface import Kernels
from models.kernels.matmul import autotune, choice_table
from models.kernels.matmul import gemv as gemv_triton
from models.kernels.matmul import norm as norm_triton
from models.kernels.matmul import skinny as skinny_triton
from models.kernels.matmul import wide as wide_triton
from models.kernels.matmul.candidates import candidates_for, default_choice, quick_candidates, worth_measuring
from models.kernels.matmul.choice_table import Blas, Choice, ChoiceTable, CublasLt, Gemv, LinearShape, Skinny, Wide
from models.kernels.matmul.cublaslt import CublasLtError
from models.kernels.matmul.cublaslt import Linear as CublasLtLinear
from parallel.comm.peer_buffers import PeerBuffers

log = logging.getLogger(__name__)

SHIPPED_CHOICES = Path(__file__).parent / "tuned"
PARTIAL_BYTES = 64 << 20
_ALGORITHMS = 40  # of cuBLASLt, where everything is tried; a start-up takes the first few
PUSH_KERNELS = (Gemv, Skinny)  # whose kernels can put results into other ranks' places where a sum follows
MAX_PUSHED_ROWS = 32  # steps of two H200s: with 128 and 256 they were longer


class HopperProducts(Kernels):
    """The part of HopperKernels that depends on a table of choices. ``choices`` overrules the shipped one."""

    def __init__(self, device: torch.device, choices: ChoiceTable | None = None) -> None:
        self.device = device
        self.pdl = torch.cuda.get_device_capability(device)[0] >= 9
        self.choices = shipped_choices(device)
        if choices is not None:
            self.choices.update(choices)
        self._resolved: dict[LinearShape, Choice] = {}  # choices, looked up once a shape
        self._lt = _open_cublaslt(device)
        self._partial = torch.empty(PARTIAL_BYTES // 4, dtype=torch.float32, device=device)
        self._counters = torch.zeros(skinny_triton.COUNTERS, dtype=torch.int32, device=device)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def rms_norm(self, x_TN: Tensor, weight_N: Tensor, eps: float) -> Tensor:
        return norm_triton.rms_norm(x_TN.contiguous(), None, weight_N, eps, self.pdl)

    def add_rms_norm(self, x_TN: Tensor, residual_TN: Tensor, weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return norm_triton.rms_norm(x_TN.contiguous(), residual_TN, weight_N, eps, self.pdl), residual_TN

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        return norm_triton.silu_mul(gate_up_T2I, self.pdl)

    # -- products -----------------------------------------------------------------------------------------------------

    def linear(self, x_TN: Tensor, weight_ON: Tensor, bias_O: Tensor | None = None) -> Tensor:
        shape = LinearShape(x_TN.shape[0], weight_ON.shape[0], weight_ON.shape[1], x_TN.dtype)
        return self._product(x_TN, weight_ON, bias_O, self.choice(shape), gate_up=False)

    def linear_push(
        self, buffers: PeerBuffers, x_TN: Tensor, weight_ON: Tensor, bias_O: Tensor | None = None
    ) -> tuple[Tensor, bool]:
        choice = self.choice(LinearShape(x_TN.shape[0], weight_ON.shape[0], weight_ON.shape[1], x_TN.dtype))
        pushed = isinstance(choice, PUSH_KERNELS) and x_TN.shape[0] <= MAX_PUSHED_ROWS
        into = buffers if pushed else None
        return self._product(x_TN, weight_ON, bias_O, choice, gate_up=False, buffers=into), pushed

    def add_norm_linear(
        self,
        x_TN: Tensor,
        residual_TN: Tensor | None,
        norm_N: Tensor,
        eps: float,
        weight_ON: Tensor,
        bias_O: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        shape = LinearShape(x_TN.shape[0], weight_ON.shape[0], weight_ON.shape[1], x_TN.dtype, normed=True)
        choice = self.choice(shape)
        return self._normed_product(x_TN, residual_TN, norm_N, eps, weight_ON, bias_O, choice, gate_up=False)

    def gate_up(self, x_TN: Tensor, gate_up_2IN: Tensor) -> Tensor:
        rows, (outputs, inner) = x_TN.shape[0], gate_up_2IN.shape
        shape = LinearShape(rows, outputs, inner, x_TN.dtype, gate_up=True)
        return self._product(x_TN, gate_up_2IN, None, self.choice(shape), gate_up=True)

    def add_norm_gate_up(
        self, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, gate_up_2IN: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, (outputs, inner) = x_TN.shape[0], gate_up_2IN.shape
        shape = LinearShape(rows, outputs, inner, x_TN.dtype, normed=True, gate_up=True)
        choice = self.choice(shape)
        return self._normed_product(x_TN, residual_TN, norm_N, eps, gate_up_2IN, None, choice, gate_up=True)

    def choice(self, shape: LinearShape) -> Choice:
        """The kernel for a product: measured if the table has it, else the default, and cuBLAS where it cannot run."""
        held = self._resolved.get(shape)
        if held is None:
            held = self._resolved[shape] = self._resolve(shape)
        return held

    def choose(self, shape: LinearShape, choice: Choice) -> None:
        """Use ``choice`` for the bucket of ``shape`` from here on (graphs already captured keep what they have)."""
        self.choices.put(shape, choice)
        self._resolved.clear()

    def _resolve(self, shape: LinearShape) -> Choice:
        found = self.choices.get(shape) or default_choice(shape)
        return found if self._fits(shape, found) else Blas()

    def tune(self, shapes: Iterable[LinearShape], folder: Path | None = None, *, quick: bool = False) -> int:
        """Measure every shape whose bucket has no choice yet, and return how many those were; ``folder`` keeps and
        recalls measurements. ``quick`` tries only what needs no compiling. A shape that cannot be measured, for which
        memory is too small for instance, keeps its default.

        Host-synchronous, for start-up only. In a job of several ranks call it on one and give its ``choices`` to the
        others, so that all of them run the same kernels.
        """
        path = None if folder is None else choice_table.cache_file(folder, self.device)
        kept = ChoiceTable() if path is None else choice_table.recall(path)
        self.choices.fill(kept)  # the shipped table, measured in whole layers, knows better
        self._resolved.clear()
        missing = {shape.bucket.key: shape.bucket for shape in shapes if self.choices.get(shape) is None}
        measured = 0
        for shape in missing.values():
            try:
                tried = quick_candidates(shape, self._lt_choices(shape)) if quick else self.candidates(shape)
                choice, us = autotune.fastest(shape, tried, self._run_candidate(shape), self.device)
            except RuntimeError as error:
                log.warning("%s: not measured, its default kernel stays: %s", shape.key, error)
                continue
            log.info("%s: %s, %.1f us", shape.key, choice, us)
            kept.put(shape, choice)
            self.choose(shape, choice)
            measured += 1
        if path is not None and measured:
            choice_table.keep(path, kept)
        return measured

    def tune_seen(self, folder: Path | None, share: Callable[[Callable[[], str]], str]) -> int:
        seen = [shape for shape in self._resolved if worth_measuring(shape)]
        measured = 0

        def make() -> str:
            nonlocal measured
            measured = self.tune(seen, folder, quick=True)
            return self.choices.to_json()

        self.choices = ChoiceTable.from_json(share(make))
        self._resolved.clear()
        return measured

    def candidates(self, shape: LinearShape) -> list[Choice]:
        """Every choice that can run ``shape``, cuBLAS included."""
        found: list[Choice] = [Blas(), *self._lt_choices(shape)]
        return found + [choice for choice in candidates_for(shape) if self._fits(shape, choice)]

    def _lt_choices(self, shape: LinearShape) -> list[Choice]:
        if self._lt is None or shape.rows < 16 or shape.dtype not in (torch.bfloat16, torch.float16):
            return []
        names = self._lt.algorithms(shape.rows, shape.outputs, shape.inner, shape.dtype, most=_ALGORITHMS)
        return [CublasLt(name, self._lt.version) for name in names]

    def _run_candidate(self, shape: LinearShape) -> autotune.Run:
        if not shape.normed:
            return lambda x, weight, choice: self._product(x, weight, None, choice, gate_up=shape.gate_up)
        residual = torch.randn(shape.rows, shape.inner, dtype=shape.dtype, device=self.device)
        norm = torch.ones(shape.inner, dtype=shape.dtype, device=self.device)
        return lambda x, weight, choice: self._normed_product(
            x, residual, norm, 1e-6, weight, None, choice, gate_up=shape.gate_up
        )[0]

    def _fits(self, shape: LinearShape, choice: Choice) -> bool:
        match choice:
            case CublasLt():
                return self._lt_fits(shape, choice)
            case Skinny():
                return self._skinny_fits(shape, choice)
            case Wide():
                return self._wide_fits(shape, choice)
            case _:
                return True

    def _lt_fits(self, shape: LinearShape, choice: CublasLt) -> bool:
        return self._lt is not None and choice.version == self._lt.version and shape.rows == shape.bucket.rows

    def _skinny_fits(self, shape: LinearShape, choice: Skinny) -> bool:
        floats = skinny_triton.workspace_floats(shape.rows, shape.outputs, choice.block_m, choice.block_o, choice.split)
        tiles = shape.outputs // choice.block_o * -(-shape.rows // choice.block_m)
        return floats <= self._partial.numel() and (choice.split == 1 or tiles <= skinny_triton.COUNTERS)

    def _wide_fits(self, shape: LinearShape, choice: Wide) -> bool:
        floats = wide_triton.workspace_floats(shape.outputs, choice.block_m, choice.split)
        enough = floats <= self._partial.numel() and shape.outputs // choice.block_o <= skinny_triton.COUNTERS
        return self.pdl and shape.rows <= choice.block_m and enough

    def _product(
        self,
        x_MK: Tensor,
        weight_OK: Tensor,
        bias_O: Tensor | None,
        choice: Choice,
        *,
        gate_up: bool,
        buffers: PeerBuffers | None = None,
    ) -> Tensor:
        """linear, followed by silu_mul where ``gate_up``. ``places``, for a choice that is PUSH_KERNELS: the result
        goes there, too."""
        x_MK = x_MK.contiguous()
        match choice:
            case Gemv():
                return self._gemv(x_MK, None, None, 0.0, weight_OK, bias_O, choice, gate_up=gate_up, buffers=buffers)[0]
            case Skinny():
                return self._skinny(x_MK, None, None, 0.0, weight_OK, bias_O, choice, gate_up=gate_up, buffers=buffers)[
                    0
                ]
            case Wide():
                return self._wide(x_MK, weight_OK, bias_O, choice, gate_up=gate_up)
            case CublasLt() if bias_O is None and self._lt is not None:
                out_MO = self._lt.run(x_MK, weight_OK, choice.algorithm)
            case _:
                out_MO = F.linear(x_MK, weight_OK, bias_O)
        return self.silu_mul(out_MO) if gate_up else out_MO

    def _normed_product(
        self,
        x_MK: Tensor,
        residual_MK: Tensor | None,
        norm_K: Tensor,
        eps: float,
        weight_OK: Tensor,
        bias_O: Tensor | None,
        choice: Choice,
        *,
        gate_up: bool,
    ) -> tuple[Tensor, Tensor]:
        """_product of rms_norm(x + residual), and the sum; one kernel where the choice allows."""
        x_MK = x_MK.contiguous()
        if isinstance(choice, Gemv):
            return self._gemv(x_MK, residual_MK, norm_K, eps, weight_OK, bias_O, choice, gate_up=gate_up)
        if isinstance(choice, Skinny) and choice.fold:
            return self._skinny(x_MK, residual_MK, norm_K, eps, weight_OK, bias_O, choice, gate_up=gate_up)
        hidden_MK, residual_MK = self._add_norm(x_MK, residual_MK, norm_K, eps)
        return self._product(hidden_MK, weight_OK, bias_O, choice, gate_up=gate_up), residual_MK

    def _gemv(
        self,
        x_MK: Tensor,
        residual_MK: Tensor | None,
        norm_K: Tensor | None,
        eps: float,
        weight_OK: Tensor,
        bias_O: Tensor | None,
        choice: Gemv,
        *,
        gate_up: bool,
        buffers: PeerBuffers | None = None,
    ) -> tuple[Tensor, Tensor]:
        return gemv_triton.gemv(
            x_MK,
            weight_OK,
            bias_O,
            norm_K=norm_K,
            eps=eps,
            residual_MK=residual_MK,
            gate_up=gate_up,
            block_o=choice.block_o,
            chunk=choice.chunk,
            warps=choice.warps,
            prefetch=choice.prefetch,
            buffers=buffers,
            pdl=self.pdl,
        )

    def _skinny(
        self,
        x_MK: Tensor,
        residual_MK: Tensor | None,
        norm_K: Tensor | None,
        eps: float,
        weight_OK: Tensor,
        bias_O: Tensor | None,
        choice: Skinny,
        *,
        gate_up: bool,
        buffers: PeerBuffers | None = None,
    ) -> tuple[Tensor, Tensor]:
        return skinny_triton.skinny(
            x_MK,
            weight_OK,
            bias_O,
            self._partial,
            self._counters,
            norm_K=norm_K,
            eps=eps,
            residual_MK=residual_MK,
            gate_up=gate_up,
            block_m=choice.block_m,
            block_o=choice.block_o,
            block_k=choice.block_k,
            split=choice.split,
            stages=choice.stages,
            warps=choice.warps,
            prefetch=choice.prefetch,
            buffers=buffers,
            pdl=self.pdl,
        )

    def _wide(self, x_MK: Tensor, weight_OK: Tensor, bias_O: Tensor | None, choice: Wide, *, gate_up: bool) -> Tensor:
        return wide_triton.wide(
            x_MK,
            weight_OK,
            bias_O,
            self._partial,
            self._counters,
            gate_up=gate_up,
            block_m=choice.block_m,
            block_o=choice.block_o,
            block_k=choice.block_k,
            split=choice.split,
            stages=choice.stages,
            warps=choice.warps,
            prefetch=choice.prefetch,
            pdl=self.pdl,
        )


def _open_cublaslt(device: torch.device) -> CublasLtLinear | None:
    try:
        return CublasLtLinear(device)
    except (OSError, CublasLtError) as error:
        log.warning("products by cuBLASLt's algorithms are not available, cuBLAS does them: %s", error)
        return None


def shipped_choices(device: torch.device) -> ChoiceTable:
    """Choices measured ahead for this GPU model, an empty table for others."""
    name = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    return choice_table.load(SHIPPED_CHOICES / f"{name}.json")

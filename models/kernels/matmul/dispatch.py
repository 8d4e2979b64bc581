"""Matrix products on NVIDIA GPUs: the choice of a kernel for each shape, and its launch.

Knows: choice tables, when a shape is measured, and the workspaces that split-K kernels share. Does not know: the other
operations of a model (nvidia.py), how a product is computed (gemv.py, skinny.py, wide.py, cublaslt.py), how candidates
are timed (autotune.py).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from models.kernels.matmul import autotune, choice_table, gemv, norm, skinny, wide
from models.kernels.matmul.candidates import (
    MOST_GEMV_ROWS,
    candidates_for,
    default_choice,
    first_wave,
    quick_candidates,
    worth_measuring,
)
from models.kernels.matmul.choice_table import Blas, Choice, ChoiceTable, CublasLt, Gemv, LinearShape, Skinny, Wide
from models.kernels.matmul.cublaslt import CublasLtError
from models.kernels.matmul.cublaslt import Linear as CublasLtLinear
from models.kernels.traits import DeviceTraits, traits_of
from models.row_buckets import LARGE_STEP
from parallel.comm.peer_buffers import PeerBuffers
from parallel.layers.weight import Weight

log = logging.getLogger(__name__)

PARTIAL_BYTES = 64 << 20
_ALGORITHMS = 40  # of cuBLASLt, in a full search; a start-up tries the first few
PUSH_KERNELS = (Gemv, Skinny)  # can push results into peer buffers where an all-reduce follows
MAX_PUSHED_ROWS = 32  # on two H200s steps of 128 and 256 rows got longer by pushing


class MatmulDispatch:
    """Matrix products of one device and one stream, each by the kernel that the choice table has for its shape.

    ``choices`` overrules the shipped table. Takes 128 MiB of device memory for workspaces.
    """

    _measured_here = True  # on this model of GPU, where what was measured runs as it is

    def __init__(self, device: torch.device, traits: DeviceTraits, choices: ChoiceTable | None = None) -> None:
        self.device = device
        self.traits = traits
        self.pdl = traits.dependent_launch
        self.choices = shipped_choices(device)
        if choices is not None:
            self.choices.update(choices)
        self._resolved: dict[LinearShape, Choice] = {}  # choices, looked up once a shape
        self._slower: dict[str, str] = {}
        self._lt = self._open_cublaslt()
        self._partial = torch.empty(PARTIAL_BYTES // 4, dtype=torch.float32, device=device)
        self._counters = torch.zeros(skinny.COUNTERS, dtype=torch.int32, device=device)

    def _open_cublaslt(self) -> CublasLtLinear | None:
        try:
            return CublasLtLinear(self.device)
        except (OSError, CublasLtError) as error:
            log.warning("products by cuBLASLt's algorithms are not available, cuBLAS does them: %s", error)
            self._slower["cublas_products"] = f"products by cuBLASLt's algorithms are not available: {error}"
            return None

    @property
    def slower(self) -> dict[str, str]:
        """See ``Kernels.slower_kernels``; of the shapes that were run since the table changed last."""
        found = dict(self._slower)
        stood_in = [shape for shape in self._resolved if self._chosen_cannot_run(shape)]
        if stood_in:
            reason = f"algorithms of cuBLASLt that were chosen for {len(stood_in)} shapes cannot run here, one for "
            found.setdefault("cublas_products", f"{reason}{stood_in[0].key}: `launch tune` measures anew")
        return found

    # The operations below are those of the Kernels protocol (models/kernels/interface.py).

    def linear(self, x_TN: Tensor, weight: Weight) -> Tensor:
        return self.run(x_TN, weight, self.choice(LinearShape.of(x_TN, weight)), gate_up=False)

    def linear_push(self, buffers: PeerBuffers, x_TN: Tensor, weight: Weight) -> tuple[Tensor, bool]:
        choice = self.choice(LinearShape.of(x_TN, weight))
        pushed = isinstance(choice, PUSH_KERNELS) and x_TN.shape[0] <= MAX_PUSHED_ROWS
        into = buffers if pushed else None
        return self.run(x_TN, weight, choice, gate_up=False, buffers=into), pushed

    def add_norm_linear(
        self, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, weight: Weight
    ) -> tuple[Tensor, Tensor]:
        choice = self.choice(LinearShape.of(x_TN, weight, normed=True))
        return self.run_normed(x_TN, residual_TN, norm_N, eps, weight, choice, gate_up=False)

    def gate_up(self, x_TN: Tensor, weight: Weight) -> Tensor:
        return self.run(x_TN, weight, self.choice(LinearShape.of(x_TN, weight, gate_up=True)), gate_up=True)

    def add_norm_gate_up(
        self, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, weight: Weight
    ) -> tuple[Tensor, Tensor]:
        choice = self.choice(LinearShape.of(x_TN, weight, normed=True, gate_up=True))
        return self.run_normed(x_TN, residual_TN, norm_N, eps, weight, choice, gate_up=True)

    def gate_up_down(self, x_TN: Tensor, gate_up: Weight, down: Weight) -> Tensor:
        """In slices of at most LARGE_STEP rows, so that the widest activations of a step take little memory."""
        rows = x_TN.shape[0]
        if rows <= LARGE_STEP or down.bias is not None:
            return self.linear(self.gate_up(x_TN, gate_up), down)
        x_TN = x_TN.contiguous()
        size = slice_rows(rows)
        for x_SN in (x_TN[start : start + size] for start in range(0, rows, size)):
            hidden_SI = self.gate_up(x_SN, gate_up)
            choice = self.choice(LinearShape.of(x_SN, down))
            self._library_linear(hidden_SI, down, choice, x_SN)  # this slice of x is not read again
            del hidden_SI  # or it would stand beside the next one
        return x_TN

    def choice(self, shape: LinearShape) -> Choice:
        """The kernel for a product: the table's, else the default one; cuBLAS where that cannot run."""
        held = self._resolved.get(shape)
        if held is None:
            held = self._resolved[shape] = self._resolve(shape)
        return held

    def choose(self, shape: LinearShape, choice: Choice) -> None:
        """Uses ``choice`` for the bucket of ``shape`` from now on; graphs already captured keep theirs."""
        self.choices.put(shape, choice)
        self._resolved.clear()

    def _resolve(self, shape: LinearShape) -> Choice:
        if (found := self._measured(shape)) is not None:
            return found
        if self._chosen_cannot_run(shape):
            return Blas()  # an algorithm of cuBLASLt won: cuBLAS's own choice is nearest to it
        found = default_choice(shape, self.traits)
        return found if self._fits(shape, found) else Blas()

    def _chosen_cannot_run(self, shape: LinearShape) -> bool:
        """Whether the table has a kernel for the shape, but none that runs here: cuBLASLt's, of another version."""
        return next(self.choices.near(shape), None) is not None and self._measured(shape) is None

    def _measured(self, shape: LinearShape) -> Choice | None:
        """The table's nearest choice that can run ``shape`` (choice_table.py says which may); None for the default."""
        return next((choice for rows, choice in self.choices.near(shape) if self._fits(shape, choice, rows)), None)

    def tune(self, shapes: Iterable[LinearShape], folder: Path | None = None, *, quick: bool = False) -> int:
        """Measures every shape for which no bucket that was measured has a kernel, and returns how many were measured.

        ``folder``: holds what `launch tune` chose, which overrules the shipped table, and caches what is measured here,
        which does not. ``quick`` tries only kernels that need no compilation. A shape that cannot be measured, for want
        of memory for instance, keeps its default. Synchronises with the device: for start-up only. With several ranks,
        call it on one and hand its ``choices`` to the others, so that all run the same kernels.
        """
        path = None if folder is None else choice_table.cache_file(folder, self.device)
        kept = ChoiceTable() if path is None else choice_table.recall(path)
        if folder is not None:
            self.choices.update(choice_table.recall(choice_table.tuned_file(folder, self.traits.name)))
        # What was measured in whole layers wins, also where it stands in for another bucket.
        self.choices.fill(ChoiceTable({key: kept.choices[key] for key in self._unanswered(kept)}))
        self._resolved.clear()
        measured = 0
        # The largest first: what was chosen for 64 rows serves 40, and is not measured again.
        for shape in sorted(dict.fromkeys(shape.bucket for shape in shapes), key=lambda shape: -shape.rows):
            if self._measured(shape) is not None:
                continue
            try:
                lt = self._lt_choices(shape)
                tried = quick_candidates(shape, lt, self.traits) if quick else self.candidates(shape)
                choice, us = autotune.fastest(shape, tried, self.runner(shape), self.device)
            except RuntimeError as error:
                log.warning("%s: not measured, its default kernel stays: %s", shape.key, error)
                self._slower["untuned_products"] = f"not all could be measured; the last was {shape.key}: {error}"
                continue
            log.info("%s: %s, %.1f us", shape.key, choice, us)
            kept.put(shape, choice)
            self.choose(shape, choice)
            measured += 1
        if path is not None and measured:
            choice_table.keep(path, kept)
        return measured

    def _unanswered(self, kept: ChoiceTable) -> list[str]:
        """Keys of ``kept`` for which the table at hand has no kernel."""
        return [key for key in kept.choices if self._measured(LinearShape.from_key(key)) is None]

    def tune_seen(self, folder: Path | None, share: Callable[[Callable[[], str]], str]) -> int:
        """See the Kernels protocol."""
        seen = [shape for shape in self._resolved if worth_measuring(shape)]
        measured = 0

        def make() -> str:
            nonlocal measured
            measured = self.tune(seen, folder, quick=True)
            return dataclasses.replace(self.choices, gpu=self.traits).to_json()

        self.choices = ChoiceTable.from_json(share(make))
        self._measured_here = self.choices.gpu == self.traits
        self._resolved.clear()
        return measured

    def candidates(self, shape: LinearShape) -> list[Choice]:
        """Every choice that can run ``shape``, cuBLAS included."""
        found: list[Choice] = [Blas(), *self._lt_choices(shape)]
        return found + [choice for choice in candidates_for(shape, self.traits) if self._fits(shape, choice)]

    def _lt_choices(self, shape: LinearShape) -> list[Choice]:
        if self._lt is None or shape.rows < 16 or shape.dtype not in (torch.bfloat16, torch.float16):
            return []
        names = self._lt.algorithms(shape.rows, shape.outputs, shape.inner, shape.dtype, most=_ALGORITHMS)
        return [CublasLt(name, self._lt.version) for name in names]

    def runner(self, shape: LinearShape) -> autotune.Run:
        if not shape.normed:
            return lambda x, weight, choice: self.run(x, weight, choice, gate_up=shape.gate_up)
        residual = torch.randn(shape.rows, shape.inner, dtype=shape.dtype, device=self.device)
        norm_weight = torch.ones(shape.inner, dtype=shape.dtype, device=self.device)
        return lambda x, weight, choice: self.run_normed(
            x, residual, norm_weight, 1e-6, weight, choice, gate_up=shape.gate_up
        )[0]

    def can_run(self, shape: LinearShape, choice: Choice) -> bool:
        """Whether ``choice``, made for other rows of the same product, can run ``shape``."""
        return self._fits(shape, choice, measured_rows=0)

    def _fits(self, shape: LinearShape, choice: Choice, measured_rows: int | None = None) -> bool:
        """Whether ``choice`` can run ``shape``. ``measured_rows``: for which it was measured, those of ``shape`` where
        nobody says.
        """
        match choice:
            case CublasLt():
                return self._lt_fits(shape, choice, measured_rows)
            case Gemv():
                return shape.rows <= MOST_GEMV_ROWS
            case Skinny():
                return self._skinny_fits(shape, choice)
            case Wide():
                return self._wide_fits(shape, choice)
            case _:
                return True

    def _lt_fits(self, shape: LinearShape, choice: CublasLt, measured_rows: int | None) -> bool:
        """An algorithm of another version means nothing; one of other rows or GPUs fits where the library says so."""
        if self._lt is None or choice.version != self._lt.version:
            return False
        exact = self._measured_here and measured_rows in (None, shape.rows)
        return exact or self._lt.can_run(shape.rows, shape.outputs, shape.inner, shape.dtype, choice.algorithm)

    def _skinny_fits(self, shape: LinearShape, choice: Skinny) -> bool:
        floats = skinny.workspace_floats(shape.rows, shape.outputs, choice.block_m, choice.block_o, choice.split)
        tiles = shape.outputs // choice.block_o * -(-shape.rows // choice.block_m)
        enough = floats <= self._partial.numel() and (choice.split == 1 or tiles <= skinny.COUNTERS)
        return enough and self._shares_fit(shape, choice)

    def _shares_fit(self, shape: LinearShape, choice: Skinny | Wide) -> bool:
        """Whether a program of a kernel that another model of GPU chose has the shared memory for it."""
        tile = choice.stages * choice.block_k * (choice.block_m + choice.block_o) * shape.dtype.itemsize
        return self._measured_here or tile <= self.traits.shared_bytes

    def _wide_fits(self, shape: LinearShape, choice: Wide) -> bool:
        floats = wide.workspace_floats(shape.outputs, choice.block_m, choice.split)
        enough = floats <= self._partial.numel() and shape.outputs // choice.block_o <= skinny.COUNTERS
        return self.pdl and shape.rows <= choice.block_m and enough and self._shares_fit(shape, choice)

    def run(
        self,
        x_MK: Tensor,
        weight: Weight,
        choice: Choice,
        *,
        gate_up: bool,
        buffers: PeerBuffers | None = None,
    ) -> Tensor:
        """``linear`` by ``choice``, with SiLU-mul behind it where ``gate_up``.

        ``buffers``, for a choice of PUSH_KERNELS: the kernel pushes its result there, too.
        """
        x_MK = x_MK.contiguous()
        match choice:
            case Gemv():
                return self._gemv(x_MK, None, None, 0.0, weight, choice, gate_up=gate_up, buffers=buffers)[0]
            case Skinny():
                return self._skinny(x_MK, None, None, 0.0, weight, choice, gate_up=gate_up, buffers=buffers)[0]
            case Wide():
                return self._wide(x_MK, weight, choice, gate_up=gate_up)
            case _ if weight.bias is None:
                out_MO = self._library_linear(x_MK, weight, choice)
            case _:
                out_MO = F.linear(x_MK, weight.data, weight.bias)
        return norm.silu_mul(out_MO, self.pdl) if gate_up else out_MO

    def _library_linear(self, x_MK: Tensor, weight: Weight, choice: Choice, out_MO: Tensor | None = None) -> Tensor:
        """By cuBLASLt's algorithm where that is the choice, else by cuBLAS; into ``out_MO`` if given. No bias."""
        if isinstance(choice, CublasLt) and self._lt is not None:
            return self._lt.run(x_MK, weight.data, choice.algorithm, out_MO)
        return torch.mm(x_MK, weight.data.t(), out=out_MO)

    def run_normed(
        self,
        x_MK: Tensor,
        residual_MK: Tensor | None,
        norm_K: Tensor,
        eps: float,
        weight: Weight,
        choice: Choice,
        *,
        gate_up: bool,
    ) -> tuple[Tensor, Tensor]:
        """(``run`` of rms_norm(x + residual), x + residual), in one kernel where ``choice`` fuses them.

        May overwrite ``residual_MK`` and, in large steps, ``x_MK`` (norm.py).
        """
        x_MK = x_MK.contiguous()
        if isinstance(choice, Gemv):
            return self._gemv(x_MK, residual_MK, norm_K, eps, weight, choice, gate_up=gate_up)
        if isinstance(choice, Skinny) and choice.fold:
            return self._skinny(x_MK, residual_MK, norm_K, eps, weight, choice, gate_up=gate_up)
        hidden_MK = norm.rms_norm(x_MK, residual_MK, norm_K, eps, self.pdl)
        total_MK = x_MK if residual_MK is None else residual_MK
        return self.run(hidden_MK, weight, choice, gate_up=gate_up), total_MK

    def _gemv(
        self,
        x_MK: Tensor,
        residual_MK: Tensor | None,
        norm_K: Tensor | None,
        eps: float,
        weight: Weight,
        choice: Gemv,
        *,
        gate_up: bool,
        buffers: PeerBuffers | None = None,
    ) -> tuple[Tensor, Tensor]:
        return gemv.gemv(
            x_MK,
            weight.data,
            weight.bias,
            norm_K=norm_K,
            eps=eps,
            residual_MK=residual_MK,
            gate_up=gate_up,
            block_o=choice.block_o,
            chunk=choice.chunk,
            warps=choice.warps,
            prefetch=choice.prefetch,
            first_wave=first_wave(self.traits),
            buffers=buffers,
            pdl=self.pdl,
        )

    def _skinny(
        self,
        x_MK: Tensor,
        residual_MK: Tensor | None,
        norm_K: Tensor | None,
        eps: float,
        weight: Weight,
        choice: Skinny,
        *,
        gate_up: bool,
        buffers: PeerBuffers | None = None,
    ) -> tuple[Tensor, Tensor]:
        return skinny.skinny(
            x_MK,
            weight.data,
            weight.bias,
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
            late=choice.late,
            buffers=buffers,
            pdl=self.pdl,
        )

    def _wide(self, x_MK: Tensor, weight: Weight, choice: Wide, *, gate_up: bool) -> Tensor:
        return wide.wide(
            x_MK,
            weight.data,
            weight.bias,
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
            late=choice.late,
            pdl=self.pdl,
        )


def slice_rows(rows: int) -> int:
    """Rows of each slice of an MLP over ``rows`` rows: equal but for the last, whole tiles of 128."""
    slices = -(-rows // LARGE_STEP)
    return -(-rows // (slices * 128)) * 128


def shipped_choices(device: torch.device) -> ChoiceTable:
    """The choices shipped for this GPU model, or for one like it; an empty table for others."""
    return choice_table.shipped_for(choice_table.SHIPPED_CHOICES, traits_of(device))

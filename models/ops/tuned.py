"""Matrix products on NVIDIA GPUs: the choice of a row and its configuration for each shape, tuned or by default.

Knows: choice tables, when a shape is measured, that all ranks use rank 0's table, and the workspaces that split-K
kernels share. Does not know: other ops, how a product is computed or called (rows_nvidia/products.py), how candidates
are timed (models/kernels/matmul/autotune.py).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from models.kernels.matmul import autotune, choice_table, codes, norm, skinny
from models.kernels.matmul.candidates import (
    coded_candidates,
    default_choice,
    fp8_variants,
    quick_candidates,
    worth_measuring,
)
from models.kernels.matmul.choice_table import Blas, Choice, ChoiceTable, LinearShape
from models.kernels.matmul.cublaslt import CublasLtError
from models.kernels.matmul.cublaslt import Linear as CublasLtLinear
from models.kernels.traits import DeviceTraits, traits_of
from models.ops.rows_nvidia.products import MAX_PUSHED_ROWS, ROWS, Product, algorithms, by_library, product, reads_codes
from models.row_buckets import LARGE_STEP
from parallel.comm.peer_buffers import PeerBuffers
from parallel.comm.quantised import Activations, Quantised, numbers_of
from parallel.layers.weight import Weight

log = logging.getLogger(__name__)

PARTIAL_BYTES = 64 << 20


class TunedProducts:
    """Matrix products of one device and one stream, each by the row and configuration of the choice table.

    ``choices`` overrules the shipped table. Takes 128 MiB of device memory for workspaces.
    """

    fp8_activations = "auto"  # see EngineConfig
    _measured_here = True  # on this model of GPU, where what was measured runs as it is

    def __init__(self, device: torch.device, traits: DeviceTraits, choices: ChoiceTable | None = None) -> None:
        self.device = device
        self.traits = traits
        self.pdl = traits.dependent_launch
        self.choices = shipped_choices(device)
        if choices is not None:
            self.choices.update(choices)
        self._resolved: dict[LinearShape, Choice] = {}  # choices, looked up once a shape
        self._runs: dict[tuple[object, ...], tuple[Product, bool]] = {}  # by the fields of a shape, and by choice
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
        """See ``Ops.slower_kernels``; of the shapes that were run since the table changed last."""
        found = dict(self._slower)
        stood_in = [shape for shape in self._resolved if self._chosen_cannot_run(shape)]
        if stood_in:
            reason = f"algorithms of cuBLASLt that were chosen for {len(stood_in)} shapes cannot run here, one for "
            found.setdefault("cublas_products", f"{reason}{stood_in[0].key}: `launch tune` measures anew")
        return found

    # The ops below are those of models/ops/contract.py.

    def quantised_for(
        self, weight: Weight, tokens: int, dtype: torch.dtype, *, gate_up: bool = False, numbers: bool = False
    ) -> Quantised | None:
        if weight.parts:
            made = (self.quantised_for(part, tokens, dtype, numbers=True) for part in weight.parts)
            return next((one for one in made if one is not None), None)
        form = weight.format
        if form.block is None or form.code is not None or tokens == 0 or form.activation_cap is not None:
            return None  # what cuts activations is a separate launch
        shape = LinearShape(tokens, weight.outputs, weight.inner, dtype, False, gate_up, weight.format)
        if not reads_codes(shape, self.choice(shape)):
            return None
        return Quantised.empty(tokens, weight.inner, codes.group_of(weight), dtype, self.device, numbers=numbers)

    def linear(self, x_TN: Activations, weight: Weight) -> Tensor:
        if weight.parts:
            return torch.cat([self.linear(x_TN, part) for part in weight.parts], -1)
        return self._run(x_TN, weight, False, False)[0](_whole(x_TN, weight), weight)[0]

    def linear_push(self, buffers: PeerBuffers, x_TN: Activations, weight: Weight) -> tuple[Tensor, bool]:
        if weight.parts:
            return self.linear(x_TN, weight), False
        run, pushes = self._run(x_TN, weight, False, False)
        return run(_whole(x_TN, weight), weight, buffers=buffers if pushes else None)[0], pushes

    def add_norm_linear(
        self, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, weight: Weight
    ) -> tuple[Tensor, Tensor]:
        if weight.parts:
            into = self.quantised_for(weight, x_TN.shape[0], x_TN.dtype)
            hidden_TN = norm.rms_norm(x_TN.contiguous(), residual_TN, norm_N, eps, self.pdl, into)
            return self.linear(into or hidden_TN, weight), x_TN if residual_TN is None else residual_TN
        return self._run(x_TN, weight, True, False)[0](x_TN.contiguous(), weight, residual_TN, norm_N, eps)

    def gate_up(self, x_TN: Activations, weight: Weight, into: Quantised | None = None) -> Tensor:
        if weight.parts:
            return norm.silu_mul(self.linear(x_TN, weight), self.pdl, into, gelu=weight.gelu)
        options = {} if into is None else {"into": into}
        run = self._run(x_TN, weight, False, True, into is not None)[0]
        return run(_whole(x_TN, weight), weight, **options)[0]

    def add_norm_gate_up(
        self, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, weight: Weight,
        into: Quantised | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if weight.parts:
            hidden_T2I, residual_TN = self.add_norm_linear(x_TN, residual_TN, norm_N, eps, weight)
            return norm.silu_mul(hidden_T2I, self.pdl, into, gelu=weight.gelu), residual_TN
        options = {} if into is None else {"into": into}
        run = self._run(x_TN, weight, True, True, into is not None)[0]
        return run(x_TN.contiguous(), weight, residual_TN, norm_N, eps, **options)

    def gate_up_down(self, x_TN: Tensor, gate_up: Weight, down: Weight) -> Tensor:
        """In slices of at most LARGE_STEP rows, so that the widest activations of a step take little memory."""
        rows = x_TN.shape[0]
        if rows <= LARGE_STEP or down.bias is not None or down.parts:
            into = self.quantised_for(down, rows, x_TN.dtype)
            hidden_TI = self.gate_up(x_TN, gate_up, into)
            return self.linear(into or hidden_TI, down)
        x_TN = x_TN.contiguous()
        size = slice_rows(rows)
        for x_SN in (x_TN[start : start + size] for start in range(0, rows, size)):
            into = self.quantised_for(down, len(x_SN), x_SN.dtype)
            hidden_SI = self.gate_up(x_SN, gate_up, into)
            multiply = by_library(self, self.choice(LinearShape.of(x_SN, down)))
            multiply(into or hidden_SI, down, x_SN)  # this slice of x is not read again
            del into, hidden_SI  # or they would take memory with the next one
        return x_TN

    def _run(
        self, x_TN: Activations, weight: Weight, normed: bool, gate_up: bool, into: bool = False
    ) -> tuple[Product, bool]:
        """See products.product."""
        stored = weight.format if weight.format.block else None
        key = (x_TN.shape[0], weight.outputs, weight.inner, x_TN.dtype, normed, gate_up, stored, into)
        found = self._runs.get(key)
        if found is None:
            shape = LinearShape(*key[:-1])
            choice = self.choice(shape)
            # Prompts have thousands of row counts.
            same = choice, normed, gate_up, shape.rows <= MAX_PUSHED_ROWS, stored is None, into
            found = self._runs[key] = self._runs.setdefault(same, product(self, shape, choice, into))
        return found

    def choice(self, shape: LinearShape) -> Choice:
        """The kernel for a product: the table's, else the default one; cuBLAS where that cannot run."""
        held = self._resolved.get(shape)
        if held is None:
            held = self._resolved[shape] = self._resolve(shape)
        return held

    def choose(self, shape: LinearShape, choice: Choice) -> None:
        """Uses ``choice`` for the bucket of ``shape`` from now on; graphs already captured keep theirs."""
        self.choices.put(shape, choice)
        self._forget()

    def _forget(self) -> None:
        """After a change of the table."""
        self._resolved.clear()
        self._runs.clear()

    def _resolve(self, shape: LinearShape) -> Choice:
        if (found := self._measured(shape)) is not None:
            return found
        if shape.stored is not None:
            return self.candidates(shape)[0]
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
        self._forget()
        measured = 0
        # The largest first: what was chosen for 64 rows serves 40, and is not measured again.
        for shape in sorted(dict.fromkeys(shape.bucket for shape in shapes), key=lambda shape: -shape.rows):
            if self._measured(shape) is not None:
                continue
            try:
                tried = self._quickly(shape) if quick else self.candidates(shape)
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
        """See ``Ops.tune_seen``."""
        seen = [shape for shape in self._resolved if worth_measuring(shape)]
        measured = 0

        def make() -> str:
            nonlocal measured
            measured = self.tune(seen, folder, quick=True)
            return dataclasses.replace(self.choices, gpu=self.traits).to_json()

        self.choices = ChoiceTable.from_json(share(make))
        self._measured_here = self.choices.gpu == self.traits
        self._forget()
        return measured

    def candidates(self, shape: LinearShape) -> list[Choice]:
        """Every choice that can run ``shape``, cuBLAS included."""
        tried: Iterable[Choice]
        if shape.stored is not None:
            variants = [] if shape.four_bits else fp8_variants(shape, self.traits)
            tried = dict.fromkeys([*coded_candidates(shape, self.traits), *variants])
        else:
            tried = (choice for row in ROWS.values() if row.variants for choice in row.variants(self, shape))
        return [choice for choice in tried if self._fits(shape, choice)]

    def runner(self, shape: LinearShape) -> autotune.Run:
        """With FP8 weights as in a layer: what makes x quantises it, and SiLU-mul quantises for the next product."""
        into = None
        if shape.gate_up and shape.block is not None and not shape.four_bits and shape.dtype == torch.bfloat16:
            width = shape.outputs // 2
            group = shape.block[1] or width
            into = None if width % group else Quantised.empty(shape.rows, width, group, shape.dtype, self.device)
        if not shape.normed:
            made: list[Quantised] = []

            def multiply(x: Tensor, weight: Weight, choice: Choice) -> Tensor:
                narrow = reads_codes(shape, choice)
                if narrow and not made:
                    made.append(codes.quantised_by(weight, x, self.pdl))
                wanted = into if narrow else None
                return self.run(made[0] if narrow else x, weight, choice, gate_up=shape.gate_up, into=wanted)

            return multiply
        residual = torch.randn(shape.rows, shape.inner, dtype=shape.dtype, device=self.device)
        norm_weight = torch.ones(shape.inner, dtype=shape.dtype, device=self.device)
        return lambda x, weight, choice: self.run_normed(
            x,
            residual,
            norm_weight,
            1e-6,
            weight,
            choice,
            gate_up=shape.gate_up,
            into=into if reads_codes(shape, choice) else None,
        )[0]

    def _quickly(self, shape: LinearShape) -> list[Choice]:
        if shape.stored is not None:
            return [choice for choice in quick_candidates(shape, (), self.traits) if self._fits(shape, choice)]
        return quick_candidates(shape, algorithms(self, shape), self.traits)

    def can_run(self, shape: LinearShape, choice: Choice) -> bool:
        """Whether ``choice``, made for other rows of the same product, can run ``shape``."""
        return self._fits(shape, choice, measured_rows=0)

    def _fits(self, shape: LinearShape, choice: Choice, measured_rows: int | None = None) -> bool:
        """Whether ``choice``, measured for ``measured_rows`` (None: those of ``shape``), can run ``shape``."""
        refuses = ROWS[type(choice)].refuses
        return refuses is None or refuses(self, shape, choice, measured_rows) is None

    def run(
        self, x_MK: Activations, weight: Weight, choice: Choice, *, gate_up: bool, buffers: PeerBuffers | None = None,
        into: Quantised | None = None,
    ) -> Tensor:  # fmt: skip
        """``linear`` by ``choice``, with SiLU-mul after it where ``gate_up``; pushed into ``buffers``, or as codes in
        ``into``, where given."""
        run, _ = product(self, LinearShape.of(x_MK, weight, gate_up=gate_up), choice, into is not None)
        options = {"buffers": buffers} if into is None else {"into": into}
        return run(_whole(x_MK, weight), weight, **options)[0]

    def run_normed(
        self, x_MK: Tensor, residual_MK: Tensor | None, norm_K: Tensor, eps: float, weight: Weight, choice: Choice, *,
        gate_up: bool, into: Quantised | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(``run`` of rms_norm(x + residual), x + residual), in one kernel where ``choice`` fuses them.

        May overwrite ``residual`` and, in large steps, ``x`` (norm.py).
        """
        shape = LinearShape.of(x_MK, weight, normed=True, gate_up=gate_up)
        run, _ = product(self, shape, choice, into is not None)
        options = {} if into is None else {"into": into}
        return run(x_MK.contiguous(), weight, residual_MK, norm_K, eps, **options)


def _whole(x_TN: Activations, weight: Weight) -> Activations:
    """As kernels take it: contiguous; codes for FP8 weights only."""
    if isinstance(x_TN, Quantised):
        return x_TN if weight.format.block is not None else numbers_of(x_TN)
    return x_TN.contiguous()


def slice_rows(rows: int) -> int:
    """Rows of each slice of an MLP over ``rows`` rows: equal but for the last, whole tiles of 128."""
    slices = -(-rows // LARGE_STEP)
    return -(-rows // (slices * 128)) * 128


def shipped_choices(device: torch.device) -> ChoiceTable:
    """The choices shipped for this GPU model, or for one like it; an empty table for others."""
    return choice_table.shipped_for(choice_table.SHIPPED_CHOICES, traits_of(device))

"""Prefill attention on NVIDIA GPUs: FlashInfer's or our Triton kernel, and how all ranks of a job agree on one.

Knows: what each supports, and what it takes to have FlashInfer's. Does not know: how either works
(flashinfer_prefill.py, prefill.py).

FlashInfer compiles its prefill for each dtype and head_dim once a machine, with nvcc, for more than a minute. Ours is
slower, and Triton compiles it in a second. So FlashInfer's runs where it is built already. Elsewhere ours runs, and
FlashInfer's is built in the background for the next start (flashinfer_build.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from models.inputs import PrefillAttention, RepeatedPrefill
from models.kernels.attention.prefill import TiledPrefill
from models.kernels.attention.prefill_tiles import RepeatedTiles, Tiles
from models.kernels.interface import NO_SWITCHES, PLAIN, AttentionKind, FlashInferSwitches, PrefillWanted
from models.kernels.traits import DeviceTraits

log = logging.getLogger(__name__)

FLASHINFER_HEAD_DIMS = (64, 128, 256)
FLASHINFER_DTYPES = (torch.bfloat16, torch.float16)
_TILE = 128  # tokens of a program of fa3, measured on an H200 with as many features a head


class Prefill:
    """The prefill attention of one device. Call ``prepare``, then ``agree``, before the first plan.

    ``depth``: steps in flight besides the one that lands next, for which FlashInfer's rings of plans have places.
    """

    def __init__(
        self, device: torch.device, wanted: PrefillWanted, traits: DeviceTraits,
        switches: FlashInferSwitches = NO_SWITCHES, depth: int = 2,
    ) -> None:  # fmt: skip
        self._depth = depth
        self._device, self._wanted, self._traits, self._switches = device, wanted, traits, switches
        self._backend = "fa2"  # FlashInfer's backend; fa3 on sm_90
        self._tiled = TiledPrefill(device, traits)
        self._paged: Any = None  # a PagedPrefill, once ranks agreed that it runs
        self._agreed = False
        self._ready = False  # FlashInfer's module is loaded
        self._reason: str | None = None  # why it is not loaded
        self._unbuilt: Any = None  # its JitSpec, where it is not built but could be
        self._loader: threading.Thread | None = None
        self._reference_only = False
        self.slower: str | None = None  # why prefill is slower than it could be; None where it is not

    @property
    def name(self) -> str:
        """``flashinfer`` or ``triton``, or ``reference`` where neither supports the head size.

        Before ``agree`` it is what this machine alone would run. Waits for ``prepare``.
        """
        if self._reference_only:
            return "reference"
        return "flashinfer" if (self._paged is not None if self._agreed else self._loaded()) else "triton"

    @staticmethod
    def supports(head_dim: int) -> bool:
        """Whether one of the two supports the head size, whatever the dtype."""
        return TiledPrefill.supports(head_dim)

    def prepare(self, dtype: torch.dtype, head_dim: int) -> None:
        """Starts a thread that looks for FlashInfer's module and loads it.

        Where FlashInfer is asked for by name the thread also builds it, and the first plan waits for that. FlashInfer's
        own file lock lets one rank of a node build while the others wait.
        """
        self._reference_only = not self.supports(head_dim)
        if self._wanted == "triton" or self._reference_only:
            return
        if not _flashinfer_takes(dtype, head_dim):
            self._reason = (
                f"FlashInfer takes {' or '.join(map(str, FLASHINFER_DTYPES))} with head_dim "
                f"{', '.join(map(str, FLASHINFER_HEAD_DIMS))}, not {dtype} with head_dim {head_dim}"
            )
            return
        self._backend = "fa3" if self._traits.hopper else "fa2"
        if self._wanted == "auto" and self._backend != "fa3":
            return  # ours can be captured there, FlashInfer's fa2 cannot
        try:
            from models.kernels.attention import flashinfer_prefill  # noqa: F401  here: it need not be installed
        except (ImportError, OSError, RuntimeError) as missing:
            self._reason = f"{missing}; install the extra: pip install 'lockstride[cuda]'"
            return
        self._loader = threading.Thread(target=self._load, args=(dtype, head_dim), name="load-prefill", daemon=True)
        self._loader.start()

    def agree(self, agree_min: Callable[[int], int]) -> None:
        """Chooses the kernel, the same on all ranks: a collective call. ``agree_min`` is a minimum over ranks.

        Waits for ``prepare``. One warning says what is slower, why, and what will happen.
        """
        if self._agreed:
            return
        here = self._loaded()
        everywhere = bool(agree_min(int(here)))
        self._agreed = True
        if everywhere:
            from models.kernels.attention.flashinfer_prefill import PagedPrefill

            self._paged = PagedPrefill(self._device, self._backend, self._depth)
        elif self._reference_only:
            self.slower = "neither FlashInfer nor our Triton kernel takes a head_dim of more than 512"
            log.warning("prefill attention runs in plain torch, several times slower than it could: %s", self.slower)
        elif here:
            self._warn_slower("another machine of this job does not have it ready")
        elif self._unbuilt is not None:
            self._build_in_background()
        elif self._reason is not None:
            self._warn_slower(self._reason)

    def wave(self, heads: int, head_dim: int) -> tuple[int, int]:
        """Ops.prefill_wave. Known of fa3 with 128 features a head: a program has 128 tokens of a head, and a
        multiprocessor one program.
        """
        if self._paged is None or self._backend != "fa3" or head_dim != 128:
            return 0, 0
        return _TILE, max(1, self._traits.multiprocessors // heads)

    def plan(self, inputs: PrefillAttention, heads: int, kv_layer: Tensor) -> PrefillAttention:
        """See Ops.plan_prefill. Without ``agree`` before it, this machine decides alone."""
        if not self.supports(kv_layer.shape[-1]):
            return inputs
        planned = self._planner(kv_layer).plan(inputs, heads, kv_layer)
        return replace(inputs, planned=planned)

    def repeated(self, page_table_BP: Tensor, max_tokens: int, heads: int, kv_layer: Tensor) -> RepeatedPrefill | None:
        """See Ops.repeat_prefill; None for FlashInfer's fa2, which cannot be captured, and other heads."""
        if not self.supports(kv_layer.shape[-1]):
            return None
        planned: RepeatedPrefill | None = self._planner(kv_layer).repeated(page_table_BP, max_tokens, heads, kv_layer)
        return planned

    def run(
        self, q_THD: Tensor, kv_layer: Tensor, inputs: PrefillAttention, scale: float, kind: AttentionKind = PLAIN
    ) -> Tensor:
        """See Ops.prefill_attention; ``inputs.planned`` says whose plan it is. Raises RuntimeError for a kind over a
        plan of FlashInfer's."""
        if isinstance(inputs.planned, Tiles | RepeatedTiles):
            return self._tiled.run(q_THD, kv_layer, inputs, inputs.planned, scale, kind)
        if not kind.plain:
            raise RuntimeError("FlashInfer's prefill attention takes no sliding window, soft cap or sinks here")
        out_THD: Tensor = self._paged.run(q_THD, kv_layer, inputs.planned, scale)
        return out_THD

    def _planner(self, kv_layer: Tensor) -> Any:
        if not self._agreed:
            self.prepare(kv_layer.dtype, kv_layer.shape[-1])
            self.agree(int)
        ours = self._paged is None or not _flashinfer_takes(kv_layer.dtype, kv_layer.shape[-1])
        return self._tiled if ours else self._paged

    def _loaded(self) -> bool:
        if self._loader is not None:
            self._loader.join()
            self._loader = None
        return self._ready

    def _load(self, dtype: torch.dtype, head_dim: int) -> None:
        from models.kernels.attention import flashinfer_build, flashinfer_prefill

        try:
            if self._wanted == "auto":
                spec = flashinfer_build.spec_of(self._backend, dtype, head_dim)
                if not flashinfer_build.is_built(spec):
                    self._reason = flashinfer_build.obstacle(self._switches)
                    self._unbuilt = spec if self._reason is None else None
                    return
            flashinfer_prefill.load_module(self._backend, dtype, head_dim)
            self._ready = True
        except Exception as error:  # of compilers, files or libraries: they share no base class
            self._reason = f"FlashInfer's for {dtype} with head_dim {head_dim} cannot be built or loaded: {error}"

    def _build_in_background(self) -> None:
        from models.kernels.attention import flashinfer_build

        try:
            said = flashinfer_build.build_in_background(self._unbuilt)
        except OSError as error:
            self._warn_slower(f"it is not built here, and cannot be: {error}")
            return
        self._warn_slower(
            "it is not built on this machine. It is built beside this run, at low priority, for the next start; what "
            f"is cut off goes on then ({said} has the compiler's words)"
        )

    def _warn_slower(self, reason: str) -> None:
        self.slower = reason
        log.warning(
            "prefill attention runs in our Triton kernel, slower than FlashInfer's: %s. --prefill-attention flashinfer "
            "waits for FlashInfer's, triton never asks for it",
            reason,
        )


def _flashinfer_takes(dtype: torch.dtype, head_dim: int) -> bool:
    return dtype in FLASHINFER_DTYPES and head_dim in FLASHINFER_HEAD_DIMS

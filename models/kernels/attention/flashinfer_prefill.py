"""Prefill attention by FlashInfer 0.6.13: its paged wrapper, planned on the host.

Knows: FlashInfer's argument orders, workspaces and limits. Does not know: whether it is built (flashinfer_build.py) and
chosen (prefill_choice.py).

Plans are made while earlier steps are still queued. ``plan`` fills a pinned buffer that a queued copy reads, so a
buffer of a ring (pinned_ring.py) is refilled only after the device has passed its last copy (an event, not a stream
synchronisation).

A captured prefill (RepeatedPaged) has one device buffer for its plan, which each replay's plan overwrites in stream
order. Only fa3 can be captured: its launch is the same for every plan, while fa2 launches as many programs as a plan
has.

fa3 takes 13 to 20% less time over consecutive keys than over pages (H200, docs/lab/measurements/attention.md). So
captured steps of many tokens copy the keys first where that pays (gather_pages.py); they hold a launch of either
kind, one of which has nothing to do.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, get_batch_prefill_module
from torch import Tensor

from models.inputs import PlanTable, PrefillAttention
from models.kernels.attention.flashinfer_build import arguments
from models.kernels.attention.gather_pages import LEAST_TOKENS, GatheredPages
from models.kernels.pinned_ring import PinnedRing, event_of, ring_places

_PREFILL_WORKSPACE = 256 << 20  # fa2's; fa3 has no use for it but for copied keys
_CAUSAL, _NHD = 1, 0  # FlashInfer's codes of a mask and a layout


def load_module(backend: str, dtype: torch.dtype, head_dim: int) -> None:
    """Builds, where necessary, and loads the module that the wrapper's ``plan`` needs; FlashInfer caches it."""
    get_batch_prefill_module(*arguments(backend, dtype, head_dim))


class PagedPrefill:
    """Causal prefill by FlashInfer's ``backend``: fa3 on sm_90, fa2 elsewhere. ``depth``: steps in flight besides
    the one that lands next.

    Takes 256 MiB, and 8 MiB for each place of the ring.
    """

    def __init__(self, device: torch.device, backend: str, depth: int = 2) -> None:
        self._device, self._backend, self._depth = device, backend, depth
        # Steps run in stream order, so the ring may share the workspace, which only kernels touch.
        self._workspace = workspace = torch.empty(_PREFILL_WORKSPACE, dtype=torch.uint8, device=device)
        self.ring: PinnedRing[Any] = PinnedRing(
            [BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend) for _ in range(ring_places(depth))],
            event_of(device),
        )

    def plan(self, inputs: PrefillAttention, heads: int, kv_layer: Tensor) -> object:
        """A planned wrapper for these rows. Lengths come from the host, page numbers from the device's table."""
        _, _, page, kv_heads, head_dim = kv_layer.shape
        width = inputs.page_table_BP.shape[1]
        pages = [-(-length // page) for length in inputs.kv_lengths]
        wanted = [row * width + index for row, count in enumerate(pages) for index in range(count)]
        indices = inputs.page_table_BP.reshape(-1).index_select(0, _pinned(wanted).to(self._device, non_blocking=True))
        wrapper = self.ring.take()
        wrapper.plan(
            _pinned(_starts(inputs.query_lengths, inputs.first_token)), _pinned(_starts(pages)), indices,
            _pinned([(length - 1) % page + 1 for length in inputs.kv_lengths]), heads, kv_heads, head_dim, page,
            causal=True, sm_scale=head_dim**-0.5, q_data_type=kv_layer.dtype, kv_data_type=kv_layer.dtype,
            seq_lens=_pinned(inputs.kv_lengths),
        )  # fmt: skip
        self.ring.queued()
        return wrapper

    def repeated(self, page_table_BP: Tensor, max_tokens: int, heads: int, kv_layer: Tensor) -> RepeatedPaged | None:
        """The plan of launches that are captured; None where they cannot be (fa2)."""
        if self._backend != "fa3":
            return None
        return RepeatedPaged(self._workspace, page_table_BP, max_tokens, heads, kv_layer, self._depth)

    @staticmethod
    def run(q_THD: Tensor, kv_layer: Tensor, planned: Any, scale: float) -> Tensor:
        usual = q_THD.shape[-1] ** -0.5
        if scale != usual:  # the plan was made before the scale was known
            q_THD = q_THD * (scale / usual)
        out_THD: Tensor = planned.run(q_THD, (kv_layer[0], kv_layer[1]), out=torch.empty_like(q_THD))
        return out_THD


class RepeatedPaged:
    """A RepeatedPrefill over fa3: see the module.

    FlashInfer's wrapper for CUDA graphs demands plans of exactly as many tokens as a launch has, and copies five small
    arrays a plan that fa3 never reads. So only the first plan is the wrapper's own; later ones are made by its module
    directly, without those.
    """

    def __init__(
        self, workspace: Tensor, page_table_BP: Tensor, max_tokens: int, heads: int, kv_layer: Tensor, depth: int = 2
    ) -> None:
        rows, width = page_table_BP.shape
        _, _, page, kv_heads, head_dim = kv_layer.shape
        self._rows = rows
        # Pages are read from the table in place: the plan gives fa3 each row's start and length.
        self._page_starts = torch.arange(0, (rows + 1) * width, width, dtype=torch.int32)

        def words(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.int32, device=workspace.device)

        self._wrapper: Any = BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=words(rows + 1),
            paged_kv_indptr_buf=words(rows + 1),
            paged_kv_indices_buf=page_table_BP.view(-1),
            paged_kv_last_page_len_buf=words(rows),
            backend="fa3",
        )
        ends = torch.full((rows + 1,), max_tokens, dtype=torch.int32)
        ends[0] = 0
        ones = torch.ones(rows, dtype=torch.int32)
        self._wrapper.plan(
            ends, self._page_starts, page_table_BP.view(-1), ones, heads, kv_heads, head_dim, page,
            causal=True, sm_scale=head_dim**-0.5, q_data_type=kv_layer.dtype, kv_data_type=kv_layer.dtype,
            seq_lens=ones * max_tokens, non_blocking=False,
        )  # fmt: skip
        wrapper = self._wrapper
        size = wrapper._pin_memory_int_workspace_buffer.shape

        def place(of_device: Tensor, page_size: int, layout: list[int] | None) -> _PlanPlace:
            numbers = (max_tokens, rows, heads, kv_heads, page_size, True, head_dim, head_dim, True, -1)
            pinned = PinnedRing([_pinned_bytes(size) for _ in range(ring_places(depth))], event_of(workspace.device))
            return _PlanPlace(wrapper._cached_module, of_device, pinned, numbers, layout)

        self._paged = place(wrapper._int_workspace_buffer, page, list(wrapper._plan_info))
        self.ring = self._paged.ring
        self._gathered: GatheredPages | None = None
        if max_tokens >= LEAST_TOKENS:
            multiprocessors = torch.cuda.get_device_properties(workspace.device).multi_processor_count
            group = heads // kv_heads
            self._gathered = GatheredPages(workspace, page_table_BP, kv_layer, group, multiprocessors, depth)
            self._consecutive = place(torch.empty_like(wrapper._int_workspace_buffer), 1, None)
            self._copies = True  # in the plan of before: the first one fills both places

    @property
    def table(self) -> PlanTable | None:
        """None: FlashInfer's planner fills its own memory, and copies it."""
        return None

    def plan(self, query_lengths: tuple[int, ...], kv_lengths: tuple[int, ...], first_token: int = 0) -> None:
        """See RepeatedPrefill. Raises RuntimeError where FlashInfer's plan layout differs from the captured one."""
        padding = (0,) * (self._rows - len(query_lengths))
        rows = (*query_lengths, *padding), (*kv_lengths, *padding)
        nobody = (0,) * self._rows, (0,) * self._rows
        gathered = self._gathered
        copies = gathered is not None and gathered.pays(query_lengths, kv_lengths, first_token)
        if gathered is not None and (copies or self._copies):
            queries, keys = rows if copies else nobody
            self._consecutive.fill(queries, gathered.plan(keys), keys, first_token)
            self._copies = copies
        queries, keys = nobody if copies else rows
        self._paged.fill(queries, self._page_starts, keys, first_token)

    def run(self, q_THD: Tensor, keys_values: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        """Launches over ``q_THD``, which may have more tokens than the plan: the rest of ``out`` is left as it is."""
        if self._gathered is not None and len(q_THD) >= LEAST_TOKENS:
            self._consecutive.attend(q_THD, *self._gathered.copy(*keys_values), out)
        self._wrapper._qo_indptr_last = q_THD.shape[0]  # FlashInfer would refuse another number of tokens
        returned: Tensor = self._wrapper.run(q_THD, keys_values, out=out)
        return returned


class _PlanPlace:
    """One device buffer for fa3's plans. ``numbers``: what FlashInfer's plan takes besides the rows; ``layout``: of the
    plan that was captured, None where the first one is."""

    def __init__(
        self, module: Any, on_device: Tensor, ring: PinnedRing[Tensor], numbers: tuple[int, ...],
        layout: list[int] | None,
    ) -> None:  # fmt: skip
        self._module, self._on_device, self.ring, self._numbers, self._layout = module, on_device, ring, numbers, layout
        self._unused = torch.empty(1, dtype=torch.uint8, device=on_device.device)  # where fa2 keeps what it splits
        self._starts = torch.empty(2, dtype=torch.int32, device=on_device.device)  # fa3 reads the plan's instead

    def fill(
        self, query_lengths: tuple[int, ...], key_starts: Tensor | list[int], kv_lengths: tuple[int, ...], first: int
    ) -> None:
        """Enqueue a plan. RuntimeError where its layout differs from the captured one."""
        starts = key_starts if isinstance(key_starts, Tensor) else torch.tensor(key_starts, dtype=torch.int32)
        pinned = self.ring.take()
        layout = list(
            self._module.plan(
                self._unused,
                self._on_device,
                pinned,
                torch.tensor(_starts(query_lengths, first), dtype=torch.int32),
                starts,
                torch.tensor(kv_lengths, dtype=torch.int32),
                *self._numbers,
            )
        )
        self.ring.queued()
        self._layout = self._layout or layout
        if layout != self._layout:
            raise RuntimeError(f"FlashInfer laid a prefill plan out as {layout}, the first was {self._layout}")

    def attend(self, q_THD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, out: Tensor) -> None:
        """Launch attention over consecutive keys."""
        scale = q_THD.shape[-1] ** -0.5
        self._module.ragged_run(
            self._unused, self._on_device, self._layout, q_THD, keys_SKD, values_SKD, self._starts, self._starts, out,
            None,  # log-sum-exp
            _CAUSAL, _NHD,
            -1,  # no window
            False,  # no dependent launch
            *(None,) * 6,  # masks, slopes and items
            0.0,  # no soft cap
            scale, 1.0, 1e4, 0,
        )  # fmt: skip


def _pinned_bytes(size: torch.Size) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _starts(lengths: tuple[int, ...] | list[int], first: int = 0) -> list[int]:
    return list(itertools.accumulate(lengths, initial=first))


def _pinned(values: tuple[int, ...] | list[int]) -> Tensor:
    """int32 in pinned memory: copied to the device asynchronously, and read by FlashInfer without a sync."""
    return torch.tensor(values, dtype=torch.int32).pin_memory()

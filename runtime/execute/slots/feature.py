"""What a slot feature is: state of a request that sampling reads and each step updates, in tables with a row per slot.

Knows: when the code of a feature runs. Does not know: which features there are (features.py), what one computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from runtime.execute.device.protocol import Device
from runtime.execute.sampling.draft_tree import DraftTree
from runtime.execute.sampling.inputs import LogitsProcessor, SamplingVariant
from runtime.grammar import Grammars
from runtime.schedule.plan import Constrained, SlotWrite

T = TypeVar("T", bound=tuple[Any, ...])


class RowView(NamedTuple):
    """The samples of a step: B rows, a sample after each of W tokens. slots_B int64. tokens_BW int64: a row's newest
    token, then its draft tokens. ``tree``: these are the nodes of a draft tree, at most ``width`` of them on a path."""

    slots_B: Tensor
    tokens_BW: Tensor
    tree: DraftTree | None = None
    width: int = 1


class SlotFeature(Generic[T]):
    """One of each kind on a rank. ``name``: the field of SamplingVariant that is true in the steps that need it.

    ``tables``: on the device, a row per slot, slot 0 for padding; () for a feature without state, None until ``need``.
    A step that has the feature for some of its rows must not change what the other rows sample.
    """

    name = ""
    reads_logits = False  # ``report`` reads the model's own logits
    grammars: Grammars | None = None  # of the model's tokenizer

    def __init__(self, device: Device, slots: int, vocab_size: int) -> None:
        self.device, self.slots, self.vocab_size = device, slots, vocab_size
        self.tables: T | None = None

    @property
    def late_bytes(self) -> int:
        """Of tables that may be made when the first request needs them; 0: they are made at start-up."""
        return 0

    def make(self, slots: int) -> T:
        """New tables of so many slots."""
        raise NotImplementedError

    def need(self) -> T:
        """The tables, made now if they are not there yet."""
        if self.tables is None:
            self.tables = self.make(self.slots)
        return self.tables

    # ---- at admission ----

    def write(self, writes: Sequence[SlotWrite]) -> dict[str, npt.NDArray[np.generic]]:
        """On the host: what ``load`` needs to set the slots of admitted requests, by names that nothing else has."""
        return {}

    def load(self, staged: Mapping[str, Tensor]) -> None:
        """On the device, before the step: all that it changes, the arrays of ``write`` among it if there were any."""

    # ---- before each step with such rows ----

    def constrain(self, rows: Sequence[Constrained]) -> dict[str, npt.NDArray[np.generic]]:
        """On the host, after ``write``: more for ``load``, of rows that sample what a grammar allows."""
        return {}

    # ---- in a step; graph-safe: fixed shapes, no host read ----

    def processor(self, view: RowView, in_place: bool) -> LogitsProcessor | None:
        """What changes the logits of these samples; None: nothing. ``in_place``: it may overwrite the model's logits,
        which no feature reads afterwards."""
        return None

    def most_tokens(self, view: RowView) -> Tensor | None:
        """Most tokens that each row may append, int32 [B]; None: W."""
        return None

    def report(self, logits_TV: Tensor, tokens_T: Tensor, variant: SamplingVariant) -> tuple[Tensor, ...]:
        """Of T samples ``tokens_T`` (int64), what the result ring has with each: dtypes of 4 bytes, T first.
        ``logits_TV``: the model's, of the whole vocabulary. SamplingVariant.reported counts the words."""
        return ()

    def advance(self, slots_B: Tensor, tokens_BW: Tensor, count_B: Tensor) -> None:
        """Update ``tables`` with the first ``count_B`` (int32) of ``tokens_BW`` (int64). Only slot 0 repeats."""

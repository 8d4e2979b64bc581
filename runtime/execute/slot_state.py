"""Device tables with one row a slot: the truth about each request that is running.

Knows: which numbers a slot holds, how they lie in memory, and what each means.
Does not know: batch rows (a row map picks slots), how the tables change (staging.py, the sampler), or schedules.

What ``length`` means, everywhere on the device: the number of tokens known, prompt and generated, the last sampled one
included. So for a slot that decodes:

    input token  = last_token, at position length - 1
    KV written   = length - 1 before the step, length after it (attention reads ``length`` entries)
    next token   = drawn for position ``length``; accepting it makes length + 1
    ends         by LENGTH when the new length reaches max_length; stop ids count once it has reached min_length

A slot update moves ``max_length`` of a session, and takes ``finished`` back where it had come to the old one and all
its steps have landed; whatever else the slot holds stays.

A slot write sets ``length`` to len(token_ids) and ``last_token`` to the last of them, so a prompt's last chunk samples
exactly as a decode step does, and earlier chunks leave the slot alone.

Slot 0 is the padding slot: finished always, all its blocks block 0, the trash block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.execute.device.protocol import Device
from runtime.execute.sampling.inputs import SamplingInputs, SamplingVariant
from runtime.execute.sampling.logit_edits import EditFeature
from runtime.execute.sampling.token_tables import TokenTables
from runtime.execute.slots.feature import SlotFeature
from runtime.execute.slots.features import FEATURES
from runtime.grammar import Grammars
from runtime.schedule.plan import PADDING_SLOT, SlotWrite
from runtime.schedule.request import MAX_STOP_TOKEN_IDS, FinishReason, SamplingParams

# Staged as a token's position: the slot's newest token, which only the device knows; less j: the j-th draft after it.
NEWEST = -1
NO_TOKEN = -1  # fills unused stop-id columns; no token has this id

# One slot's record: 64 bytes, then the stop ids. Name, numpy type, byte offset.
_FIELDS = (
    ("last_token", "<i8", 0),
    ("seed", "<i8", 8),
    ("length", "<i4", 16),
    ("epoch", "<i4", 20),
    ("finished", "<i4", 24),
    ("min_length", "<i4", 28),
    ("max_length", "<i4", 32),
    ("top_k", "<i4", 36),
    ("temperature", "<f4", 40),
    ("top_p", "<f4", 44),
    ("min_p", "<f4", 48),
    ("repetition_penalty", "<f4", 52),
    ("presence_penalty", "<f4", 56),
    ("frequency_penalty", "<f4", 60),
)
_STOP_IDS_AT = 64
# Fields that SamplingParams has, too, with the same values.
_OF_THE_REQUEST = tuple(
    name for name, _, _ in _FIELDS if name in SamplingParams.__dataclass_fields__ and name != "seed"
)
_OF_A_DRAW = (*_OF_THE_REQUEST, "seed", "min_length", "max_length")  # columns that the sampler takes as they are


def record_dtype(stop_ids: int) -> np.dtype[Any]:
    """The numpy type of one slot's record; a multiple of 8 bytes so that 64-bit columns stay aligned."""
    names = [name for name, _, _ in _FIELDS] + ["stop_ids"]
    formats: list[Any] = [kind for _, kind, _ in _FIELDS] + [("<i4", (stop_ids,))]
    offsets = [offset for _, _, offset in _FIELDS] + [_STOP_IDS_AT]
    size = _STOP_IDS_AT + 4 * (stop_ids + stop_ids % 2)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})


def check_stop_ids(request_id: int, stop_token_ids: tuple[int, ...], limit: int) -> None:
    """ValueError when a request names more stop token ids than a slot holds. To be asked before it is admitted."""
    if len(stop_token_ids) > limit:
        raise ValueError(
            f"request {request_id}: {len(stop_token_ids)} stop token ids, the model's eos ids included; a slot holds "
            f"{limit}: name fewer"
        )


def fill_record(record: npt.NDArray[Any], write: SlotWrite, stop_ids: int) -> None:
    """Write what ``write`` says into one element of a record array (shape []). ValueError if it cannot be held."""
    check_stop_ids(write.request_id, write.stop_token_ids, stop_ids)
    sampling = write.sampling
    if sampling.seed is None:
        raise ValueError(f"request {write.request_id}: the seed must be drawn before the request is scheduled")
    padding = (NO_TOKEN,) * (stop_ids - len(write.stop_token_ids))
    record["last_token"] = write.token_ids[-1]
    record["seed"] = (sampling.seed + 2**63) % 2**64 - 2**63  # any integer is a seed; the table holds its low 64 bits
    record["length"] = len(write.token_ids)
    record["finished"] = FinishReason.NONE
    for name in ("epoch", "min_length", "max_length"):
        record[name] = getattr(write, name)
    for name in _OF_THE_REQUEST:
        record[name] = getattr(sampling, name)
    record["stop_ids"] = (*write.stop_token_ids, *padding)


class SlotColumns:
    """Named columns over records [n, words] int32: views, no copies. Every column is [n] but stop_ids_NK.

    Their names and dtypes are those of the table above; finished is a FinishReason (0 = live). stop_ids_NK i32, -1
    unused.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor: ...

    def __init__(self, records: Tensor, stop_ids: int) -> None:
        views = {"<i8": records.view(torch.int64), "<i4": records, "<f4": records.view(torch.float32)}
        self.records = records
        for name, kind, offset in _FIELDS:
            setattr(self, name, views[kind][:, offset // views[kind].element_size()])
        self.stop_ids_NK = records[:, _STOP_IDS_AT // 4 :][:, :stop_ids]

    def sampling(self) -> SamplingInputs:
        """The sampler's view of these rows: the next token's position is the length."""
        return self.sampling_at(self.length.to(torch.int64), self.finished != 0)

    def sampling_at(self, position_N: Tensor, ended_N: Tensor) -> SamplingInputs:
        """``sampling``, of the next tokens' positions (int64) and the finished flags (bool) that are there already."""
        columns = {name: getattr(self, name) for name in _OF_A_DRAW}
        return SamplingInputs(**columns, position=position_N, stop_ids=self.stop_ids_NK, finished=ended_N)


class SlotTables:
    """All tables, for slots 0..max_requests (0 is padding), allocated once.

    last_token and the rest by name: ``columns``. Blocks: ``block_tables_GSP`` int32 [groups, slots, max_blocks], one a
    group of layers, of which ``block_table_SP`` is the first: of layers that attend to all tokens. ``features``:
    one of each, over ``vocab_size`` ids; one with more than ``late_bytes`` of late tables makes them when the first
    request needs it (None: no limit). ``grammars``: compiles those of requests. ``history_SL`` int32 [slots, history]:
    the tokens of each slot's sequence by position, where proposers ask for it (``history`` positions, 0: None); past
    its length it means nothing.
    """

    def __init__(
        self,
        device: Device,
        *,
        max_requests: int,
        max_blocks: int,
        vocab_size: int,
        stop_ids: int = MAX_STOP_TOKEN_IDS,
        late_bytes: int | None = None,
        history: int = 0,
        grammars: Grammars | None = None,
        groups: int = 1,
    ) -> None:
        self.slots = max_requests + 1
        self.max_blocks = max_blocks
        self.vocab_size = vocab_size
        self.stop_ids = stop_ids
        self.record_dtype = record_dtype(stop_ids)
        self.columns = SlotColumns(device.zeros(self.slots, self.record_words, dtype=torch.int32), stop_ids)
        self.block_tables_GSP = device.zeros(groups, self.slots, max_blocks, dtype=torch.int32)
        self.block_table_SP = self.block_tables_GSP[0]
        self.features = [make(device, self.slots, vocab_size) for make in FEATURES]
        for feature in self.features:
            feature.grammars = grammars
            if late_bytes is None or feature.late_bytes <= late_bytes:
                feature.need()
        self.history_SL = device.zeros(self.slots, history, dtype=torch.int32) if history else None
        device.compute.submit(lambda: self._end(slice(None)))
        device.compute.synchronize()

    @property
    def record_words(self) -> int:
        return self.record_dtype.itemsize // 4

    def features_of(self, variant: SamplingVariant) -> Sequence[SlotFeature[Any]]:
        """Those that a step of such sampling has."""
        return [feature for feature in self.features if getattr(variant, feature.name)]

    @property
    def grammar_tables(self) -> TokenTables:
        """Of requests whose grammar has one."""
        return next(feature.need().grammars for feature in self.features if isinstance(feature, EditFeature))

    @contextmanager
    def trial(self, slots: int | None = None) -> Iterator[None]:
        """Late tables of features that are made inside are given back. With ``slots``, those that are not there yet are
        made at once, of so many slots. For start-up, where nothing but padding runs."""
        before = [feature.tables for feature in self.features]
        try:
            for feature in self.features:
                if slots is not None and feature.tables is None:
                    feature.tables = feature.make(slots)
            yield
        finally:
            for feature, tables in zip(self.features, before, strict=True):
                feature.tables = tables

    def reset_padding(self) -> None:
        """The padding slot's record as it was at first, finished: without it every row of padding would be live."""
        padding = slice(PADDING_SLOT, PADDING_SLOT + 1)
        self.columns.records[padding].zero_()
        self._end(padding)

    def _end(self, slots: slice) -> None:
        """A slot is finished until a request is written into it; slot 0 for good."""
        self.columns.finished[slots].fill_(int(FinishReason.STOP))
        self.columns.stop_ids_NK[slots].fill_(NO_TOKEN)

    def gather(self, rows_B: Tensor) -> SlotColumns:
        """The records of slots ``rows_B`` (int64 [B]) in one kernel; a copy, graph-safe."""
        return SlotColumns(self.columns.records.index_select(0, rows_B), self.stop_ids)

    def gather_blocks(self, rows_B: Tensor) -> Tensor:
        """Their block table rows, int32 [B, max_blocks]; a copy, graph-safe."""
        return self.block_table_SP.index_select(0, rows_B)

    def gather_groups(self, rows_B: Tensor) -> Tensor:
        """The same of every group, [groups, B, max_blocks]; of one, as ``gather_blocks``. For StepInputs."""
        if len(self.block_tables_GSP) == 1:
            return self.gather_blocks(rows_B)
        return self.block_tables_GSP.index_select(1, rows_B)

    def move_ends(self, slots_U: Tensor, max_length_U: Tensor, revived_U: Tensor) -> None:
        """Slots end at other lengths from now on; where ``revived_U`` is not 0 they are live again. All int64 [U].

        The others stay as they are, finished or not: the device may have ended them in a step not read yet.
        """
        columns = self.columns
        columns.max_length.index_copy_(0, slots_U, max_length_U.to(torch.int32))
        finished_U = columns.finished.index_select(0, slots_U)
        columns.finished.index_copy_(0, slots_U, torch.where(revived_U != 0, int(FinishReason.NONE), finished_U))

    def store(self, rows_B: Tensor, last_token_B: Tensor, length_B: Tensor, finished_B: Tensor) -> None:
        """What a step changed, by slot; graph-safe. last_token int64, length and finished int32.

        ``rows_B`` (int64) repeats no slot but 0, and padding rows carry slot 0's own values back.
        """
        self.columns.last_token.index_copy_(0, rows_B, last_token_B)
        self.columns.length.index_copy_(0, rows_B, length_B)
        self.columns.finished.index_copy_(0, rows_B, finished_B)

    def remember(self, rows_B: Tensor, length_B: Tensor, tokens_BW: Tensor, count_B: Tensor) -> None:
        """Enter the first ``count_B`` of ``tokens_BW`` (int64) after the ``length_B`` tokens of slots ``rows_B``, if
        histories are kept; graph-safe. What does not count goes to slot 0, whose history is never read."""
        if self.history_SL is None:
            return
        positions = self.history_SL.shape[1]
        index_W = torch.arange(tokens_BW.shape[1], device=tokens_BW.device)
        cells_BW = rows_B[:, None] * positions + length_B.to(torch.int64)[:, None] + index_W
        cells_BW = torch.where(index_W < count_B[:, None], cells_BW, PADDING_SLOT)
        self.history_SL.view(-1).scatter_(0, cells_BW.reshape(-1), tokens_BW.to(torch.int32).reshape(-1))

"""A device made of Python lists, as pessimistic as the laws allow.

It keeps real KV cells behind real block tables, so a block that is reused too early, a stale table entry or a wrong
row shows up as a wrong token. The same with recurrent state, where there are ``snapshots``: what a slot's row holds is
the tokens that it has taken in, and where these are not the ones before, the next token is a wrong one. The model: the
next token is a hash of the request and of every token before it, read back from the cells. The rows of a step see
nothing of what the others write in it. A ghost row's writes happen as late as they may, when its step lands: a chunk's
tokens once more, rubbish for what was drawn. Groups with a window have cells and tables of their own: a row whose
window holds anything but its last tokens draws wrong ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from runtime.schedule.blocks import BlockPool
from runtime.schedule.config import SchedulerConfig
from runtime.schedule.plan import TRASH_BLOCK, Chunk, Fork, SlotCopy, StepKind, StepPlan, StepResult
from runtime.schedule.request import FinishReason
from runtime.schedule.scheduler import Scheduler

VOCABULARY = 29
GARBAGE = -7
NAN = -9  # a cell whose contents are not finite: neither are the logits of whoever reads it
MANY = 1 << 30
HAS = {StepKind.PREFILL: (False, True), StepKind.DECODE: (True, False), StepKind.MIXED: (True, True)}

Writes = list[tuple[int, int, int, int, int]]  # slot, epoch, block, offset, and what a ghost leaves there


def mix(*numbers: int) -> int:
    """A small deterministic 64-bit mixer (splitmix64's finaliser over a running sum)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
    return state


def next_token(request_id: int, tokens: tuple[int, ...]) -> int:
    """hash() of a tuple of ints does not depend on the hash seed."""
    return mix(request_id, hash(tokens)) % VOCABULARY


def accepted(request_id: int, tokens: tuple[int, ...], width: int, *, barren: bool) -> int:
    """How many tokens a row gains in a step of ``width``: any number from 1 to width; or 0, if it may be ``barren``."""
    drawn = mix(3, request_id, hash(tokens))
    return 0 if barren and drawn % 7 == 0 else 1 + (drawn >> 8) % width


def snapshots_of(config: SchedulerConfig) -> int:
    """How many rows the snapshot bank has; 0 for a model without recurrent state."""
    return 0 if config.snapshots is None else config.snapshots.count


def complete_alone(
    request_id: int, prompt: tuple[int, ...], stops: tuple[int, ...], max_length: int, breaks_at: int | None = None
) -> tuple[tuple[int, ...], FinishReason]:
    """The oracle of oracles: one request, no batch, no blocks, no steps. ``breaks_at``: tokens after which its logits
    are not finite any more.
    """
    tokens = prompt
    while True:
        if breaks_at is not None and len(tokens) >= breaks_at:
            return tokens[len(prompt) :], FinishReason.ERROR
        token = next_token(request_id, tokens)
        tokens += (token,)
        if token in stops:
            return tokens[len(prompt) :], FinishReason.STOP
        if len(tokens) >= max_length:
            return tokens[len(prompt) :], FinishReason.LENGTH


@dataclass
class SlotRow:
    request_id: int
    epoch: int
    length: int  # KV entries written
    last: int
    finished: bool
    max_length: int
    stops: tuple[int, ...]
    broken: bool = False
    lost: bool = False  # its recurrent state was that of other tokens
    tried: bool = False  # its last step gave it no token
    copied: bool = False  # from a parked one, and it has not run since
    prompt_length: int = 0
    matched: list[int] | None = None  # with a grammar: the answer, as plans have told it
    allowed_in: int = -1  # the step that it was told for
    most: int = 1  # tokens that it may append there
    tabled: bool = False  # from then on it needs no word


@dataclass
class Columns:
    """A step's result, row by row."""

    tokens: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    finish: list[int] = field(default_factory=list)

    def add(self, plan: StepPlan, new: list[int], code: int) -> None:
        self.tokens += new + [0] * (plan.width - len(new))
        self.counts.append(len(new))
        self.finish.append(code)


class FakeDevice:
    """Runs a plan at launch (the stream is in order) and hands its result out at land().

    ``max_blocks``: entries of a row of the block table. ``barren``: a decode row may gain nothing in a step, though
    never twice in a row. ``breaks_at``: by request, the number of tokens after which its logits are not finite.
    ``poisons``: by request, a position whose cell is NAN when a chunk of it writes there for the first time, as are
    those behind it: what a layer makes of NaN is NaN.
    ``broken_blocks``: by step, the blocks whose contents nobody may trust any more, because a row broke over them in
    that step. ``snapshots``: rows of the snapshot bank; 0: the model keeps no recurrent state. ``windows``: (W, blocks)
    of each group with a window.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        slots: int,
        max_blocks: int = MANY,
        *,
        barren: bool = False,
        snapshots: int = 0,
        windows: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.barren = barren
        self.windows = [window for window, _ in windows]
        counts = [blocks + 1, *(count + 1 for _, count in windows)]
        self.base = [sum(counts[:group]) for group in range(len(counts))]  # cells of a group's block 0
        self.cells = [[GARBAGE] * block_size for _ in range(sum(counts))]
        self._spoiled: set[int] = set()
        self.tables: list[dict[int, int]] = [{} for _ in range(slots + 1)]
        self.rows: list[SlotRow | None] = [None] * (slots + 1)
        self.recurrent = snapshots > 0
        self.states: list[tuple[int, ...]] = [(GARBAGE,)] * (slots + 1)
        self.snapshots: list[tuple[int, ...] | None] = [None] * (snapshots + 1)
        self.results: deque[tuple[StepResult | None, Writes]] = deque()
        self.launched: deque[tuple[int, ...]] = deque()  # the slots of each result
        self.accepted: dict[int, list[int]] = {}
        self.breaks_at: dict[int, int] = {}
        self.poisons: dict[int, int] = {}
        self.broken_blocks: dict[int, list[int]] = {}

    def launch(self, plan: StepPlan | None) -> None:
        if plan is None:
            self.results.append((None, []))
            self.launched.append(())
            return
        self._copy(plan)
        copied = {copy.slot for copy in plan.copies}
        for write in plan.slot_writes:
            if write.slot in copied:
                assert write.resumes, "what was copied stays"
            elif write.resumes:
                held = self.rows[write.slot]
                assert held is not None
                assert (held.request_id, held.epoch) == (write.request_id, write.epoch)
                assert held.length <= write.length, "state of a slot goes no further than its tokens"
                assert not self._in_flight(write.slot), "a slot is written while nothing of it is in flight"
            if not write.resumes:
                self.states[write.slot] = ()
            begun = self.rows[write.slot] = SlotRow(
                write.request_id, write.epoch, write.length, GARBAGE, False, write.max_length, write.stop_token_ids
            )
            begun.prompt_length = write.prompt_length
            if write.sampling.grammar:
                begun.matched = list(write.token_ids[write.prompt_length :])
            if write.slot in copied:
                begun.last, begun.copied = write.token_ids[-1], True
        written = {write.slot for write in plan.slot_writes}
        for update in plan.slot_updates:
            row = self.rows[update.slot]
            assert row is not None
            assert update.slot not in written, "a slot is written, or moved on, never both"
            if update.revive:
                assert row.finished or row.copied, "only who has ended is revived"
                row.copied = False
                assert not self._in_flight(update.slot), "all of it has landed"
                assert row.last not in row.stops, "nobody goes on behind a stop id"
                row.finished = False
            row.max_length = update.max_length
        cells = [(slot, index) for slot, index, _ in plan.block_writes]
        assert len(set(cells)) == len(cells), "a plan names each cell of the block table once"
        for slot, index, block in plan.block_writes:
            most = self.max_blocks * len(self.base)
            assert index < most, f"block table entry {index} of {most}"
            self.tables[slot][index] = block
        for slot, tokens, most, place, _ in plan.constrained:
            constrained = self.rows[slot]
            assert constrained is not None
            assert constrained.matched is not None, "only who has a grammar is told of what it gained"
            assert not constrained.tabled, "a table needs no word"
            constrained.tabled = place is not None
            constrained.matched = [*([] if constrained.tabled else constrained.matched), *tokens]
            constrained.allowed_in, constrained.most = plan.step, most
        for snapshot, slot in plan.restored:
            state = self.snapshots[snapshot]
            assert state is not None, "a snapshot is read behind the step that writes it"
            self.states[slot] = state
        self.results.append(self._run(plan))
        self.launched.append(plan.slots)
        assert len({snapshot for _, snapshot in plan.saved}) == len(plan.saved), "a step writes a snapshot once"
        for slot, snapshot in plan.saved:
            assert slot in [chunk.slot for chunk in plan.chunks], "state is known where a chunk ends"
            self.snapshots[snapshot] = self.states[slot]

    def _copy(self, plan: StepPlan) -> None:
        """Before anything else, in no order."""
        sources, targets = {copy.source for copy in plan.copies}, {copy.slot for copy in plan.copies}
        blocks = [copy.copied for copy in plan.copies if copy.copied is not None]
        assert not sources & targets, "a slot is copied from, or to"
        assert not {source for source, _ in blocks} & {target for _, target in blocks}
        assert len({target for _, target in blocks}) == len(blocks)
        for copy in plan.copies:
            held = self.rows[copy.source]
            assert held is not None
            assert held.finished or held.copied, "only who is parked is copied"
            assert not self._in_flight(copy.source), "what is copied is at rest"
            assert not self._in_flight(copy.slot)
            self.states[copy.slot] = self.states[copy.source]
            assert copy.slot in {write.slot for write in plan.slot_writes}
        pairs = [pair for copy in plan.copies for pair in self._pairs(copy)]
        for source, target in pairs:
            self.cells[target] = list(self.cells[source])
        for block in self._spoiled.difference(target for _, target in pairs):
            self.cells[block] = [GARBAGE] * self.block_size
        self._spoiled.clear()

    def _pairs(self, copy: SlotCopy | Fork) -> list[tuple[int, int]]:
        """(Cells, those that get their contents), of each group."""
        pairs = [] if copy.copied is None else [copy.copied, *copy.in_windows]
        assert len(pairs) in (0, len(self.base)), "a page is copied in every group, or in none"
        return [(base + source, base + target) for base, (source, target) in zip(self.base, pairs, strict=False)]

    def spoil(self, group: int, blocks: Sequence[int]) -> None:
        """What these hold belongs to nobody once the copies of the next plan are made."""
        self._spoiled.update(self.base[group] + block for block in blocks)

    def _run(self, plan: StepPlan) -> tuple[StepResult, Writes]:
        """Rows without a chunk decode, the others prefill. Each kind of step has the rows that it says it has."""
        decode_rows = plan.decode_rows
        assert len(plan.epochs) == len(plan.slots)
        behind = [chunk.slot for chunk in plan.chunks] + [fork.slot for fork in plan.forks]
        assert behind == list(plan.slots[decode_rows:]), "chunks are of the rows behind those that decode, then forks"
        nothing_but_copies = plan.copies and not plan.slots and plan.kind is StepKind.DECODE
        assert nothing_but_copies or (bool(decode_rows), bool(plan.chunks)) == HAS[plan.kind], "decode rows and chunks"
        assert len(set(plan.slots)) == len(plan.slots), "a slot is one row of a step"
        assert plan.width == 1 or decode_rows, "a prompt's last chunk yields one token"
        result = Columns()
        writes: Writes = []
        rows = zip(plan.slots, plan.epochs, strict=True)
        for chunk in plan.chunks:
            for i in range(len(chunk.token_ids)):
                for block, offset in self._cells(chunk.slot, chunk.start + i):
                    self.cells[block][offset] = GARBAGE  # until the step is over
        for slot, epoch in islice(rows, decode_rows):
            self._decode(plan, slot, epoch, result, writes)
        by_chunks: Writes = []
        prompts: list[tuple[int, ...]] = []
        for chunk, (_, epoch) in zip(plan.chunks, rows, strict=False):
            by_chunks += self._prefill(plan, chunk, epoch, result, prompts)
        self._put(by_chunks)
        writes += by_chunks
        for fork, (_, epoch) in zip(plan.forks, rows, strict=True):
            assert plan.chunks[fork.chunk].last, "a prompt has to be known to its end"
            writes += self._fork(plan, fork, epoch, result, prompts[fork.chunk])
        return StepResult(plan.step, result.tokens, result.counts, result.finish), writes

    def land(self, epochs: list[int]) -> StepResult | None:
        """The oldest result. ``epochs`` are the scheduler's: rows it has ended write late, over whoever is there."""
        result, writes = self.results.popleft()
        self.launched.popleft()
        for slot, epoch, block, offset, value in writes:
            if epochs[slot] != epoch:
                self.cells[block][offset] = value
                self.states[slot] = (GARBAGE,)
        return result

    def _in_flight(self, slot: int) -> bool:
        return any(slot in slots for slots in self.launched)

    def _cells(self, slot: int, position: int) -> list[tuple[int, int]]:
        """Where a token lies, in each group."""
        index, offset = divmod(position, self.block_size)
        table = self.tables[slot]
        return [(base + table[group * self.max_blocks + index], offset) for group, base in enumerate(self.base)]

    def _history(self, slot: int, length: int, first_query: int) -> tuple[int, ...]:
        """What the queries from ``first_query`` to the last token see. What only some groups hold is GARBAGE."""
        size, table, tokens = self.block_size, self.tables[slot], []
        for index in range(-(-length // size)):
            tokens += self.cells[table[index]]
        tokens = tokens[:length]
        for window, base, group in zip(self.windows, self.base[1:], range(1, MANY), strict=False):
            for position in range(max(0, first_query - window + 1), length):
                index, offset = divmod(position, size)
                seen = self.cells[base + table[group * self.max_blocks + index]][offset]
                if seen != tokens[position]:
                    tokens[position] = NAN if NAN in (seen, tokens[position]) else GARBAGE
        return tuple(tokens)

    def _write(self, slot: int, position: int, token: int, writes: Writes, epoch: int) -> None:
        for block, offset in self._cells(slot, position):
            self.cells[block][offset] = token
            writes.append((slot, epoch, block, offset, GARBAGE))

    def _chunk_writes(self, chunk: Chunk, row: SlotRow, epoch: int) -> Writes:
        values = list(chunk.token_ids)
        poisoned = self.poisons.get(row.request_id, -1) - chunk.start
        if NAN in self._history(chunk.slot, chunk.start, chunk.start) or (
            self.recurrent and NAN in self.states[chunk.slot]
        ):
            values = [NAN] * len(values)
        elif 0 <= poisoned < len(values):
            values[poisoned:] = [NAN] * (len(values) - poisoned)
        if 0 <= poisoned < len(values):
            del self.poisons[row.request_id]
        return [
            (chunk.slot, epoch, *cell, value)
            for i, value in enumerate(values)
            for cell in self._cells(chunk.slot, chunk.start + i)
        ]

    def _put(self, writes: Writes, *, not_yet: bool = False) -> None:
        for _, _, block, offset, value in writes:
            self.cells[block][offset] = GARBAGE if not_yet else value

    def _prefill(
        self, plan: StepPlan, chunk: Chunk, epoch: int, result: Columns, prompts: list[tuple[int, ...]]
    ) -> Writes:
        """Returns what it writes, for the end of the step. ``prompts``: gets what the chunk's last token has seen."""
        row = self.rows[chunk.slot]
        assert row is not None
        assert row.epoch == epoch
        assert row.length <= chunk.start, "chunks of a prompt follow each other, or begin behind shared blocks"
        writes = self._chunk_writes(chunk, row, epoch)
        self._put(writes)
        row.length = chunk.start + len(chunk.token_ids)
        history = self._history(chunk.slot, row.length, chunk.start)
        row.lost = row.lost or bool(self.windows and GARBAGE in history)  # what it writes is wrong from now on
        prompts.append(self._take_in(chunk.slot, row, history[: chunk.start], history))
        new = self._advance(plan, row, prompts[-1], 1) if chunk.last else []
        result.add(plan, new, self._code(row, new) if chunk.last else FinishReason.NONE)
        self._distrust(plan.step, chunk.slot, row, result.finish[-1])
        self._put(writes, not_yet=True)
        return writes

    def _fork(self, plan: StepPlan, fork: Fork, epoch: int, result: Columns, prompt: tuple[int, ...]) -> Writes:
        """A draw behind ``prompt``, and what it copies of the prompt's last block; all of that is written already."""
        row = self.rows[fork.slot]
        assert row is not None
        assert row.epoch == epoch
        assert row.length == len(prompt), "an answer begins where its prompt ends"
        writes: Writes = []
        for block, own in self._pairs(fork):
            self.cells[own] = list(self.cells[block])
            writes += [(fork.slot, epoch, own, offset, value) for offset, value in enumerate(self.cells[own])]
        source = plan.chunks[fork.chunk].slot
        self.states[fork.slot] = self.states[source]
        if self.recurrent:
            writes.append((fork.slot, epoch, TRASH_BLOCK, 0, GARBAGE))  # ``land`` spoils its state, too
        of_prompt = self.rows[source]
        row.lost = of_prompt is not None and of_prompt.lost
        new = self._advance(plan, row, prompt, 1)
        result.add(plan, new, self._code(row, new))
        self._distrust(plan.step, fork.slot, row, result.finish[-1])
        return writes

    def _decode(self, plan: StepPlan, slot: int, epoch: int, result: Columns, writes: Writes) -> None:
        row = self.rows[slot]
        assert row is not None
        new: list[int] = []
        live = not row.finished
        if live:
            assert row.epoch == epoch, "a live row runs under the epoch it was seated with"
            self._write(slot, row.length, row.last, writes, epoch)
            history = self._history(slot, row.length + 1, row.length)
            history = self._take_in(slot, row, history[:-1], history)
            barren = self.barren and not row.tried
            most = plan.width if row.matched is None or row.tabled else row.most  # if its grammar forces the others
            new = self._advance(plan, row, history, accepted(row.request_id, history, most, barren=barren))
            for i in range(plan.width - 1):  # drafts: the accepted ones are right, the others rubbish
                self._write(slot, row.length + 1 + i, new[i] if i < len(new) - 1 else GARBAGE, writes, epoch)
            row.length += len(new) or int(row.broken)
            self.states[slot] = (*history, *new)[: row.length]
            row.tried = not new
            self.accepted.setdefault(row.request_id, []).append(len(new))
        result.add(plan, new, self._code(row, new) if live else FinishReason.NONE)
        self._distrust(plan.step, slot, row, result.finish[-1])

    def _take_in(self, slot: int, row: SlotRow, before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
        """``before``: the tokens that its state must be of. Returns what it has seen: NaN in a state stays there."""
        state = self.states[slot]
        if self.recurrent and NAN in state and len(state) == len(before):
            after = (
                *(NAN if NAN in pair else pair[1] for pair in zip(state, before, strict=True)),
                *after[len(before) :],
            )
        elif self.recurrent:
            row.lost = row.lost or state != before
        self.states[slot] = after
        return after

    def _distrust(self, step: int, slot: int, row: SlotRow, code: int) -> None:
        if code == FinishReason.ERROR:
            blocks = [self.tables[slot][i] for i in range(-(-row.length // self.block_size))]
            self.broken_blocks.setdefault(step, []).extend(blocks)

    def _advance(self, plan: StepPlan, row: SlotRow, history: tuple[int, ...], most: int) -> list[int]:
        new: list[int] = []
        if row.matched is not None and NAN not in history and not row.lost:
            assert row.tabled or row.allowed_in == plan.step, "a grammar without a table is applied by the host"
            known = row.allowed_in != plan.step or list(history[row.prompt_length :]) == row.matched
            assert known, "the host knows all of the answer"
        for _ in range(most):
            if NAN in history or len(history) >= self.breaks_at.get(row.request_id, MANY):
                row.broken = row.finished = not new  # what was drawn before counts; the next step tells
                break
            token = (next_token(row.request_id, history) + row.lost) % VOCABULARY
            history += (token,)
            new.append(token)
            if token in row.stops or len(history) >= row.max_length:
                row.finished = True
                break
        if new:
            row.last = new[-1]
        return new

    @staticmethod
    def _code(row: SlotRow, new: list[int]) -> int:
        """Of a row that was live when the step began."""
        if row.broken:
            return FinishReason.ERROR
        if not new or not row.finished:
            return FinishReason.NONE
        return FinishReason.STOP if new[-1] in row.stops else FinishReason.LENGTH


def spoil_free_pages(scheduler: Scheduler, device: FakeDevice) -> None:
    """From now on pages of windows lose their contents once nobody holds or finds them, and when they are taken."""
    for group, pool in enumerate(scheduler.ledger.windows, 1):
        drop, take = pool._drop, pool.take

        def dropping(block: int, group: int = group, pool: BlockPool = pool, drop: Any = drop) -> None:
            drop(block)
            if not pool.refs[block] and not pool.findable(block):
                device.spoil(group, [block])

        def taking(wanted: int, group: int = group, take: Any = take) -> list[int]:
            taken: list[int] = take(wanted)
            device.spoil(group, taken)
            return taken

        pool._drop, pool.take = dropping, taking  # type: ignore[method-assign]

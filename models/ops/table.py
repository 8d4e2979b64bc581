"""The op table: rows, each a kernel that serves an op, and which of them runs a call.

Knows: the order of rows, what a mode admits, and that an op with one row is bound at start, while that of another is
found once for each key. Does not know: any kernel (rows_nvidia, rows_reference), or what an op computes (contract.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.ops.contract import Ops

Run = Callable[..., Any]
INVARIANT = "invariant"  # form of a row by which a token's result has the same bits in every batch


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel that serves ``op``.

    ``bind(ops)``: what runs every call of ``op``. ``bind(ops, call)`` of a row that ``refuses(ops, call)`` some, for a
    reason or None: what runs this one. A call is described by its key (``keys`` of TableOps). Of rows whose
    configuration is tuned both have a third argument, an instance of ``config``, one of ``variants(ops, call)``.
    ``form``: what else it does besides the plain op, and INVARIANT. ``fallback``: the name by which calls are counted
    that it serves in place of a better row.
    """

    op: str
    bind: Callable[..., Run]
    form: frozenset[str] = frozenset()
    refuses: Callable[..., str | None] | None = None
    variants: Callable[..., Sequence[Any]] | None = None
    config: type | None = None
    fallback: str | None = None


def takes_every(ops: Any, call: Any) -> None:
    """``refuses`` of a row that is bound to each kind of call, and takes all of them."""


def plain(op: str, run: Run, *form: str) -> Row:
    """A row of a function that needs nothing of its ops."""
    return Row(op, lambda ops: run, frozenset(form))


def composed(op: str, run: Run, *, invariant: bool = True) -> Row:
    """A row of a function of other ops, which it gets first: as ``invariant`` as these, unless it says otherwise."""
    return Row(op, lambda ops: partial(run, ops), frozenset((INVARIANT,)) if invariant else frozenset())


@dataclass(frozen=True, slots=True)
class Key:
    """``of(arguments of a call)``: what its row is remembered by. ``call(the same)``: what rows see of it; by
    default the key."""

    of: Callable[..., object]
    call: Callable[..., Any] | None = None


class TableOps(Ops):
    """Ops whose rows are bound as attributes, in place of the methods of the contract."""

    rows: tuple[Row, ...] = ()
    keys: Mapping[str, Key] = {}
    invariant: bool = False

    def bind_rows(self, rows: Iterable[Row], keys: Mapping[str, Key] | None = None, *, invariant: bool = False) -> None:
        """Of each op the first row that does not refuse a call runs it. ``invariant``: of INVARIANT rows only.

        ``keys``: of ops with rows that refuse calls.
        """
        self.rows, self.keys, self.invariant = tuple(rows), keys or {}, invariant
        self.stood_in: dict[str, str] = {}  # fallbacks that ran, and why
        self._remembered: list[dict[object, Run]] = []
        for op in dict.fromkeys(row.op for row in self.rows):
            if those := self.rows_of(op):
                vars(self)[op] = self.bound(those)

    def rows_of(self, op: str) -> list[Row]:
        """Those that this mode admits, the first choice first."""
        return [row for row in self.rows if row.op == op and (not self.invariant or INVARIANT in row.form)]

    @property
    def batch_invariant(self) -> Mapping[str, bool]:
        return {row.op: True for row in self.rows if INVARIANT in row.form} if self.invariant else {}

    def forget(self) -> None:
        """Looks for the row of every call anew: what rows choose by has changed."""
        for runs in self._remembered:
            runs.clear()

    def bound(self, rows: Sequence[Row]) -> Run:
        """What runs every call of an op with these ``rows``: the first one, where it refuses none."""
        if rows[0].refuses is None:
            alone: Run = rows[0].bind(self)
            return alone
        key, describe = self.keys[rows[0].op].of, self.keys[rows[0].op].call
        runs: dict[object, Run] = {}
        self._remembered.append(runs)

        def choose(*given: Any, **named: Any) -> Any:
            seen = key(*given, **named)
            found = runs.get(seen)
            if found is None:
                call = seen if describe is None else describe(*given, **named)
                found = runs[seen] = self._first(rows, call)
            return found(*given, **named)

        return choose

    def _first(self, rows: Sequence[Row], call: object) -> Run:
        """What runs ``call``. Raises RuntimeError with the reasons of all rows where each refuses it."""
        reasons: list[str] = []
        for row in rows:
            reason = None if row.refuses is None else row.refuses(self, call)
            if reason is not None:
                reasons.append(reason)
                continue
            if row.fallback is not None and reasons:
                self.stood_in[row.fallback] = reasons[-1]
            run: Run = row.bind(self) if row.refuses is None else row.bind(self, call)
            return run
        raise RuntimeError(f"no kernel here computes this {rows[0].op}: {'; '.join(reasons)}")

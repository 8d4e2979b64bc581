"""Who is to blame when a job ends badly: pure functions of what the ranks' watchdogs said last.

Knows: heartbeats, the places in which a rank waits for others, what excuses whom, what is only a consequence.
Does not know: threads, sockets, clocks (times are passed in), what is done with the verdict (watchdog.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from parallel.comm.call_log import CollectiveError
from parallel.control.errors import Cause, ControlError, Verdict
from parallel.control.wire.frames import Heartbeat

# Places in which an engine waits for other ranks or for its device, which waits for other ranks in a collective.
WAITING_PLACES = frozenset({"exchange", "land", "idle"})

# What may follow from another rank's fault: its collectives break, or its launcher ends the ranks that are left. A rank
# that says so waits for a better explanation.
CONSEQUENCES = frozenset({Cause.COLLECTIVE, Cause.TERMINATED})


@dataclass(frozen=True, slots=True)
class Sign:
    """A rank's last heartbeat and the local time, in seconds, at which it came."""

    heartbeat: Heartbeat
    at: float


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. ``silence``: after so long without a sign a rank that stands still is not alive. ``stopped``: longest
    silence of a process that the kernel calls stopped. ``mute``: of any process; no call holds an interpreter so long.
    """

    silence: float
    stopped: float = inf
    mute: float = inf


def judge(
    signs: Mapping[int, Sign], now: float, patience: Patience, stopped: Collection[int] = (), far: Collection[int] = ()
) -> Verdict | None:
    """The verdict on the rank that keeps the others, or None while no rank is over its limit or one is excused.

    A rank that called another collective than the others is to blame at once, and one that has fallen silent as soon
    as its patience is over. A rank stands still for the seconds since its last progress, its own and those since its
    last sign. Of the ranks that are over their own limits, the culprit is, in this order: one that was silent (its
    process is stopped, or its interpreter is held), the one at the lowest step, one that does not wait for others, the
    one with the fewest collectives. A rank that works within its limit (it loads, it compiles) excuses those who wait,
    and one that will be over its limit in a moment is waited for: ranks do not come to a stand all at once.
    ``stopped``: the ranks whose processes the kernel calls stopped. ``far``: those on other nodes, over a network.
    """
    odd = odd_caller(signs)
    if odd is not None:
        return odd
    silent = {rank: now - sign.at for rank, sign in signs.items()}
    for rank in sorted(signs, key=lambda rank: -silent[rank]):
        if silent[rank] > (patience.stopped if rank in stopped else patience.mute):
            return standing_still(rank, signs, now, patience.silence, far)
    still = {rank: sign.heartbeat.still_for + silent[rank] for rank, sign in signs.items()}
    over = [rank for rank, sign in signs.items() if still[rank] > sign.heartbeat.limit]
    if not over:
        return None
    for rank, sign in signs.items():
        works = sign.heartbeat.phase not in WAITING_PLACES
        if rank not in over and (works or still[rank] > sign.heartbeat.limit - patience.silence):
            return None

    def order(rank: int) -> tuple[bool, int, bool, int, int]:
        beat = signs[rank].heartbeat
        return silent[rank] <= patience.silence, beat.step, beat.phase in WAITING_PLACES, beat.called, rank

    return standing_still(min(over, key=order), signs, now, patience.silence, far)


def verdict_on(reason: BaseException | str, rank: int, step: int) -> Verdict:
    """What a rank that ends for ``reason`` says of itself. A ControlError is what all ranks agreed on already."""
    if isinstance(reason, ControlError):
        return reason.verdict
    said = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
    cause = Cause.ABORTED
    if isinstance(reason, (SystemExit, KeyboardInterrupt)):
        cause = Cause.TERMINATED
    elif isinstance(reason, BaseException) and any(isinstance(e, CollectiveError) for e in _causes(reason)):
        cause = Cause.COLLECTIVE
    return Verdict(cause, rank, step, f"rank {rank} ends at step {step}: {said}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it came from."""
    step: BaseException | None = error
    while step is not None:
        yield step
        step = step.__cause__ or step.__context__


def gone(rank: int, sign: Sign, far: Collection[int] = ()) -> Verdict:
    """The verdict on a rank whose process ended without a word. ``far``: ranks on other nodes, over a network."""
    beat = sign.heartbeat
    how = ", or the network to its node was cut for long" if rank in far else ""
    text = f"rank {rank} is gone: its process ended without an agreed stop{how}; last seen at step {beat.step} in "
    return Verdict(Cause.LOST, rank, beat.step, text + beat.phase)


def weigh(
    reports: Sequence[Verdict],
    signs: Mapping[int, Sign],
    now: float,
    silence: float,
    ended: Collection[int] = (),
    far: Collection[int] = (),
) -> Verdict:
    """The verdict when ranks reported nothing but consequences, first report first, and no cause arrived in time.

    Of what is known besides, in this order: a rank that is among ``ended``, those whose processes are gone; one that
    called another collective than the others, where one broke; one of those on other nodes, ``far``, of which nothing
    was received for longer than ``silence``. Ranks that reported have said why they end.
    """
    wordless = sorted(signs.keys() - {report.rank for report in reports})
    for rank in wordless:
        if rank in ended:
            return gone(rank, signs[rank], far)
    broken = [report for report in reports if report.cause is Cause.COLLECTIVE]
    odd = odd_caller(signs, sure=False) if broken else None
    if odd is not None:
        return odd
    for rank in wordless:
        if rank in far and now - signs[rank].at > silence:
            return standing_still(rank, signs, now, silence, far)
    if not broken:
        return reports[0]
    first = broken[0]
    text = f"{first.text}; no rank is gone, and none is known to have called another collective than the others"
    return Verdict(first.cause, first.rank, first.step, text)


def odd_caller(signs: Mapping[int, Sign], sure: bool = True) -> Verdict | None:
    """The rank that called another collective than the others of its group. The fewer are to blame, of two the second.

    ``sure``: only when all ranks' calls of that number are known, or enough of them are alike to outvote the rest.
    """
    for group in sorted({sign.heartbeat.group for sign in signs.values()}):
        odd = _odd_of({rank: s.heartbeat for rank, s in signs.items() if s.heartbeat.group == group}, sure)
        if odd is not None:
            return odd
    return None


def _odd_of(logs: Mapping[int, Heartbeat], sure: bool) -> Verdict | None:
    numbers = sorted({first for beat in logs.values() for first, _ in beat.calls})
    for number in numbers:  # calls between two of these are like the one before
        calls = {rank: call for rank, beat in sorted(logs.items()) if (call := _call(beat, number)) is not None}
        votes = Counter(calls.values())
        if len(votes) < 2:
            continue
        most = max(votes.values())
        if sure and len(calls) < len(logs) and 2 * most <= len(logs):
            return None
        right = next(call for call in calls.values() if votes[call] == most)
        odd = [rank for rank, call in calls.items() if call != right]
        rest = [rank for rank, call in calls.items() if call == right]
        beat = logs[odd[0]]
        text = (
            f"rank {odd[0]} called another collective than the others at step {beat.step} in {beat.phase}: its number "
            f"{number} was {calls[odd[0]]}, that of {_named(rest)} was {right}"
        )
        if len(odd) > 1:
            text += f"; {_named(odd[1:])} differed too"
        return Verdict(Cause.COLLECTIVE, odd[0], beat.step, text)
    return None


def _call(beat: Heartbeat, number: int) -> str | None:
    """The rank's collective of this number; None when it was not made yet, or is too long ago to be known."""
    if number >= beat.called:
        return None
    return next((call for first, call in reversed(beat.calls) if first <= number), None)


def standing_still(
    culprit: int, signs: Mapping[int, Sign], now: float, silence: float, far: Collection[int] = ()
) -> Verdict:
    """The verdict on a rank that keeps the others, with where everybody is.

    ``far``: ranks on other nodes. Where several of those are silent, the first of them is the culprit.
    """
    unheard = [rank for rank in sorted(far) if rank in signs and now - signs[rank].at > silence]
    if culprit in unheard:
        culprit = unheard[0]  # the first of a node speaks for it: nothing can be known of the others
    sign = signs[culprit]
    beat = sign.heartbeat
    if culprit in unheard:
        of_whom = f"it, nor of {_named(unheard[1:])}," if unheard[1:] else "it"
        how = f"nothing was heard of {of_whom} for {now - sign.at:.1f} s: "
        how += "the network to its node is cut, or it is stopped"
    elif now - sign.at > silence:
        how = f"its process has said nothing for {now - sign.at:.1f} s: it is stopped, or its interpreter is held"
    else:
        still = beat.still_for + now - sign.at
        how = f"its process answers, but its engine has made no progress for {still:.1f} s"
    most = max(s.heartbeat.called for s in signs.values())
    if beat.called < most:
        how += f"; it made {beat.called} collectives, others {most}"
    others = [
        f"rank {rank} at step {s.heartbeat.step} in {s.heartbeat.phase}"
        for rank, s in sorted(signs.items())
        if rank != culprit
    ]
    if others:
        how += f"; {', '.join(others)}"
    text = f"rank {culprit} stands still at step {beat.step} in {beat.phase} (limit {beat.limit:g} s): {how}"
    return Verdict(Cause.NO_PROGRESS, culprit, beat.step, text)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

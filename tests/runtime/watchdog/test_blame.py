"""Who is to blame: the silent before the living, the one behind before the others, nobody while somebody works."""

from __future__ import annotations

import pytest

from parallel.control.errors import BrokenCollective, Cause, NoProgress, Verdict
from parallel.control.wire.frames import Heartbeat
from runtime.watchdog.blame import Patience, Sign, judge, odd_caller, standing_still, weigh


def sign(step: int, place: str, still: float, at: float = 100.0, limit: float = 10.0) -> Sign:
    return Sign(Heartbeat(step, step, place, still, limit, 0, 0, 0, ()), at)


@pytest.mark.parametrize(
    ("signs", "culprit"),
    [
        # everybody moves
        ({0: sign(5, "plan", 0.1), 1: sign(5, "land", 9.0)}, None),
        # rank 1 is behind, the others wait for it
        ({0: sign(6, "land", 11.0), 1: sign(5, "plan", 11.5), 2: sign(6, "exchange", 11.0)}, 1),
        # all at one step: the one that does not wait
        ({0: sign(6, "land", 11.0), 1: sign(6, "exchange", 11.0), 2: sign(6, "launch", 11.0)}, 2),
        # rank 2's process is stopped: its last words were innocent, and it was ahead
        ({0: sign(6, "land", 11.0), 1: sign(6, "land", 11.0), 2: sign(7, "exchange", 0.2, at=89.0)}, 2),
        # rank 1 loads within its own limit: nobody is to blame yet
        ({0: sign(0, "exchange", 60.0), 1: sign(0, "load", 60.0, limit=600.0)}, None),
        # ... and beyond it
        ({0: sign(0, "exchange", 601.0), 1: sign(0, "load", 601.0, limit=600.0)}, 1),
        # rank 1 only just began to work; it will be over its limit itself if it hangs
        ({0: sign(6, "land", 11.0), 1: sign(6, "plan", 3.0)}, None),
        # a collective that nobody leaves, all alike: the lowest rank, for want of better
        ({0: sign(6, "land", 11.0), 1: sign(6, "land", 11.0)}, 0),
        # rank 1 came to a stand a moment later, and may be the cause
        ({0: sign(6, "land", 11.0), 1: sign(6, "land", 9.0)}, None),
        # the leader is idle and gets on: nobody else can be the cause
        ({0: sign(7, "idle", 0.1), 1: sign(6, "land", 11.0)}, 1),
        # a world of one
        ({0: sign(3, "land", 10.5)}, 0),
    ],
)
def test_the_culprit(signs: dict[int, Sign], culprit: int | None) -> None:
    verdict = judge(signs, now=100.2, patience=Patience(2.0))
    assert (None if verdict is None else verdict.rank) == culprit


def test_the_verdict_tells_where_everybody_is() -> None:
    verdict = judge({0: sign(6, "land", 11.0), 1: sign(5, "plan", 11.5)}, now=100.0, patience=Patience(2.0))
    assert verdict is not None
    assert (verdict.cause, verdict.rank, verdict.step) == (Cause.NO_PROGRESS, 1, 5)
    assert isinstance(verdict.error(), NoProgress)
    assert verdict.text == (
        "rank 1 stands still at step 5 in plan (limit 10 s): its process answers, but its engine has made no progress "
        "for 11.5 s; rank 0 at step 6 in land"
    )
    verdict = judge({0: sign(6, "land", 11.0), 1: sign(5, "plan", 0.5, at=88.0)}, now=100.0, patience=Patience(2.0))
    assert verdict is not None
    assert "its process has said nothing for 12.0 s: it is stopped, or its interpreter is held" in verdict.text


def test_a_node_that_is_not_heard_of_may_be_cut_off() -> None:
    signs = {0: sign(6, "land", 11.0), 1: sign(6, "land", 11.0)}
    signs |= {2: sign(5, "land", 0.5, at=88.0), 3: sign(4, "land", 0.5, at=87.9)}
    verdict = judge(signs, now=100.0, patience=Patience(2.0), far={2, 3})
    assert verdict is not None
    assert verdict.text == (
        "rank 2 stands still at step 5 in land (limit 10 s): nothing was heard of it, nor of rank 3, for 12.0 s: the "
        "network to its node is cut, or it is stopped; rank 0 at step 6 in land, rank 1 at step 6 in land, rank 3 at "
        "step 4 in land"
    )
    verdict = standing_still(0, {0: sign(6, "land", 0.0, at=88.0)}, now=100.0, silence=2.0, far={0})
    assert verdict.text == (
        "rank 0 stands still at step 6 in land (limit 10 s): nothing was heard of it for 12.0 s: the network to its "
        "node is cut, or it is stopped"
    )


def caller(called: int, calls: list[tuple[int, str]], group: int = 0) -> Sign:
    return Sign(Heartbeat(7, 7, "land", 0.1, 10.0, 0, group, called, tuple(calls)), 100.0)


def test_the_rank_that_called_another_collective_is_named_at_once() -> None:
    usual = [(0, "sum [8]"), (5, "gather [4]"), (6, "sum [8]"), (11, "gather [4]")]
    extra = [(0, "sum [8]"), (5, "gather [4]"), (6, "sum [8]"), (12, "gather [4]")]
    signs = {0: caller(12, usual), 1: caller(12, usual), 2: caller(12, extra[:3]), 3: caller(9, usual[:3])}
    verdict = judge(signs, 100.1, Patience(2.0))
    assert verdict is None, "rank 3 has not come so far, and two against one of four are no majority"
    signs[3] = caller(12, usual)
    verdict = judge(signs, 100.1, Patience(2.0))
    assert verdict is not None
    assert (verdict.cause, verdict.rank, verdict.step) == (Cause.COLLECTIVE, 2, 7)
    assert isinstance(verdict.error(), BrokenCollective)
    assert verdict.text == (
        "rank 2 called another collective than the others at step 7 in land: its number 11 was sum [8], that of ranks "
        "0, 1, 3 was gather [4]"
    )


def test_calls_that_are_too_long_ago_or_not_made_yet_are_not_compared() -> None:
    old = caller(40, [(30, "sum [8]"), (35, "gather [4]")])
    slow = caller(31, [(0, "other"), (30, "sum [8]")])
    assert odd_caller({0: old, 1: slow}, sure=False) is None
    assert odd_caller({0: old, 1: caller(0, [])}, sure=False) is None


def test_only_ranks_of_one_group_make_the_same_calls() -> None:
    decodes, prefills = [(0, "sum [8]")], [(0, "sum [512]")]
    signs = {0: caller(1, decodes), 1: caller(1, decodes), 2: caller(1, prefills, 2), 3: caller(1, prefills, 2)}
    assert odd_caller(signs) is None
    verdict = odd_caller(signs | {3: caller(1, decodes, 2)})
    assert verdict is not None
    assert verdict.rank == 3


def test_of_two_ranks_that_call_differently_the_follower_is_named() -> None:
    verdict = odd_caller({0: caller(1, [(0, "sum [8]")]), 1: caller(1, [(0, "gather [4]")])})
    assert verdict is not None
    assert verdict.rank == 1


def test_a_process_that_is_stopped_is_given_up_while_it_loads() -> None:
    signs = {0: sign(0, "load", 60.0, limit=600.0), 1: sign(0, "load", 1.0, at=89.0, limit=600.0)}
    patience = Patience(2.0, stopped=10.0, mute=40.0)
    assert judge(signs, 100.0, patience) is None
    verdict = judge(signs, 100.0, patience, stopped={1})
    assert verdict is not None
    assert (verdict.cause, verdict.rank) == (Cause.NO_PROGRESS, 1)
    verdict = judge(signs, 140.0, patience)
    assert verdict is not None, "no call holds an interpreter for so long"
    assert verdict.rank == 1


def test_consequences_are_weighed() -> None:
    ended = Verdict(Cause.TERMINATED, 3, 7, "rank 3 ends at step 7: SystemExit: 143")
    broke = Verdict(Cause.COLLECTIVE, 1, 7, "rank 1 ends at step 7: CollectiveError: closed")
    alike = {rank: caller(1, [(0, "sum [8]")]) for rank in range(3)}
    assert weigh([ended], alike, 100.2, 2.0) == ended
    verdict = weigh([ended, broke], alike, 100.2, 2.0)
    assert (verdict.cause, verdict.rank) == (Cause.COLLECTIVE, 1)
    assert verdict.text.startswith(f"{broke.text}; no rank is gone, and none is known to have called another")
    assert weigh([broke], alike | {2: caller(1, [(0, "gather [4]")])}, 100.2, 2.0).rank == 2


def test_who_is_gone_explains_a_signal_better_than_the_signal() -> None:
    told = Verdict(Cause.TERMINATED, 0, 7, "rank 0 ends at step 7: SystemExit: 143")
    broke = Verdict(Cause.COLLECTIVE, 1, 7, "rank 1 ends at step 7: CollectiveError: closed")
    signs = {rank: caller(1, [(0, "sum [8]")]) for rank in range(4)}
    for reports in ([told], [told, broke], [broke]):
        verdict = weigh(reports, signs, 100.2, 2.0, ended={2, 3})
        assert (verdict.cause, verdict.rank, verdict.step) == (Cause.LOST, 2, 7)
        assert verdict.text == ("rank 2 is gone: its process ended without an agreed stop; last seen at step 7 in land")
    other = signs | {3: caller(1, [(0, "gather [4]")])}
    assert weigh([broke], other, 100.2, 2.0, ended={2}).rank == 2, "it cannot have called anything any more"
    assert weigh([told, broke], signs, 100.2, 2.0, ended={0, 1}).cause is Cause.COLLECTIVE, "they have said why"


def test_a_node_that_is_not_heard_of_explains_a_signal_better_than_the_signal() -> None:
    told = Verdict(Cause.TERMINATED, 0, 7, "rank 0 ends at step 7: SystemExit: 143")
    broke = Verdict(Cause.COLLECTIVE, 1, 7, "rank 1 ends at step 7: CollectiveError: closed")
    signs = {rank: caller(1, [(0, "sum [8]")]) for rank in range(4)}
    signs |= {rank: Sign(signs[rank].heartbeat, 97.5) for rank in (2, 3)}
    assert weigh([told], signs, 100.2, 2.0) == told, "a rank of this node may hold its interpreter: it is not gone"
    assert weigh([told], signs, 99.0, 2.0, far={2, 3}) == told
    for reports in ([told], [broke]):
        verdict = weigh(reports, signs, 100.2, 2.0, far={2, 3})
        assert (verdict.cause, verdict.rank) == (Cause.NO_PROGRESS, 2)
        assert "nothing was heard of it, nor of rank 3, for 2.7 s: the network to its node is cut" in verdict.text
    odd = signs | {1: caller(1, [(0, "gather [4]")])}
    assert weigh([broke], odd, 100.2, 2.0, far={2, 3}).rank == 1
    assert weigh([told, Verdict(Cause.TERMINATED, 2, 7, "")], signs, 100.2, 2.0, far={2}) == told

"""Groups over real sockets, on one node and on several: the maximum, what is told, and every end by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from parallel.control.errors import Disagreement, HandshakeRefused, LostPeer, MissedDeadline, NoProgress, Verdict
from parallel.control.follower_plane import FollowerPlane
from parallel.control.interface import ControlPlane, SingleRankControl
from parallel.control.leader_plane import LeaderPlane
from parallel.control.protocol.states import Limits
from parallel.control.wire.frames import MAX_PAYLOAD
from runtime.schedule.digest import RollingDigest
from runtime.watchdog.options import WatchdogOptions
from runtime.watchdog.watchdog import Watchdog
from tests.parallel.control.ranks import LIMITS, PATIENCE_S, run_nodes, run_ranks, short_folder, take_turns
from tests.parallel.control.test_interface import errors

TURNS = 100


@pytest.fixture
def place() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder / "control"


def numbers(group: int, step: int) -> tuple[int, ...]:
    """What a group proposes: other numbers in every step, most of them now this group's, now that one's."""
    return ((group + 1) * (step + 3) * 7919 % 101, (group * 31 + step) % 7, (1 << 62) + (step + group) % 3)


def maxima(groups: int, turns: int = TURNS) -> list[tuple[int, ...]]:
    return [tuple(map(max, zip(*(numbers(g, step) for g in range(groups)), strict=True))) for step in range(turns)]


def group_of(plane: ControlPlane, groups: int) -> int:
    return plane.rank * groups // plane.world


def finish(plane: ControlPlane, step: int, digest: int = 0) -> None:
    """The agreed stop, with a maximum in every turn up to the last."""
    if plane.rank == 0:
        plane.stop()
    while not plane.stopped:
        plane.exchange(step, digest)
        assert plane.agree_max(step, (step,)) == (step,)
        step += 1


@pytest.mark.parametrize(
    ("nodes", "local", "groups", "spin"),
    [
        *((1, 2, 2, 0.0), (1, 2, 1, 1e-4), (1, 4, 2, 0.0), (1, 4, 4, 0.0), (2, 1, 2, 0.0), (2, 2, 2, 0.0)),
        pytest.param(3, 2, 3, 1e-3, marks=pytest.mark.slow),
    ],
)
def test_every_rank_has_the_maximum_and_the_leader_is_told(
    place: Path, nodes: int, local: int, groups: int, spin: float
) -> None:
    """Groups differ in their digests from the first turn on. The stop's turns agree, too."""
    world = nodes * local
    told: dict[int, list[bytes]] = {rank: [] for rank in range(world)}

    def body(plane: ControlPlane) -> list[tuple[int, ...]]:
        digest, found = RollingDigest(), []
        for step in range(TURNS):
            plane.exchange(step, digest.value)
            digest.fold(step, "plan", (step, group_of(plane, groups)))
            found.append(plane.agree_max(step, numbers(group_of(plane, groups), step)))
            plane.send_message(b"%d" % step)
            for rank, payload in plane.take_messages():
                told[rank].append(payload)
        finish(plane, TURNS, digest.value)
        for rank, payload in plane.take_messages():  # what is told before a proposal is there when the maximum is
            told[rank].append(payload)
        assert abs(plane.clock_offset_ns) < 10**9  # one machine has one clock
        assert plane.rank != 0 or plane.clock_offset_ns == 0
        return found

    limits = replace(LIMITS, spin=spin)
    if nodes == 1:
        ended = run_ranks(world, place, body, limits=limits, groups=groups)
    else:
        ended = run_nodes(nodes, local, place, body, limits=limits, groups=groups)
    assert ended == dict.fromkeys(range(world), maxima(groups))
    assert told == {rank: [b"%d" % step for step in range(TURNS)] for rank in range(world)}


@pytest.mark.parametrize("nodes", [1, 2])
def test_large_events_and_large_tells_stop_nobody(place: Path, nodes: int) -> None:
    """As under collectives that block: nobody goes on before all have the maximum, so it may not lie in a queue."""
    world, turns, large = 4, 5, 5 << 20
    together = threading.Barrier(world)
    sizes: dict[int, list[int]] = {rank: [] for rank in range(world)}

    def body(plane: ControlPlane) -> None:
        step, missing = 0, world * turns
        while missing:
            plane.exchange(step, 0, bytes(large) if plane.rank == 0 and step < turns and step % 2 else b"")
            if step < turns:
                plane.send_message(bytes(large // (1 + step)))
            for rank, payload in plane.take_messages():
                sizes[rank].append(len(payload))
            here = sum(map(len, sizes.values()))
            (missing,) = plane.agree_max(step, (world * turns - here if plane.rank == 0 else 0,))
            together.wait(PATIENCE_S)
            step += 1
        finish(plane, step)

    if nodes == 1:
        ended = run_ranks(world, place, body, groups=world)
    else:
        ended = run_nodes(nodes, world // nodes, place, body, groups=world)
    assert ended == dict.fromkeys(range(world))
    assert sizes == {rank: [large // (1 + step) for step in range(turns)] for rank in range(world)}


def test_an_idle_leader_wakes_for_what_it_is_told(place: Path) -> None:
    idle = threading.Event()

    def ready(seconds: float) -> bool:
        idle.set()
        return threading.Event().wait(seconds)

    def body(plane: ControlPlane) -> list[tuple[int, bytes]]:
        told = []
        plane.exchange(0, 0)
        if plane.rank == 0:
            assert plane.wait_for_events(ready)  # without a timeout: only the tell ends it
            told = plane.take_messages()
            assert not plane.wait_for_events(ready, 0.01)
            plane.send_message(b"to myself")
            assert plane.wait_for_events(ready)
            told += plane.take_messages()
        else:
            idle.wait(PATIENCE_S)
            plane.send_message(b"late result")
        finish(plane, 1)
        return told

    assert run_ranks(2, place, body) == {0: [(1, b"late result"), (0, b"to myself")], 1: []}


# ---- what ends it ----


@pytest.mark.parametrize(("nodes", "culprit"), [(1, 1), (1, 3), (2, 2), (2, 3)])
def test_a_rank_of_any_group_that_decides_differently_is_named_with_both_decisions(
    place: Path, nodes: int, culprit: int
) -> None:
    def body(plane: ControlPlane) -> None:
        digest, group = RollingDigest(), group_of(plane, 2)
        plane.explain_with(digest.recent)
        for step in range(60):
            plane.exchange(step, digest.value)
            digest.fold(step, "plan", (step, 4 + group if (plane.rank, step) == (culprit, 20) else 8 + group))
            plane.agree_max(step, (group,))

    limits = replace(LIMITS, divergence=4.0)
    if nodes == 1:
        found = errors(run_ranks(4, place, body, limits=limits, groups=2))
    else:
        found = errors(run_nodes(2, 2, place, body, limits=limits, groups=2))
    assert len({str(error) for error in found.values()}) == 1
    group = culprit // 2
    for error in found.values():
        assert isinstance(error, Disagreement)
        assert (error.verdict.rank, error.verdict.step) == (2 * group + 1, 21)  # of two the second
        assert f"ranks of group {group} disagree at step 21" in str(error)
        assert f"plan(20, {4 + group}) at step 20" in str(error)
        assert f"plan(20, {8 + group}) at step 20" in str(error)


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_of_a_group_that_propose_differently_end_all_with_both_values(place: Path, nodes: int) -> None:
    def body(plane: ControlPlane) -> None:
        for step in range(50):
            plane.exchange(step, 0)
            plane.agree_max(step, (5, 1 if (plane.rank, step) == (3, 10) else 0))

    if nodes == 1:
        found = errors(run_ranks(4, place, body, groups=2))
    else:
        found = errors(run_nodes(2, 2, place, body, groups=2))
    for error in found.values():
        assert isinstance(error, Disagreement)
        assert (error.verdict.rank, error.verdict.step) == (3, 10)
        assert "numbers of step 10: rank 2 proposes (5, 0), rank 3 proposes (5, 1)" in str(error)


@pytest.mark.parametrize(("nodes", "late"), [(1, 2), (2, 3)])
def test_a_rank_that_proposes_late_is_named(place: Path, nodes: int, late: int) -> None:
    limits = Limits(deadline=2.0, resend=0.2, divergence=0.5, spin=0.0, start=PATIENCE_S)
    over = threading.Event()

    def body(plane: ControlPlane) -> None:
        try:
            for step in range(1000):
                plane.exchange(step, 0)
                if (plane.rank, step) == (late, 5):
                    over.wait(PATIENCE_S)
                plane.agree_max(step, (step,))
        finally:
            if plane.rank == 0:
                over.set()

    if nodes == 1:
        found = errors(run_ranks(4, place, body, limits=limits, groups=2))
    else:
        found = errors(run_nodes(2, 2, place, body, limits=limits, groups=2))
    assert len({str(error) for error in found.values()}) == 1
    for error in found.values():
        assert isinstance(error, MissedDeadline)
        assert error.verdict.rank == late
        assert f"rank {late} did not propose its numbers for step 5 within 2 s after rank 0" in str(error)


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_dies_before_it_proposes_is_named(place: Path, gone: int) -> None:
    def body(plane: ControlPlane) -> None:
        for step in range(1000):
            plane.exchange(step, 0)
            if (plane.rank, step) == (gone, 5):
                assert isinstance(plane, LeaderPlane | FollowerPlane)
                plane.link.close()
                plane._closed = True
                assert plane.watch is not None
                plane.watch.close()
                return
            plane.agree_max(step, (step,))

    ended = run_ranks(3, place, body)
    assert ended.pop(gone) is None
    for error in errors(ended).values():
        assert isinstance(error, LostPeer)
        assert error.verdict.rank == gone


def test_the_watchdog_names_a_rank_that_hangs_before_its_proposal(place: Path, tmp_path: Path) -> None:
    """Those who wait for the maximum hear keep-alives: no progress of theirs, and no reason to blame them."""
    options = WatchdogOptions(
        tmp_path / "bundles", limit=2.0, interval=0.05, silence=5.0, explanation_wait=0.3, grace=0.2
    )
    ended = threading.Barrier(3)

    def body(plane: ControlPlane) -> Verdict | None:
        watchdog = Watchdog(plane, options, leave=lambda code: None)
        watchdog.start()
        for step in range(6):
            watchdog.step, watchdog.place = step, "exchange"
            plane.exchange(step, 0)
            if (plane.rank, step) == (2, 5):
                watchdog.place = "plan"
                watchdog._thread.join(PATIENCE_S)
            plane.agree_max(step, (step,))
        watchdog._thread.join(PATIENCE_S)
        ended.wait(PATIENCE_S)
        watchdog.stop()
        finish(plane, 6)
        return watchdog.verdict

    verdicts = run_ranks(3, place, body, groups=3)
    (verdict,) = set(verdicts.values())
    assert isinstance(verdict, Verdict)
    assert isinstance(verdict.error(), NoProgress)
    assert verdict.rank == 2
    assert "rank 2 stands still at step 5 in plan" in verdict.text


# ---- what is refused ----


def test_another_number_of_groups_is_refused_by_name(place: Path) -> None:
    found = errors(run_ranks(4, place, lambda plane: take_turns(plane, []), groups=2, odd_groups={3: 4}))
    for error in found.values():
        assert isinstance(error, HandshakeRefused)
        assert "rank 3 differs from rank 0 in groups: rank 0 has 2, rank 3 has 4" in str(error)


def test_groups_that_do_not_divide_the_world_are_refused(place: Path) -> None:
    for ended in run_ranks(2, place, lambda plane: None, groups=3).values():
        assert isinstance(ended, ValueError)
        assert "3 groups do not divide 2 ranks: choose from [1, 2]" in str(ended)


def told_too_much(plane: ControlPlane) -> None:
    with pytest.raises(ValueError, match=f"{MAX_PAYLOAD + 1} bytes, the limit is"):
        plane.send_message(bytes(MAX_PAYLOAD + 1))


def agreed_too_often(plane: ControlPlane) -> None:
    with pytest.raises(ValueError, match="agree_max of step 1 in turn 0, last of step 0; it is called at most once"):
        plane.agree_max(1, (1,))


@pytest.mark.parametrize("misuse", [told_too_much, agreed_too_often])
def test_misuse_is_refused_and_changes_nothing(place: Path, misuse: Callable[[ControlPlane], None]) -> None:
    def body(plane: ControlPlane) -> type:
        plane.exchange(0, 0)
        plane.agree_max(0, (plane.rank,))
        misuse(plane)
        finish(plane, 1)
        return type(plane)

    assert run_ranks(2, place, body, groups=2)[1] is FollowerPlane
    plane = SingleRankControl()
    assert body(plane) is SingleRankControl
    assert plane.take_messages() == []


def test_a_world_of_one_agrees_with_itself_and_tells_itself() -> None:
    with SingleRankControl(horizon=1) as plane:
        plane.exchange(0, 0)
        assert plane.agree_max(0, [3, 0]) == (3, 0)
        with pytest.raises(ValueError, match="agree_max of step 0 in turn 0, last of step 0"):
            plane.agree_max(0, [3, 0])
        plane.exchange(1, 0)
        with pytest.raises(ValueError, match=r"\(3, -1\) cannot be agreed on: only numbers from 0 to"):
            plane.agree_max(1, [3, -1])
        plane.send_message(b"a")
        plane.send_message(b"b")
        assert plane.wait_for_events(lambda seconds: False)
        assert plane.take_messages() == [(0, b"a"), (0, b"b")]
        assert plane.take_messages() == []
        assert plane.clock_offset_ns == 0

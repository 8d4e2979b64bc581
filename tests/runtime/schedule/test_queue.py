"""The waiting queue: order, leaving it in the middle, and coming back to the place one had."""

from __future__ import annotations

import random

from runtime.schedule.chain import advance
from runtime.schedule.queue import WaitingQueue
from runtime.schedule.request import Request
from runtime.schedule.sequence import SequenceState
from runtime.schedule.states import State, Trigger


def sequence(request_id: int, priority: int = 0) -> SequenceState:
    return SequenceState(Request(request_id, (1, 2), priority=priority), arrival=request_id, max_length=9)


def drain(queue: WaitingQueue) -> list[int]:
    order = []
    while (head := queue.head()) is not None:
        order.append(head.request.request_id)
        queue.pop(head)
    return order


def test_smaller_priority_first_then_first_come_first_served() -> None:
    queue = WaitingQueue()
    for request_id, priority in ((0, 5), (1, 0), (2, 5), (3, -1), (4, 0)):
        queue.push(sequence(request_id, priority))
    assert drain(queue) == [3, 1, 4, 0, 2]


def test_looking_at_the_head_leaves_it_in_place() -> None:
    queue = WaitingQueue()
    first = sequence(0)
    queue.push(first)
    assert queue.head() is queue.head() is first


def test_an_empty_queue_has_no_head() -> None:
    assert WaitingQueue().head() is None


def test_who_stopped_waiting_is_passed_over() -> None:
    queue = WaitingQueue()
    sequences = [sequence(request_id) for request_id in range(4)]
    for each in sequences:
        queue.push(each)
    advance(sequences[0], Trigger.END)
    advance(sequences[2], Trigger.PAUSE)
    assert drain(queue) == [1, 3]


def test_who_comes_back_has_the_old_place_and_one_entry_only() -> None:
    queue = WaitingQueue()
    sequences = [sequence(request_id) for request_id in range(3)]
    for each in sequences:
        queue.push(each)
    advance(sequences[1], Trigger.PAUSE)  # its entry stays behind
    advance(sequences[1], Trigger.RESUME_WAITING)
    queue.push(sequences[1])
    assert drain(queue) == [0, 1, 2]


def test_who_was_taken_may_queue_again_before_those_who_came_later() -> None:
    queue = WaitingQueue()
    sequences = [sequence(request_id) for request_id in range(3)]
    for each in sequences:
        queue.push(each)
    queue.pop(sequences[0])
    for trigger in (Trigger.ADMIT, Trigger.EVICT):
        advance(sequences[0], trigger)
    assert queue.head() is sequences[1]
    advance(sequences[0], Trigger.FENCE_LANDED)
    queue.push(sequences[0])
    assert drain(queue) == [0, 1, 2]


def test_who_has_left_is_not_kept_for_long() -> None:
    """One of better priority has waited in front of them all."""
    queue = WaitingQueue()
    queue.push(sequence(0, priority=-1))
    gone = [sequence(request_id) for request_id in range(1, 400)]
    for each in gone:
        queue.push(each)
        advance(each, Trigger.PAUSE if each.request.request_id % 7 else Trigger.END)
    assert len(queue._heaps[0]) < 150
    for each in gone[::13]:
        if each.state is State.PAUSED:
            advance(each, Trigger.RESUME_WAITING)
            queue.push(each)
    assert drain(queue) == [0, *(e.request.request_id for e in gone[::13] if e.state is State.WAITING)]


def test_any_mixture_of_coming_and_going_is_a_sorted_list() -> None:
    draw = random.Random(1)
    for _ in range(200):
        queue = WaitingQueue()
        sequences = [sequence(request_id, draw.randrange(3)) for request_id in range(12)]
        for each in sequences:
            queue.push(each)
        for _ in range(20):
            each = draw.choice(sequences)
            if each.state is State.WAITING:
                advance(each, Trigger.PAUSE)
            else:
                advance(each, Trigger.RESUME_WAITING)
                queue.push(each)
        waiting = sorted((s for s in sequences if s.state is State.WAITING), key=lambda s: s.order)
        assert drain(queue) == [s.request.request_id for s in waiting]


def test_lanes_have_heads_of_their_own_in_the_order_of_the_line() -> None:
    """Who is passed over keeps the place: of two heads the earlier one comes first, whatever its lane."""
    queue = WaitingQueue(3, lambda each: each.request.request_id % 3)
    sequences = [sequence(request_id, priority=int(request_id == 0)) for request_id in range(7)]
    for each in reversed(sequences):
        queue.push(each)
    assert [head.request.request_id for head in queue.heads()] == [1, 2, 3]
    queue.pop(sequences[2])
    assert [head.request.request_id for head in queue.heads()] == [1, 3, 5]
    advance(sequences[1], Trigger.PAUSE)
    assert [head.request.request_id for head in queue.heads()] == [3, 4, 5]
    assert queue.head() is sequences[3]
    assert drain(queue) == [3, 4, 5, 6, 0]

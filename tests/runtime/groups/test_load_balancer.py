"""Who gets a request: the group with the least agreed load, worked out alike by every rank."""

from __future__ import annotations

import random

from runtime.groups.load_balancer import LoadBalancer, PrefixHomes
from runtime.schedule.plan import Finished
from runtime.schedule.request import FinishReason, Request, SamplingParams
from tests.runtime.engine.rig import request


def of(request_id: int, tokens: int = 5) -> Request:
    return request(request_id, range(tokens))


def ended(*request_ids: int) -> list[Finished]:
    return [Finished(i, FinishReason.LENGTH, ()) for i in request_ids]


def agree(ranks: list[LoadBalancer]) -> None:
    loads = tuple(map(max, zip(*(rank.proposal for rank in ranks), strict=True)))
    for rank in ranks:
        rank.agreed(loads)


def test_arrivals_of_one_step_take_turns_from_the_first_group_on() -> None:
    rank = LoadBalancer(1, 3)
    assert [rank.assign(of(i)) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert rank.requests == [3, 2, 2]


def test_of_groups_with_equally_many_requests_the_one_with_fewer_tokens_comes_first() -> None:
    rank = LoadBalancer(0, 2, prefix_caching=False)
    assert [rank.assign(of(i, tokens)) for i, tokens in enumerate((100, 3, 100, 3))] == [0, 1, 1, 0]
    assert rank.assign(of(4)) == 0, "both have 103 tokens"


def test_what_has_ended_counts_from_the_next_agreement_on() -> None:
    ranks = [LoadBalancer(0, 2), LoadBalancer(1, 2)]
    for i in range(6):
        assert len({rank.assign(of(i)) for rank in ranks}) == 1
    ranks[1].ended(ended(1, 3))
    assert ranks[0].assign(of(6)) == ranks[1].assign(of(6)) == 0, "the first rank does not know yet"
    agree(ranks)
    assert [[rank.assign(of(i)) for i in (7, 8, 9, 10)] for rank in ranks] == [[1, 1, 1, 0]] * 2


def test_ends_of_unknown_requests_change_nothing() -> None:
    rank = LoadBalancer(0, 2)
    rank.assign(of(1))
    before = rank.proposal
    rank.ended(ended(99))
    assert rank.proposal == before
    rank.ended(ended(1, 1))
    assert rank.proposal == (0, 0)


def test_all_answers_of_a_request_are_one_group_s_and_count_as_many() -> None:
    rank = LoadBalancer(0, 2)
    assert rank.assign(request(0, range(5), n=3)) == 0
    assert [rank.assign(of(i)) for i in (3, 4, 5, 6)] == [1, 1, 1, 0], "the last by tokens: five against fifteen"
    assert rank.requests == [4, 3]
    for answer in (0, 1, 2, 6):
        rank.ended(ended(answer))
    assert rank.proposal == (0, 0)


def beginning(request_id: int, alike: int, tokens: int = 300) -> Request:
    """Prompts of the same ``alike`` have 200 tokens in common."""
    own = range(1000 * request_id, 1000 * request_id + tokens - 200)
    return request(request_id, (*range(10_000 * alike, 10_000 * alike + 200), *own))


def test_prompts_that_begin_alike_go_to_one_group_while_the_others_are_not_idle() -> None:
    rank = LoadBalancer(0, 2)
    assert [rank.assign(beginning(i, alike=i % 2)) for i in range(8)] == [0, 1] * 4
    assert [rank.assign(beginning(i, alike=1)) for i in range(8, 12)] == [1, 1, 1, 1]
    assert rank.assign(beginning(12, alike=1)) == 1, "4 more than the other"
    assert rank.assign(beginning(13, alike=1)) == 0, "5 more: the other computes that beginning, too"
    assert rank.assign(beginning(14, alike=1)) == 0, "and has it from then on: of two the less loaded"
    other = LoadBalancer(1, 2, prefix_caching=False)
    assert [other.assign(beginning(i, alike=1)) for i in range(4)] == [0, 1, 0, 1]


def test_the_longest_common_beginning_counts() -> None:
    """A chat goes where it was, not anywhere where its system prompt was."""
    rank = LoadBalancer(0, 3)
    system, chats = range(64), [range(1000 * chat, 1000 * chat + 64) for chat in range(1, 4)]
    first = [rank.assign(request(chat, (*system, *chats[chat]), n=1 + 4 * chat)) for chat in range(3)]
    assert first == [0, 0, 1]
    for chat in range(3):
        rank.ended(ended(*range(chat, chat + 9)))
    rank.agreed((0, 0, 0))
    again = [rank.assign(request(20 + chat, (*system, *chats[chat], 7, 8))) for chat in (2, 1, 0)]
    assert again == [1, 0, 0]


def test_beginnings_that_were_not_seen_for_long_are_forgotten() -> None:
    homes = PrefixHomes(most=4)
    for prompt in range(3):
        homes.remember(range(1000 * prompt, 1000 * prompt + 130), prompt)
    assert homes.find(range(130)) == []
    assert homes.find(range(1000, 1130)) == [(1,), (1,)]
    homes.remember(range(1000, 1064), 5)
    assert homes.find(range(1000, 1130)) == [(1,), (1, 5)]
    assert homes.find(range(1000, 1063)) == [], "too short"


def test_a_load_can_always_be_agreed_on() -> None:
    rank = LoadBalancer(0, 1)
    rank._load = 1 << 70
    assert rank.proposal == ((1 << 63) - 1,)


def test_ranks_never_part_and_loads_never_drift() -> None:
    """A random history on three groups; each rank knows only its own ends. Brute force knows all."""
    draw = random.Random(5)
    ranks = [LoadBalancer(index, 3) for index in range(3)]
    running: list[dict[int, int]] = [{}, {}, {}]
    number = 0
    for _ in range(300):
        for _ in range(draw.randrange(4)):
            one = of(number, draw.randrange(1, 50))
            (group,) = {rank.assign(one) for rank in ranks}
            running[group][number] = len(one.prompt_token_ids)
            number += 1
        for group, rank in enumerate(ranks):
            gone = [i for i in running[group] if draw.random() < 0.2]
            rank.ended(ended(*gone))
            for i in gone:
                del running[group][i]
        agree(ranks)
        sizes = [(len(held), sum(held.values())) for held in running]
        one = of(number, draw.randrange(1, 50))
        number += 1
        (group,) = {rank.assign(one) for rank in ranks}
        assert group == sizes.index(min(sizes))
        running[group][one.request_id] = len(one.prompt_token_ids)


def test_a_beginning_is_remembered_for_its_own_salt() -> None:
    """A group's cache has nothing for another user, and its load would say who has asked what."""
    rank = LoadBalancer(0, 3)
    prompt = range(100)
    salted = [SamplingParams(seed=1, cache_salt=salt) for salt in ("a", "b", "", "a", "b", "")]
    homes = [rank.assign(Request(i, tuple(prompt), sampling)) for i, sampling in enumerate(salted)]
    assert homes == [0, 1, 2, 0, 1, 2]

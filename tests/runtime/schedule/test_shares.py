"""Who gets the prompt tokens of a step: half for the first in line, the rest for whoever needs least."""

from __future__ import annotations

import random

import pytest

from runtime.schedule.request import Request
from runtime.schedule.sequence import SequenceState
from runtime.schedule.shares import cost, gets_a_share, remaining, share_out, whole_waves
from tests.runtime.schedule.driver import prompt_of


def prefilling(arrival: int, prompt: int, done: int = 0, priority: int = 0) -> SequenceState:
    sequence = SequenceState(Request(arrival, prompt_of(prompt), priority=priority), arrival, prompt + 9)
    sequence.prefilled, sequence.prefill_target = done, prompt
    return sequence


def shares(prefills: list[SequenceState], tokens: int, costly_prefix: int = 0) -> dict[int, int]:
    return {s.request.request_id: n for s, n in share_out(prefills, tokens, costly_prefix).items()}


def test_nobody_gets_nothing_and_nothing_is_nobodys() -> None:
    assert share_out([], 10) == {}
    assert share_out([prefilling(0, 5)], 0) == {}


def test_one_alone_gets_all_it_needs() -> None:
    assert shares([prefilling(0, 30)], 8) == {0: 8}
    assert shares([prefilling(0, 30, done=24)], 8) == {0: 6}


@pytest.mark.parametrize("tokens", [1, 7, 8])
def test_the_first_in_line_gets_half_whatever_comes_after_it(tokens: int) -> None:
    prefills = [prefilling(i, 4) for i in range(1, 9)] + [prefilling(0, 100)]
    assert shares(prefills, tokens)[0] == -(-tokens // 2)


def test_the_first_in_line_is_who_has_priority() -> None:
    """It gets the rest, too, before shorter ones that can wait."""
    prefills = [prefilling(0, 80), prefilling(1, 90, priority=-1), prefilling(2, 70)]
    assert shares(prefills, 20) == {1: 20}
    assert shares(prefills, 120) == {1: 90, 2: 30}


def test_the_other_half_goes_to_the_shortest_first() -> None:
    prefills = [prefilling(0, 100), prefilling(1, 50), prefilling(2, 3), prefilling(3, 60, done=58), prefilling(4, 20)]
    assert shares(prefills, 20) == {0: 10, 3: 2, 2: 3, 4: 5}
    assert shares(prefills, 36) == {0: 18, 3: 2, 2: 3, 4: 13}


def test_what_the_others_do_not_need_comes_back_to_the_first() -> None:
    assert shares([prefilling(0, 100), prefilling(1, 3)], 20) == {0: 17, 1: 3}


def test_equal_prompts_are_served_one_after_the_other() -> None:
    """Half done each, both would wait twice as long as the first has to."""
    prefills = [prefilling(0, 100), prefilling(1, 100), prefilling(2, 100)]
    assert shares(prefills, 30) == {0: 30}


def test_tokens_behind_a_long_prefix_count_more() -> None:
    assert shares([prefilling(0, 1000, done=100)], 30, costly_prefix=100) == {0: 15}
    assert shares([prefilling(0, 1000, done=900)], 3, costly_prefix=100) == {0: 1}, "the first always advances"
    prefills = [prefilling(0, 1000, done=100), prefilling(1, 8)]
    assert shares(prefills, 30, costly_prefix=100) == {0: 7 + 4, 1: 8}


def test_any_shares_keep_the_rule() -> None:
    draw = random.Random(5)
    for _ in range(3000):
        count = draw.randrange(1, 7)
        prefills = []
        for arrival in draw.sample(range(20), count):
            prompt = draw.choice((3, 10, 60))
            prefills.append(prefilling(arrival, prompt, done=draw.randrange(prompt), priority=draw.choice((0, 0, 1))))
        tokens = draw.randrange(1, 80)
        given = share_out(prefills, tokens)
        wanted = sum(map(remaining, prefills))
        first = min(prefills, key=lambda s: s.order)
        assert sum(given.values()) == min(tokens, wanted)
        assert given[first] >= min(remaining(first), -(-tokens // 2))
        for sequence in prefills:
            got = given.get(sequence, 0)
            assert 0 <= got <= remaining(sequence)
            if sequence is not first and got < remaining(sequence):
                need = (sequence.request.priority, remaining(sequence))
                later = [s for s in prefills if (s.request.priority, remaining(s)) > need and s is not first]
                assert not any(given.get(s) for s in later), "nobody with a lesser claim was served before it"


@pytest.mark.parametrize("costly_prefix", [0, 20])
def test_who_gets_a_share_is_who_would_get_tokens_if_seated(costly_prefix: int) -> None:
    draw = random.Random(6)
    seen = set()
    for _ in range(3000):
        prefills = []
        arrivals = draw.sample(range(20), draw.randrange(1, 6))
        for arrival in arrivals[1:]:
            prompt = draw.choice((3, 10, 60))
            prefills.append(prefilling(arrival, prompt, done=draw.randrange(prompt)))
        candidate = prefilling(arrivals[0], draw.choice((2, 10, 50)))
        tokens = draw.randrange(0, 60)
        answer = gets_a_share(candidate, prefills, tokens, costly_prefix)
        assert answer == (candidate in share_out([*prefills, candidate], tokens, costly_prefix))
        seen.add(answer)
    assert seen == {False, True}


def test_what_tokens_cost() -> None:
    assert cost(prefilling(0, 50, done=10), 6, 0) == 6
    assert cost(prefilling(0, 50, done=10), 6, 20) == 9
    assert cost(prefilling(0, 50, done=1), 1, 20) == 2, "rounded up"


# ---- waves of attention ----


def in_waves(had: dict[int, tuple[int, int]], tokens: int = 10_000, tile: int = 128, wave: int = 4) -> dict[int, int]:
    """``had``: by arrival, the share of each long chunk and what is left of its prompt."""
    long = {prefilling(i, 9000 + left, done=9000): share for i, (share, left) in had.items()}
    return {s.request.request_id: n for s, n in whole_waves(long, [*long], tile, wave, tokens).items()}


@pytest.mark.parametrize(
    ("had", "given"),
    [
        (383, 383),  # not worth a wave
        (384, 512),
        (512, 512),
        (740, 512),
        (895, 512),
        (896, 1024),
        (1400, 1024),
        (1408, 1536),
    ],
)
def test_a_long_chunk_fills_waves(had: int, given: int) -> None:
    assert in_waves({0: (had, 5000)}) == {0: given}


def test_a_wave_ends_with_the_prompt_and_with_the_tokens_there_are() -> None:
    assert in_waves({0: (400, 430)}) == {0: 430}
    assert in_waves({0: (900, 5000)}, tokens=1000) == {0: 1000}


def test_several_chunks_fill_a_wave_in_whole_tiles() -> None:
    """First in line first; two of 370 tokens are six tiles, of which four fit."""
    assert in_waves({0: (370, 5000), 1: (370, 5000)}) == {0: 384, 1: 128}
    assert in_waves({1: (370, 5000), 0: (370, 5000)}) == {0: 384, 1: 128}
    assert in_waves({0: (512, 5000), 1: (100, 100)}) == {0: 512}
    assert in_waves({0: (100, 100), 1: (400, 5000)}) == {0: 100, 1: 384}


def test_chunks_of_others_keep_what_they_had() -> None:
    long, short = prefilling(0, 20_000, done=9000), prefilling(1, 300)
    assert whole_waves({long: 740, short: 300}, [long], 128, 4, 2000) == {long: 512, short: 300}


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 20))])
def test_whole_waves_of_any_chunks(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(80):
        tile, wave = draw.choice(((1, 1), (2, 3), (4, 2), (8, 8), (128, 4)))
        most = draw.choice((3, tile * wave, 5 * tile * wave))
        had = {prefilling(i, 5000 + draw.randrange(1, 2 * most + 1), done=5000): 0 for i in range(draw.randrange(1, 5))}
        shares = {s: draw.randrange(1, min(most, remaining(s)) + 1) for s in had}
        long = draw.sample([*shares], draw.randrange(len(shares) + 1))
        room = sum(shares.values()) + draw.choice((0, 0, 3, tile * wave))
        given = whole_waves(shares, long, tile, wave, room)
        assert sum(given.values()) <= room
        assert all(0 < given[s] <= remaining(s) for s in given)
        assert all(given[s] == share for s, share in shares.items() if s not in long)
        if not long:
            continue
        before, after = sum(shares[s] for s in long), sum(given.get(s, 0) for s in long)
        tiles = sum(-(-given.get(s, 0) // tile) for s in long)
        first = min(long, key=lambda s: s.order)
        if 4 * before < 3 * tile * wave:
            assert given == shares
            continue
        assert 4 * (after - before) <= tile * wave
        assert tiles <= wave * ((before + tile * wave // 4) // (tile * wave))
        assert given[first] >= min(shares[first], tile * wave)
        if tiles % wave:  # no prompt goes on, or no token is left
            assert sum(given.values()) == room or all(given.get(s) == remaining(s) for s in long)

"""Lives drawn from a seed: who comes when, what is done to them, and how little room they meet.

Knows: the ranges of everything that is drawn. Does not know: what must come out (test_lives.py).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.engine import Engine
from runtime.schedule.request import FinishReason, Request
from tests.runtime.engine.lives import prompt
from tests.runtime.engine.rig import request
from tests.runtime.engine.test_depths import mixture

LAST_ARRIVAL = 40


@dataclass
class RandomLife:
    """``later`` and ``events`` by turn; ``cut``: requests that somebody ends, as ``cut_as``; ``limits``: the rig's."""

    first: list[Request]
    later: dict[int, list[Request]] = field(default_factory=dict)
    events: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)
    cut_as: FinishReason = FinishReason.CANCELLED
    limits: dict[str, Any] = field(default_factory=dict)

    @property
    def requests(self) -> list[Request]:
        return [*self.first, *(one for arriving in self.later.values() for one in arriving)]

    def act(self, engine: Engine, turn: int) -> None:
        for verb, request_id in self.events.get(turn, ()):
            if verb == "cancel":
                engine.cancel(request_id, self.cut_as)
            else:
                getattr(engine, verb)(request_id)

    def with_windows(self, sooner: int, tokens: int) -> RandomLife:
        """Answers are over sooner, and so others arrive in a turn ``sooner`` times as early; each row reserves blocks
        for up to ``tokens`` more."""
        later: dict[int, list[Request]] = {}
        for turn, arriving in self.later.items():
            later.setdefault(1 + turn // sooner, []).extend(arriving)
        room = 2 * self.limits["blocks"] + tokens // self.limits["block_size"]
        return replace(self, later=later, limits=self.limits | {"blocks": room})

    def over(self, vocabulary: int) -> RandomLife:
        """With ids of a small vocabulary, of which a request stops at one at most: at eight it would end at once."""

        def within(one: Request) -> Request:
            top_k = min(one.sampling.top_k, vocabulary // 2)
            return replace(
                one,
                prompt_token_ids=tuple(token % vocabulary for token in one.prompt_token_ids),
                stop_token_ids=tuple(token % vocabulary for token in one.stop_token_ids[:1]),
                sampling=replace(one.sampling, top_k=top_k),
            )

        later = {turn: [within(one) for one in arriving] for turn, arriving in self.later.items()}
        return replace(self, first=[within(one) for one in self.first], later=later)


def random_life(seed: int) -> RandomLife:
    draw = random.Random(seed)
    lasting = request(1000, prompt(5, seed), max_tokens=LAST_ARRIVAL + 10, stops=())  # somebody is there all the time
    life = RandomLife([lasting])
    for one in mixture(1000 + seed, count=draw.randrange(4, 14)):
        if draw.random() < 0.3:
            one = replace(one, sampling=replace(one.sampling, prompt_logprobs=draw.choice((0, 2))))
        i, turn = one.request_id, draw.choice((0, draw.randrange(LAST_ARRIVAL)))
        (life.later.setdefault(turn, []) if turn else life.first).append(one)
        if draw.random() < 0.3:
            begin = turn + draw.randrange(12)
            life.events.setdefault(begin, []).append(("pause", i))
            life.events.setdefault(begin + draw.randrange(1, 25), []).append(("resume", i))
        if draw.random() < 0.2:
            life.events.setdefault(turn + draw.randrange(16), []).append(("cancel", i))
            life.cut.add(i)
    rows, size = draw.choice((2, 4, 8)), draw.choice((4, 8, 16))
    least = -(-132 // size)  # one request of the full length
    life.limits = {
        "rows": rows,
        "buckets": draw.choice((None, tuple(bucket for bucket in (1, 2, 4, 8) if bucket <= rows))),
        "block_size": size,
        "blocks": draw.choice((least + 1, 2 * least, 200)),
        "max_prefill_tokens": draw.choice((8, 24, 64)),
        "prefill_burst": draw.choice((1, 2, 4)),
        "prefix_caching": draw.random() < 0.7,
        "horizon": draw.choice((0, 3)),
    }
    return life

"""What the deterministic mode promises, as a comparison: tokens and the bits of log-probabilities, in two engines.

Knows: random requests of every kind, the conditions that must not matter, how two runs differ. Does not know: kernels,
or what an engine runs on (test_deterministic.py on the CPU twin, tests/gpu/test_deterministic_gpu.py on a GPU).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.engine import Engine
from runtime.execute.result_reader import StepLogprobs
from runtime.schedule.plan import StepOutput
from runtime.schedule.request import Request
from tests.runtime.engine.rig import MIXED, run
from tests.runtime.engine.test_depths import mixture

Limits = dict[str, Any]  # of a rig
OpenRig = Callable[..., AbstractContextManager[Engine]]

# The plainest engine: one request after the other, serially, prompts whole, nothing to find, room for everything.
PLAIN: Limits = {
    "depth": 0,
    "rows": 1,
    "max_prefill_tokens": 128,
    "prefix_caching": False,
    "mixed": None,
    "blocks": 200,
}
# What else may be so, and which counter shows that it was. 18 blocks: one request of the greatest length, or a few.
CONDITIONS: tuple[tuple[str, Limits, str], ...] = (
    ("a full batch", {"depth": 0, "rows": 8, "mixed": None}, "steps"),
    ("7 rows, depth 1", {"depth": 1, "rows": 7, "buckets": (1, 2, 7)}, "chained_steps"),
    ("depth 2, mixed steps", {"depth": 2, "rows": 8, "mixed": MIXED}, "mixed_steps"),
    ("depth 3, chunks of 16", {"depth": 3, "rows": 4, "max_prefill_tokens": 16, "mixed": None}, "chained_steps"),
    ("depth 4, evictions", {"depth": 4, "rows": 8, "blocks": 18}, "evictions"),
    ("no prefix cache", {"depth": 2, "rows": 5, "prefix_caching": False, "max_prefill_tokens": 40}, "chained_steps"),
)


def questions(seed: int, count: int = 6, *, longest: int = 30) -> list[Request]:
    """Requests of test_depths.mixture, all with log-probabilities; every other is long, half of those greedy."""
    draw = random.Random(f"same bits {seed}")
    asked = []
    for one in mixture(seed, count):
        sampling = replace(one.sampling, logprobs=3)
        if one.request_id % 2 == 0:
            greedy = 0.0 if one.request_id % 4 == 0 else 0.8
            sampling = replace(sampling, temperature=greedy, max_tokens=draw.randrange(longest // 2, longest))
            one = replace(one, stop_token_ids=())
        asked.append(replace(one, sampling=sampling))
    return asked


@dataclass
class Answers:
    """By request: ``tokens``, and of each the ``bits`` of what StepLogprobs said of it and of the best ``top``."""

    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    bits: dict[int, list[bytes]] = field(default_factory=dict)
    top: int = 3

    def watch(self, output: StepOutput) -> None:
        """Of a step: takes what it brought."""
        if not isinstance(values := output.logprobs, StepLogprobs):
            return
        for row, (request_id, count) in enumerate(zip(output.request_ids, output.counts, strict=True)):
            for place in range(count):
                likeliest = values.top_ids_BWN[:, :, : self.top], values.top_BWN[:, :, : self.top]
                said = (values.chosen_BW, values.rank_BW, *likeliest)
                entry = b"".join(part[row, place].tobytes() for part in said)
                self.bits.setdefault(request_id, []).append(entry)


def answers(engine: Engine, requests: Iterable[Request], most_turns: int = 3000, top: int = 3) -> Answers:
    """Of ``requests`` in one engine, all at once."""
    found = Answers(top=top)
    ended = run(engine, requests, watch=found.watch, most_turns=most_turns)
    found.tokens = {request_id: one.token_ids for request_id, one in ended.items()}
    for request_id, tokens in found.tokens.items():
        assert len(found.bits[request_id]) == len(tokens), f"log-probabilities of {request_id} are missing"
    return found


def plainly(open_rig: OpenRig, requests: Iterable[Request], **limits: Any) -> Answers:
    """One request after the other in the plainest engine."""
    with open_rig(**(PLAIN | limits)) as engine:
        every = [answers(engine, [one]) for one in requests]
    joined = Answers()
    for one in every:
        joined.tokens |= one.tokens
        joined.bits |= one.bits
    return joined


@dataclass(frozen=True, slots=True)
class Difference:
    """``compared``: tokens up to each request's first other token, it included, over all requests. ``flips``: requests
    with another token. ``bits``: compared tokens whose log-probabilities have other bits.
    """

    compared: int
    flips: int
    bits: int


def difference(found: Answers, expected: Answers) -> Difference:
    """Behind another token everything is another text, so nothing is compared there."""
    assert found.tokens.keys() == expected.tokens.keys()
    compared = flips = bits = 0
    for request_id, wanted in expected.tokens.items():
        mine = found.tokens[request_id]
        pairs = list(zip(mine, wanted, found.bits[request_id], expected.bits[request_id], strict=False))
        same = next((place for place, pair in enumerate(pairs) if pair[0] != pair[1]), len(pairs))
        flips += mine != wanted
        compared += min(same + 1, len(pairs))
        bits += sum(pair[2] != pair[3] for pair in pairs[: same + 1])
    return Difference(compared, flips, bits)

"""Lives drawn from a seed, over hybrid models in two groups: each group has its own, and the experts are everybody's.

Who comes when and what is done to them is random_lives.py's: requests are cancelled, wait, give way and are recomputed
in both groups, whatever the other one is at. Everybody is greedy, and gets the tokens of the serial engine; in the end
no group holds anything any more. What belongs to nobody is NaN throughout.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, product

import pytest

from runtime.engine import Engine
from runtime.schedule.config import SnapshotPolicy
from runtime.schedule.request import FinishReason, Request
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculative_config import speculative_config
from tests.runtime.engine.conftest import long
from tests.runtime.engine.lives import Act
from tests.runtime.engine.random_lives import RandomLife, random_life
from tests.runtime.engine.rig import RigLimits
from tests.runtime.engine.serial_answers import serial_answers
from tests.runtime.engine.settings import of_model
from tests.runtime.engine.test_depths import outcome
from tests.runtime.engine.test_groups import Lives
from tests.runtime.engine.test_hybrid import on_banks
from tests.runtime.engine.test_poison import fill_with_nan, idle_blocks
from tests.runtime.speculate.recorded import VOCABULARY

FAMILIES = ("qwen3-next", "qwen3.5-moe", "nemotron-h")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
WIDTH, LONGEST = 4, 104
SECOND = 500  # ids of the second group's requests begin there


def greedy(drawn: RandomLife, first_id: int) -> RandomLife:
    """The same life of other ids, of requests that draw nothing, over few token ids."""
    drawn = drawn.over(VOCABULARY)

    def one(request: Request) -> Request:
        sampling = replace(request.sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        return replace(request, request_id=first_id + request.request_id, sampling=sampling)

    return replace(
        drawn,
        first=[*map(one, drawn.first)],
        later={turn: [*map(one, arriving)] for turn, arriving in drawn.later.items()},
        events={turn: [(verb, first_id + i) for verb, i in events] for turn, events in drawn.events.items()},
        cut={first_id + i for i in drawn.cut},
    )


def act_of(drawn: RandomLife) -> Act:
    """What is done to a group, and NaN in all state and blocks that nobody has."""

    def act(engine: Engine, turn: int) -> None:
        drawn.act(engine, turn)
        on_banks(engine, [0, *engine.scheduler.slots._free], float("nan"))
        fill_with_nan(engine, idle_blocks(engine))

    return act


def how(kind: str, depth: int, size: int) -> RigLimits:
    """Of both groups, with little room: a token a row and step, windows, or prefixes that are continued."""
    room = LONGEST // size + 2
    limits: RigLimits = {
        "depth": depth, "shape": {}, "rows": 4, "buckets": (1, 2, 4), "block_size": size, "blocks": room,
        "max_model_len": LONGEST, "max_prefill_tokens": 24, "prefix_caching": False,
    }  # fmt: skip
    if kind == "windows":
        proposer, more = proposer_for(speculative_config(NGRAM)), WIDTH * (depth + 1) // size
        limits |= {"proposer": proposer, "speculation": Speculation(WIDTH, mixed_percent=50), "blocks": room + more}
    if kind == "snapshots":
        limits |= {"prefix_caching": True, "snapshots": SnapshotPolicy(6, 2, 1)}
    return limits


OFTEN = (("nemotron-h", "snapshots", (6, 4)),)


@pytest.mark.parametrize(
    ("family", "kind", "drawn_at"),
    [
        case if case in OFTEN else long(*case)
        for case in product(FAMILIES, ("plain", "windows", "snapshots"), [(12, 2), (8, 1), (6, 4)])
    ],
    ids=str,
)
def test_random_lives_of_two_groups(
    family: str, kind: str, drawn_at: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both groups somebody waits and somebody is cancelled, and in one or both somebody gives way."""
    of_model(family, monkeypatch)
    seed, depth = drawn_at
    drawn = [greedy(random_life(seed), 0), greedy(random_life(100 + seed), SECOND)]
    arrivals = [{0: life.first, **life.later} for life in drawn]
    lives = Lives(arrivals, [*map(act_of, drawn)], **how(kind, depth, drawn[0].limits["block_size"]))
    expected = serial_answers([*chain.from_iterable(life.requests for life in drawn)], exact=True)
    found = outcome(lives.finished)
    cut = {i: end for i, end in found.items() if end[1] is FinishReason.CANCELLED}
    assert found == expected | {i: (expected[i][0][: len(tokens)], reason) for i, (tokens, reason) in cut.items()}
    assert all(cut.keys() & life.cut for life in drawn)
    assert cut.keys() <= drawn[0].cut | drawn[1].cut
    assert lives.rows[0] == lives.rows[1], "the same exchanges on every group"
    assert all(min(counters["pauses"], counters["ghost_rows"]) > 0 for counters in lives.counters)
    assert sum(counters["evictions"] for counters in lives.counters) > 0
    for counted in {"windows": ["spec_num_drafts"], "snapshots": ["snapshot_restores"]}.get(kind, []):
        assert all(counters[counted] > 0 for counters in lives.counters)

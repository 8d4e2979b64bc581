"""What the serial engine answers, computed once a process: cases that differ in nothing but depth share it.

Knows: what an answer depends on: the rig's model, the requests, and the limits that are given. Does not know: what a
test compares it with. A test that changes code asks before it does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from runtime.schedule.request import FinishReason, Request
from tests.runtime.engine import rig as rigs
from tests.runtime.engine.exact_kernels import exact_kernels

Answers = dict[int, tuple[tuple[int, ...], FinishReason]]

_answers: dict[tuple[str, bool, tuple[Request, ...], tuple[tuple[str, Any], ...]], Answers] = {}


def serial_answers(
    requests: Sequence[Request], *, shape: Mapping[str, object] | None = None, exact: bool = False, **limits: Any
) -> Answers:
    """Tokens and reason of each request at depth 0. ``exact``: in float64, by exact kernels; ``limits``: of the rig."""
    model = json.dumps({**rigs.TINY, **(shape or {})}, sort_keys=True)
    key = model, exact, tuple(requests), tuple(sorted(limits.items()))
    if key not in _answers:
        how: dict[str, Any] = {"kernels": exact_kernels(), "dtype": torch.float64} if exact else {}
        with rigs.rig(depth=0, shape=shape, **how, **limits) as engine:
            finished = rigs.run(engine, requests)
            assert engine.counters["chained_steps"] == 0
        _answers[key] = {request_id: (ended.token_ids, ended.reason) for request_id, ended in finished.items()}
    return _answers[key]

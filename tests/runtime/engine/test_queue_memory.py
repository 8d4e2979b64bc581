"""A prompt that waits is held once a rank, as packed ints: through the client and its engine, and on a follower."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

from tests.runtime.engine.queue_memory import fill_follower, fill_leader, open_follower, open_leader

PROMPTS = 100
TOKENS = 8192
MOST_BYTES = 5.0  # a token, of all that is held: its four, and what a request needs besides


def _bytes_a_token(fill: Callable[[], None]) -> float:
    gc.collect()
    tracemalloc.start()
    try:
        fill()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / (PROMPTS * TOKENS)
    finally:
        tracemalloc.stop()


def test_the_leader_holds_a_waiting_prompt_once() -> None:
    with open_leader(TOKENS, PROMPTS) as client:
        held = _bytes_a_token(lambda: fill_leader(client, PROMPTS, TOKENS))
    assert 4.0 < held <= MOST_BYTES


def test_a_follower_holds_a_waiting_prompt_once() -> None:
    scheduler = open_follower(TOKENS)
    assert 4.0 < _bytes_a_token(lambda: fill_follower(scheduler, PROMPTS, TOKENS)) <= MOST_BYTES

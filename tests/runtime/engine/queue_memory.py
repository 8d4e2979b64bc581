"""What a rank holds of prompts that wait: through the front door on the leader, out of decoded records on a follower.

Knows: the real client, engine, codec and scheduler, over the tiny model. Does not know: texts; whoever gives a prompt
as a text holds that, too.

    python -m tests.runtime.engine.queue_memory [--rank leader|follower] [--prompts 10000] [--tokens 8192]

It prints resident memory before and after, of this process and for each token.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.frontend.client import EngineClient, PromptRequest
from runtime.replicate.event_codec import decode_events, encode_events
from runtime.schedule.config import SchedulerConfig, StepLimits
from runtime.schedule.plan import Admit
from runtime.schedule.request import Request, SamplingParams
from runtime.schedule.scheduler import Scheduler
from tests.runtime.engine.rig import VOCABULARY, rig

_TEXT = array("i", random.Random(1).choices(range(3, VOCABULARY), k=99_991))


def prompt(tokens: int, seed: int) -> array[int]:
    """Unlike the others around it, in memory of its own."""
    begin = 13 * seed % len(_TEXT)
    return (_TEXT[begin:] + _TEXT * (tokens // len(_TEXT) + 1))[:tokens]


@contextmanager
def open_leader(tokens: int, prompts: int) -> Iterator[EngineClient]:
    """A client whose engine has one row, taken by an answer that lasts until all ``prompts`` are announced (one a turn,
    of so many tokens), and no limit to who may queue."""
    turns = prompts + 500
    longest = max(tokens, turns) + 64
    with rig(
        rows=1,
        blocks=longest // 64 + 8,
        block_size=64,
        max_model_len=longest,
        max_prefill_tokens=1024,
        shape={"max_position_embeddings": longest, "num_hidden_layers": 1},
    ) as engine:
        client = EngineClient(engine, text=False, concurrency=prompts + 1)
        client.submit(PromptRequest([5, 6, 7], SamplingParams(max_tokens=turns, ignore_eos=True), priority=-1))
        client.turn()
        yield client
        client.cancel_all()
        while client.live:
            client.turn()
        client.drain()


def fill_leader(client: EngineClient, prompts: int, tokens: int, *, ahead: int = 64) -> None:
    """Until all wait in the engine's scheduler, none in the client or in the engine's outbox."""
    scheduler = client.engine.scheduler  # type: ignore[attr-defined]  # the rig's engine is the real one
    for seed in range(prompts):
        client.submit(PromptRequest(prompt(tokens, seed), SamplingParams(max_tokens=16)))
        while seed + 1 - scheduler.waiting > ahead:
            client.turn()
    while scheduler.waiting < prompts:
        client.turn()
        assert client.live > prompts, "the answer that keeps the others waiting has ended"


def open_follower(tokens: int) -> Scheduler:
    return Scheduler(
        SchedulerConfig(StepLimits(rows=1, slots=2, block_size=64, max_model_len=tokens + 64), blocks=1000)
    )


def fill_follower(scheduler: Scheduler, prompts: int, tokens: int) -> None:
    """As records come: bytes, of which nothing is kept."""
    for seed in range(prompts):
        arrival = Admit(Request(seed, prompt(tokens, seed), SamplingParams(max_tokens=16, seed=seed)))
        (event,) = decode_events(encode_events([arrival]))
        assert not scheduler.submit(event)
    assert scheduler.waiting == prompts


def _resident_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rank", choices=("leader", "follower"), default="leader")
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    prompts, tokens = options.prompts, options.tokens

    def report(before: int, seconds: float) -> None:
        gc.collect()
        held = _resident_bytes() - before
        print(
            f"{options.rank}: {prompts} prompts of {tokens} tokens: {before / 1e6:.0f} MB before, {held / 1e6:.0f} MB "
            f"more, {held / prompts / tokens:.2f} bytes a token, {seconds:.0f} s of processor time",
            flush=True,
        )

    began = time.process_time()
    if options.rank == "leader":
        with open_leader(tokens, prompts) as client:
            before = _resident_bytes()
            fill_leader(client, prompts, tokens)
            report(before, time.process_time() - began)
    else:
        scheduler, before = open_follower(tokens), _resident_bytes()
        fill_follower(scheduler, prompts, tokens)
        report(before, time.process_time() - began)


if __name__ == "__main__":
    main()

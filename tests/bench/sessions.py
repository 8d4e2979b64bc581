"""What sessions cost: a second turn, quanta of several lengths, batched steps, and whether the chain holds meanwhile.

    python3 -m tests.bench.sessions --model models/shapes/qwen3-8b --load-format dummy --out out/sessions.json
    python3 -m tests.bench.sessions --model models/demo --device cpu --prompt 400 --tokens 64

Knows: the desk of a daemon in this process, without sockets, and the time of every frame. Does not know: clients'
processes; what a socket adds is microseconds a frame.

turn 2: milliseconds from the line to the first token, with EXTEND, as a new request whose prefix is cached, and as one
of which nothing is. quanta: a session by quanta of 1, 8 and 64 tokens, drained and continued by its client, against one
quantum; what a quantum adds, in milliseconds and in decode steps. batches: milliseconds a step and tokens/s a session
of 2 and 16 sessions in one drain. chain: breaks while others are drained and one session is parked and continued.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from launch.complete import open_engine
from runtime.config import EngineConfig
from runtime.daemon.desk import Desk
from runtime.daemon.frames import FrameReader, Kind
from runtime.daemon.session import Connection
from runtime.engine import Engine

QUANTA = (1, 8, 64)
BATCHES = (2, 16)


class Client:
    """A tagged connection, and when each of its frames came."""

    def __init__(self, engine: Engine, desk: Desk) -> None:
        self.engine, self.desk = engine, desk
        self.connection = Connection(tagged=True, soft=1 << 28, hard=1 << 30)
        desk.connect(self.connection)
        self._reader = FrameReader()
        self._next = 0
        self.gained: dict[int, int] = {}
        self.first_at: dict[int, float] = {}
        self.parked: list[int] = []
        self.over: set[int] = set()

    def start(self, prompt: list[int], total: int, quantum: int, **options: object) -> int:
        self._next += 1
        words = " ".join(f"{name}={value}" for name, value in options.items())
        self.say(f"REQ {self._next} START {prompt} {total} {quantum} temperature=0 ignore_eos=1 {words}")
        return self._next

    def say(self, line: str) -> None:
        self.desk.line(self.connection, line)
        self.read()

    def read(self) -> None:
        now = time.perf_counter()
        data = bytes(self.connection.unread)
        self.connection.unread.clear()
        for frame in self._reader.frames(data):
            if frame.kind is Kind.TOKEN:
                self.first_at.setdefault(frame.request, now)
                self.gained[frame.request] = self.gained.get(frame.request, 0) + len(frame.tokens)
            elif frame.kind is Kind.QUANTUM_DONE:
                self.parked.append(frame.request)
            elif frame.kind in (Kind.DONE, Kind.CLOSED):
                self.over.add(frame.request)
            elif frame.kind is Kind.ERROR:
                raise RuntimeError(frame.text)

    def turn(self) -> None:
        self.desk.grant()
        self.desk.output(self.engine.step())
        self.read()

    def run_until_idle(self, each: Callable[[], object] = lambda: None) -> float:
        """Seconds until nothing goes on by itself; ``each`` is called after every turn."""
        began = time.perf_counter()
        self.desk.grant()
        while self.engine.has_work:
            self.turn()
            each()
            self.desk.grant()
        return time.perf_counter() - began

    def close_all(self) -> None:
        for request in list(self.connection.sessions):
            self.say(f"CANCEL {request}")
        self.run_until_idle()


def turn_2(client: Client, draw: random.Random, prompt: int, said: int, repeats: int) -> dict[str, float]:
    vocabulary = client.engine.model_config.vocab_size
    times: dict[str, list[float]] = {"extend_ms": [], "prefix_cached_ms": [], "nothing_cached_ms": []}

    def ids(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(count)]

    def first_token(line: Callable[[], int | None], session: int = 0) -> float:
        client.first_at.pop(session, None)
        began = time.perf_counter()
        request = line() or session
        client.run_until_idle()
        return 1e3 * (client.first_at[request] - began)

    for _ in range(repeats + 1):  # the first is for warmth
        known, more = ids(prompt), ids(said)
        session = client.start(known, 1, 1, keep=1)
        client.run_until_idle()
        line = f"REQ {session} EXTEND {more} 1 1"
        times["extend_ms"].append(first_token(partial(client.say, line), session))
        whole, fresh = [*known, *more], ids(len(known) + len(more))
        times["prefix_cached_ms"].append(first_token(partial(client.start, whole, 1, 1)))
        times["nothing_cached_ms"].append(first_token(partial(client.start, fresh, 1, 1)))
        client.close_all()
    return {name: round(statistics.median(found[1:]), 3) for name, found in times.items()}


def quanta(client: Client, draw: random.Random, tokens: int, repeats: int) -> list[dict[str, float]]:
    """``tokens`` by one session, in quanta; the prompt is a few tokens."""
    engine = client.engine
    vocabulary = engine.model_config.vocab_size

    def run(quantum: int, *, drained: bool) -> tuple[float, int]:
        session = client.start([draw.randrange(vocabulary) for _ in range(8)], tokens, quantum)
        steps = engine.counters["steps"]
        if drained:
            client.say("SCHED_DRAIN")
        client.parked.clear()

        def go_on() -> None:
            if client.parked and not drained:
                client.parked.clear()
                client.say(f"REQ {session} CONTINUE {quantum}")

        seconds = client.run_until_idle(go_on)
        assert client.gained[session] == tokens
        return seconds, int(engine.counters["steps"] - steps)

    def median(quantum: int, *, drained: bool) -> tuple[float, float]:
        found = [run(quantum, drained=drained) for _ in range(repeats + 1)][1:]
        return statistics.median(s for s, _ in found), statistics.median(n for _, n in found)

    whole, _ = median(tokens, drained=False)
    step_ms = 1e3 * whole / tokens
    rows = []
    for quantum in QUANTA:
        row: dict[str, float] = {"quantum": quantum, "step_ms": round(step_ms, 4)}
        for name, drained in (("drain", True), ("client", False)):
            seconds, steps = median(quantum, drained=drained)
            added = 1e3 * (seconds - whole) / max(1, -(-tokens // quantum) - 1)
            row |= {f"{name}_added_ms": round(added, 4), f"{name}_added_steps": round(added / step_ms, 2)}
            row[f"{name}_steps"] = steps
        rows.append(row)
    return rows


def batches(client: Client, draw: random.Random, tokens: int) -> list[dict[str, float]]:
    rows = []
    vocabulary = client.engine.model_config.vocab_size
    for sessions in BATCHES:
        for _ in range(2):  # the first is for warmth
            for number in range(sessions):  # whatever their positions
                client.start([draw.randrange(vocabulary) for _ in range(8 + 16 * number)], tokens, 16)
            client.run_until_idle()
            before = dict(client.engine.counters)
            client.say("SCHED_DRAIN")
            seconds = client.run_until_idle()
        counters = client.engine.counters
        steps = counters["steps"] - before["steps"]
        rows.append(
            {
                "sessions": sessions,
                "step_ms": round(1e3 * seconds / steps, 3),
                "tokens_per_s_of_each": round((tokens - 16) / seconds, 1),
                "chained_share": round((counters["chained_steps"] - before["chained_steps"]) / steps, 4),
            }
        )
    return rows


def chain(client: Client, draw: random.Random, tokens: int) -> dict[str, Any]:
    """Three sessions run to their ends; a fourth is continued by its client, 4 tokens at a time."""
    vocabulary = client.engine.model_config.vocab_size
    for _ in range(3):
        client.start([draw.randrange(vocabulary) for _ in range(8)], tokens, tokens)
    parking = client.start([draw.randrange(vocabulary) for _ in range(8)], tokens // 2, 4)
    before = dict(client.engine.counters)
    client.parked.clear()

    def go_on() -> None:
        if parking in client.parked:
            client.parked.clear()
            client.say(f"REQ {parking} CONTINUE 4")

    client.run_until_idle(go_on)
    counters = client.engine.counters
    of_chain = [name for name in counters if name.startswith("chain_breaks")]
    breaks = {name: counters[name] - before.get(name, 0) for name in of_chain if counters[name] != before.get(name, 0)}
    return {
        "steps": counters["steps"] - before["steps"],
        "chain_breaks": breaks,
        "continues": counters["session_continues"] - before["session_continues"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="safetensors")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens known before turn 2")
    parser.add_argument("--said", type=int, default=64, help="tokens of turn 2")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    longest = max(given.prompt + given.said, 16 * max(BATCHES) + given.tokens) + 64
    options: dict[str, Any] = {"device": given.device, "load_format": given.load_format}
    config = EngineConfig(model=given.model, max_model_len=longest, max_num_seqs=16, max_sessions=32, **options)
    with open_engine(config) as engine:
        if not engine.is_leader:
            engine.follow()
            return
        client, draw = Client(engine, Desk(engine)), random.Random(0)
        found: dict[str, Any] = {
            "model": given.model,
            "chain_depth": engine.config.chain_depth,
            "horizon": engine.config.horizon,
        }
        parts: dict[str, Callable[[], object]] = {
            "turn_2": partial(turn_2, client, draw, given.prompt, given.said, given.repeats),
            "quanta": partial(quanta, client, draw, given.tokens, given.repeats),
            "batches": partial(batches, client, draw, given.tokens),
            "chain": partial(chain, client, draw, given.tokens),
        }
        for name, measure in parts.items():
            found[name] = measure()
            print(json.dumps({name: found[name]}), flush=True)  # a run that is ended keeps what it has
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

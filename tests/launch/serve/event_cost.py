"""What an event of a stream costs in processor time: `python -m tests.launch.serve.event_cost --streams 256`.

Knows: processor time of rank 0 and of the API process, and how many events clients received. Does not know: engines,
of which fast_main.py has one that costs next to nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.launch.serve import soak


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(streams: int, tokens: int, chat: bool) -> dict[str, Any]:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body: dict[str, Any] = {"max_tokens": tokens, "stream": True, "ignore_eos": True, "seed": 1}
    body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "def f(x):"}

    async def one(server: soak.Target) -> int:
        reader, writer = await server.connect()
        writer.write(soak.request(path, body))
        events = 0
        while b"[DONE]" not in (data := await reader.read(1 << 16)):
            events += data.count(b'"choices"')
            assert data
        writer.close()
        return events + data.count(b'"choices"')

    async with soak.target("fast", "--max-num-seqs", str(streams)) as server:
        await one(server)
        before = {who: processor_seconds(pid) for who, pid in server.pids.items()}
        began = time.monotonic()
        events = sum(await asyncio.gather(*(one(server) for _ in range(streams))))
        seconds = time.monotonic() - began
        spent = {who: processor_seconds(pid) - before[who] for who, pid in server.pids.items()}
    return {
        "streams": streams,
        "events": events,
        "seconds": round(seconds, 2),
        "events_per_second": round(events / seconds),
        "us_per_event": {who: round(1e6 * spent[who] / events, 2) for who in spent},
    }


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="event_cost")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--chat", action="store_true")
    given = parser.parse_args(words)
    print(json.dumps(asyncio.run(measure(given.streams, given.tokens, given.chat)), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])

"""A server under requests, clients that leave, and bytes that are no requests: `python -m tests.launch.serve.soak`.

Knows: what must be as it was when all is over: blocks, file descriptors, threads, memory, shared memory, and the answer
to one request. Does not know: how the server works.

    --requests N     answered completely, whole and as streams, over connections that are kept
    --aborts N       whose client leaves at a random moment
    --malformed N    broken HTTP and broken bodies: none may be a 500, and none may cost a neighbour a token
    --overload N     at once, more than the queue holds: each ends with 200 or 503
    --traces N       of requests that arrive together, each of which gets the same tokens alone
    --answers N     of each of the requests that come at once (n)
    --num-blocks N   KV blocks of the real engine: fewer than the requests need
    --engine real    models/demo on the CPU instead of an engine without a model
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 180.0
PROBE = {"prompt": [5, 6, 7, 8], "max_tokens": 24, "seed": 11, "temperature": 0.0}
MOST_GROWTH_KIB = 1024  # RSS of each process, for 10,000 requests
FREE_GROWTH_KIB = 16 << 10  # of a process that warms up: caches, arenas


@dataclass
class Footprint:
    """What a process holds."""

    fds: int
    threads: int
    rss_kib: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        status = Path(f"/proc/{pid}/status").read_text()
        rss = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return cls(len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")), int(rss.split()[1]))


class Target:
    """A server that runs, and the processes that must not grow."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port

    @property
    def pids(self) -> dict[str, int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        api = next(pid for pid in map(int, children) if b"api_process" in Path(f"/proc/{pid}/cmdline").read_bytes())
        return {"rank 0": self.process.pid, "API process": api}

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)

    async def ask(self, path: str, body: object = None) -> tuple[int, bytes]:
        """One request on a connection of its own."""
        reader, writer = await self.connect()
        try:
            writer.write(request(path, body))
            return await asyncio.wait_for(reply(reader), PATIENCE)
        finally:
            writer.close()

    async def tokens(self) -> str:
        """The answer to one request, which nothing may change."""
        status, body = await self.ask("/v1/completions", PROBE)
        assert status == 200, body
        return str(json.loads(body)["choices"][0]["text"])

    async def metric(self, name: str) -> float:
        _, page = await self.ask("/metrics")
        return float(next(line for line in page.decode().splitlines() if line.startswith(name)).rpartition(" ")[2])

    async def at_rest(self) -> None:
        """Nothing runs, waits or holds blocks."""
        until = time.monotonic() + PATIENCE
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        await asyncio.sleep(0.7)  # one round of statistics
        while any([await self.metric(name) for name in names]):
            assert time.monotonic() < until, "requests are left over"
            await asyncio.sleep(0.2)


def request(path: str, body: object = None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    method = b"GET" if body is None else b"POST"
    return b"%s %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (
        method,
        path.encode(),
        len(data),
        data,
    )


async def reply(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body. Raises IncompleteReadError where the connection ends first."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
    if b"content-length" in fields:
        return status, await reader.readexactly(int(fields[b"content-length"]))
    body = b""
    while size := int((await reader.readline()).strip() or b"0", 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readline()
    return status, body


def asked(rng: random.Random, longest: int = 24) -> dict[str, Any]:
    """A request that is fine."""
    return {
        "prompt": [rng.randrange(4, 300) for _ in range(rng.randint(1, 12))],
        "max_tokens": rng.randint(1, longest),
        "seed": rng.randrange(1 << 30),
        "stream": rng.random() < 0.5,
        "n": rng.choice((1, 1, 1, 2)),
    }


async def requests(target: Target, count: int, seed: int, workers: int = 32) -> Counter[str]:
    """All answered, by workers that keep their connections."""
    outcomes: Counter[str] = Counter()
    left = iter(range(count))

    async def work(number: int) -> None:
        rng = random.Random(f"{seed}/{number}")
        reader, writer = await target.connect()
        for _ in left:
            writer.write(request("/v1/completions", asked(rng)))
            status, body = await asyncio.wait_for(reply(reader), PATIENCE)
            assert status == 200, body
            assert b"[DONE]" in body or b'"usage"' in body
            outcomes["answered"] += 1
        writer.close()

    await asyncio.gather(*(work(number) for number in range(workers)))
    return outcomes


async def aborts(target: Target, count: int, seed: int, workers: int = 32) -> Counter[str]:
    """Clients that leave: before the request is whole, before the answer, in it."""
    outcomes: Counter[str] = Counter()
    left = iter(range(count))

    async def work(number: int) -> None:
        rng = random.Random(f"{seed}/{number}/abort")
        for _ in left:
            reader, writer = await target.connect()
            data = request("/v1/completions", asked(rng, longest=400))
            moment = rng.random()
            if moment < 0.1:
                data = data[: rng.randrange(1, len(data))]
            writer.write(data)
            with contextlib.suppress(asyncio.TimeoutError, OSError, asyncio.IncompleteReadError):
                if moment < 0.5:
                    await asyncio.sleep(rng.random() * 0.02)
                else:
                    await asyncio.wait_for(reader.read(rng.randrange(1, 2000)), 0.05)
            if rng.random() < 0.5:
                writer.transport.abort()  # a reset
            else:
                writer.close()
            outcomes["left"] += 1

    await asyncio.gather(*(work(number) for number in range(workers)))
    return outcomes


def broken(rng: random.Random) -> bytes:
    """Bytes that are no request, or one with a body that is none."""
    good = request("/v1/completions", asked(rng))
    kind = rng.randrange(14)
    if kind == 0:
        return rng.randbytes(rng.randint(1, 300))
    if kind == 1:  # some bytes changed
        data = bytearray(good)
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)
    if kind == 2:  # two lengths: smuggling
        return good.replace(b"host: localhost", b"content-length: 5\r\nhost: localhost", 1)
    if kind == 3:
        return good.replace(b"host: localhost", b"transfer-encoding: chunked\r\nhost: localhost", 1)
    if kind == 4:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        return head + b"zz\r\nabc\r\n0\r\n\r\n"
    if kind == 5:
        return good.replace(b"content-length: ", b"content-length: -", 1)
    if kind == 6:
        return b"GET /" + b"a" * rng.randint(1000, 70_000) + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"
    if kind == 7:
        return b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * rng.randint(10, 3000) + b"\r\n"
    if kind == 8:
        return b"POST /v1/\xff\xfe%00%zz HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"
    body: bytes
    if kind == 9:
        body = b'{"prompt": "' + rng.randbytes(rng.randint(1, 50)).replace(b'"', b"") + b'"}'
    elif kind == 10:
        opened = rng.choice((b"[", b'{"a":', b'[{"b":[')) * rng.randint(10, 20_000)
        body = b'{"prompt": ' + opened
    elif kind == 11:
        values: list[Any] = [
            None,
            True,
            -1,
            1e308,
            10**400,
            "",
            "\ud800",
            [],
            [[]],
            {},
            [1, "a"],
            [[1], "a"],
            "a" * 5000,
        ]
        names = [*PROBE, "stop", "n", "logprobs", "stream", "model", "tools", "top_p", "priority", "stop_token_ids"]
        body = json.dumps({**PROBE, **{rng.choice(names): rng.choice(values) for _ in range(3)}}).encode()
    elif kind == 12:
        call: Any = rng.choice(([1], {}, [{"function": {"arguments": "{"}}]))
        asking = [[{"role": "user"}], [{"role": "user", "content": [{"type": 5}]}]]
        values = [None, 1, "x", [], {}, [{}], *asking, [{"role": "assistant", "tool_calls": call}]]
        chat = json.dumps({"messages": rng.choice(values), "tools": rng.choice(values), "max_tokens": 2}).encode()
        return b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (
            len(chat),
            chat,
        )
    else:
        body = json.dumps(asked(rng)).encode()[: rng.randrange(1, 20)]
    route = rng.choice((b"/v1/completions", b"/tokenize", b"/detokenize", b"/v1/chat/completions"))
    return b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (route, len(body), body)


async def malformed(target: Target, count: int, seed: int, workers: int = 16) -> Counter[str]:
    """While a neighbour asks the same again and again."""
    outcomes: Counter[str] = Counter()
    expected, left, over = await target.tokens(), iter(range(count)), asyncio.Event()

    async def work(number: int) -> None:
        rng = random.Random(f"{seed}/{number}/malformed")
        for _ in left:
            data = broken(rng)
            reader, writer = await target.connect()
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                for at in range(0, len(data), 16_000):
                    writer.write(data[at : at + 16_000])
                writer.write_eof()
                begin = await asyncio.wait_for(reader.read(64), 5.0)
                status = begin.split(b" ")[1].decode() if begin.startswith(b"HTTP/1.1 ") else "closed"
                outcomes[status] += 1
                assert not status.startswith("50"), (data[:500], begin)
            writer.close()

    async def neighbour() -> None:
        while not over.is_set():
            assert await target.tokens() == expected, "a neighbour's tokens changed"
            outcomes["neighbours"] += 1
            await asyncio.sleep(0.05)

    beside = asyncio.ensure_future(neighbour())
    await asyncio.gather(*(work(number) for number in range(workers)))
    over.set()
    await beside
    return outcomes


async def overload(target: Target, count: int, seed: int, answers: int = 1) -> Counter[str]:
    """At once: each ends, with its answer or a 503 that says when to come again. ``answers``: n of each request.

    A probe goes on asking for /health meanwhile, over one connection; outcomes has its times, in microseconds, and the
    most that were seen waiting.
    """
    outcomes: Counter[str] = Counter()
    gate = asyncio.Semaphore(1000)  # connections
    over = asyncio.Event()
    times: list[float] = []

    async def one(number: int) -> None:
        body = asked(random.Random(f"{seed}/{number}/over"))
        async with gate:
            status, said = await target.ask("/v1/completions", body if answers == 1 else {**body, "n": answers})
        outcomes[str(status)] += 1
        assert status in (200, 503), said

    async def probe() -> None:
        reader, writer = await target.connect()
        while not over.is_set():
            began = time.perf_counter()
            writer.write(request("/health"))
            status, said = await asyncio.wait_for(reply(reader), PATIENCE)
            times.append(time.perf_counter() - began)
            assert status == 200, said
            await asyncio.sleep(0.02)
        writer.close()

    async def look() -> None:
        while not over.is_set():
            page = (await target.ask("/metrics"))[1].decode()
            line = next(line for line in page.splitlines() if line.startswith("vllm:num_requests_waiting{"))
            outcomes["most waiting"] = max(outcomes["most waiting"], int(float(line.rpartition(" ")[2])))
            await asyncio.sleep(0.3)

    beside = [asyncio.ensure_future(probe()), asyncio.ensure_future(look())]
    await asyncio.gather(*(one(number) for number in range(count)))
    over.set()
    await asyncio.gather(*beside)
    for name, at in (("median", len(times) // 2), ("p99", int(len(times) * 0.99)), ("longest", len(times) - 1)):
        outcomes[f"probe, {name} us"] = round(1e6 * sorted(times)[at])
    outcomes["probes"] = len(times)
    return outcomes


async def traces(target: Target, count: int, seed: int) -> Counter[str]:
    """Timed traces of requests that share beginnings, some of whose clients leave; then each request alone: the same
    tokens."""
    outcomes: Counter[str] = Counter()
    for number in range(count):
        rng = random.Random(f"{seed}/{number}/trace")
        begin = [rng.randrange(4, 300) for _ in range(rng.randint(1, 60))]
        bodies = [{**asked(rng), "stream": False} for _ in range(rng.randint(8, 24))]
        for body in bodies:
            if rng.random() < 0.6:
                body["prompt"] = begin[: rng.randint(1, len(begin))] + body["prompt"]
            body["temperature"] = rng.choice((0, 0.7, 1.3))

        async def one(body: dict[str, Any], delay: float, leaves: bool) -> bytes | None:
            await asyncio.sleep(delay)
            if not leaves:
                return choices(await target.ask("/v1/completions", body))
            _, writer = await target.connect()
            writer.write(request("/v1/completions", body))
            await asyncio.sleep(delay)
            writer.transport.abort()
            return None

        calls = [one(body, rng.random() * 0.1, rng.random() < 0.2) for body in bodies]
        together = await asyncio.gather(*calls)
        for body, answer in zip(bodies, together, strict=True):
            if answer is not None:
                alone = choices(await target.ask("/v1/completions", body))
                assert alone == answer, (number, body, answer, alone)
                outcomes["same"] += 1
    return outcomes


def choices(answer: tuple[int, bytes]) -> bytes:
    status, body = answer
    assert status == 200, body
    return json.dumps(json.loads(body)["choices"]).encode()


@contextlib.asynccontextmanager
async def target(engine: str, *options: str) -> AsyncIterator[Target]:
    """A server for the time of a block, ended by SIGTERM. ``engine``: real, fake, or fast (fast_main.py)."""
    module = "launch" if engine == "real" else f"tests.launch.serve.{engine}_main"
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder, "address")
        words = [sys.executable, "-m", module, "serve", "--model", "models/demo", "--device", "cpu", "--port", "0"]
        words += ["--address-file", str(address), "--max-num-seqs", "32", *options]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(words, cwd=ROOT, env=environ, stderr=subprocess.PIPE)
        said = asyncio.ensure_future(asyncio.to_thread(lambda: process.stderr.read() if process.stderr else b""))
        try:
            until = time.monotonic() + 120.0
            while not address.exists():
                assert process.poll() is None, "it ended"
                assert time.monotonic() < until, "it does not begin to serve"
                await asyncio.sleep(0.05)
            made = Target(process, int(address.read_text().rpartition(":")[2]))
            while (await made.ask("/ready"))[0] != 200:
                await asyncio.sleep(0.05)
            yield made
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, PATIENCE) == 143
        finally:
            if process.poll() is None:
                process.kill()
            text = (await said).decode(errors="replace")
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
        assert "Traceback" not in text, text


async def soak(arguments: argparse.Namespace) -> dict[str, Any]:
    """Each part, and what is held before and after it."""
    answered = partial(requests, workers=min(32, max(1, arguments.max_queued // 2)))  # n is up to 2: none finds it full
    parts: dict[str, tuple[Callable[..., Any], int]] = {
        "requests": (answered, arguments.requests),
        "aborts": (aborts, arguments.aborts),
        "malformed": (malformed, arguments.malformed),
        "overload": (partial(overload, answers=arguments.answers), arguments.overload),
        "traces": (traces, arguments.traces),
    }
    told: dict[str, Any] = {}
    shared = set(os.listdir("/dev/shm"))
    options = ["--max-queued-requests", str(arguments.max_queued)]
    if arguments.num_blocks is not None:
        options += ["--num-blocks", str(arguments.num_blocks)]
    async with target(arguments.engine, *options) as server:
        expected = await server.tokens()
        await answered(server, min(200, arguments.requests or 50), arguments.seed + 1)  # warm
        await server.at_rest()
        for name, (part, count) in parts.items():
            if not count:
                continue
            if name == "overload":  # what a peak takes is kept for the next one: that must not grow
                await part(server, count, arguments.seed + 1)
                await server.at_rest()
            before = {who: Footprint.of(pid) for who, pid in server.pids.items()}
            began = time.monotonic()
            outcomes = await part(server, count, arguments.seed)
            await server.at_rest()
            assert await server.tokens() == expected
            after = {who: Footprint.of(pid) for who, pid in server.pids.items()}
            growth = {who: after[who].rss_kib - before[who].rss_kib for who in before}
            told[name] = {
                "count": count, "seconds": round(time.monotonic() - began, 1), "outcomes": dict(outcomes),
                "rss_growth_kib": growth, "fds": {who: [before[who].fds, after[who].fds] for who in before},
            }  # fmt: skip
            for who in before:
                assert after[who].fds <= before[who].fds + 2, (name, who, before, after)
                assert after[who].threads <= before[who].threads + 8, (name, who, before, after)  # asyncio's own pool
                most = FREE_GROWTH_KIB + MOST_GROWTH_KIB * count / 10_000
                assert growth[who] <= most, (name, who, growth)
        assert (await server.ask("/health"))[0] == 200
    for _ in range(600):  # other programs of this machine have some for a while
        if set(os.listdir("/dev/shm")) <= shared:
            return told
        await asyncio.sleep(0.1)
    raise AssertionError(f"left in /dev/shm: {sorted(set(os.listdir('/dev/shm')) - shared)}")


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="soak")
    for name in ("requests", "aborts", "malformed", "overload", "traces"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-queued", type=int, default=4096)
    parser.add_argument("--num-blocks", type=int)
    parser.add_argument("--answers", type=int, default=1)
    parser.add_argument("--engine", choices=("fake", "real"), default="fake")
    return parser.parse_args(words)


def main(words: list[str]) -> None:
    print(json.dumps(asyncio.run(soak(parsed(words))), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])

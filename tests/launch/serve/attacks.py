"""One client against all others: `python -m tests.launch.serve.attacks [NAME ...] [--ranks 2] [--json FILE]`.

Knows: what each attack sends, and what must hold meanwhile (PROMISES). Does not know: how the server defends itself.

models/demo is served on the CPU, on one rank or two. While an attack runs, another client at another address reads a
stream, asks for /health, and sends a body of 20 KiB. One row an attack: the longest wait of each of them in seconds, by
how many MiB the API process and rank 0 grew at most, and what the attacker was answered. Times depend on what else the
machine does; tests of the structure are in test_incoming.py, test_http_protocol.py, test_app.py and test_processes.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.launch.serve.soak import ROOT, reply, request

MIB = 1 << 20
PROMISES = {"health_s": 1.0, "gap_s": 1.0, "body_s": 8.0, "api_mib": 200.0, "rank_mib": 200.0}
GAP_RISE_MS = 50.0  # of the 99th percentile of a stream's waits, by schemas
OUTAGE_S = 40.0  # in which an API process that hangs or dies is replaced: others wait that long
BODIES_MIB = 300.0  # of all bodies that are not decoded yet
SECONDS = 10.0  # of an attack that does not end by itself
VICTIM = "127.0.0.2"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Server:
    """A server that runs. ``pids``: of rank 0 and of the API process."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def pids(self) -> dict[str, int]:
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_bytes()
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if b"launch.serve.api_process" in words and self.process.pid in (parent, parent_of(parent)):
                    found = {"api": int(folder.name), "rank": parent}
        return found

    async def connect(self, victim: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        source = (VICTIM, 0) if victim else None
        return await asyncio.open_connection("127.0.0.1", self.port, limit=64 * MIB, local_addr=source)

    async def send(self, data: bytes, victim: bool = False) -> str:
        """One request in bytes: status, and the error's message where there is one."""
        reader, writer = await self.connect(victim)
        try:
            writer.write(data)
            with contextlib.suppress(OSError):
                await writer.drain()
            status, body = await asyncio.wait_for(reply(reader), 120.0)
        except (OSError, asyncio.IncompleteReadError):
            return "closed"
        finally:
            writer.close()
        if status == 200:  # to read 40 MB of log-probabilities would keep the other client waiting here
            return "200"
        error = json.loads(body).get("error") if body.startswith(b"{") else None
        return f"{status} {error['message'][:60]}" if error else str(status)

    async def ask(self, path: str, body: object = None, victim: bool = False) -> str:
        return await self.send(request(path, body), victim)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def post(path: str, body: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (path.encode(), len(body), body)


# ---- attacks: each returns what it was answered ----

Attack = Callable[[Server], Awaitable[str]]
ATTACKS: dict[str, Attack] = {}


def attack(name: str) -> Callable[[Attack], Attack]:
    def note(made: Attack) -> Attack:
        ATTACKS[name] = made
        return made

    return note


def bodies(name: str, path: str, data: Callable[[], bytes], times: int = 1) -> None:
    async def send(server: Server) -> str:
        body = await asyncio.to_thread(data)
        answers = await asyncio.gather(*(server.send(post(path, body)) for _ in range(times)))
        return " | ".join(sorted(set(answers)))

    ATTACKS[name] = send


def filled(head: bytes, unit: bytes, tail: bytes, size: int = 31 * MIB) -> Callable[[], bytes]:
    return lambda: head + unit * ((size - len(head) - len(tail)) // len(unit)) + tail


def names(count: int) -> bytes:
    return b'{"prompt":"a","documents":{' + b",".join(b'"n%d":0' % at for at in range(count)) + b"}}"


def scored(prompts: int) -> bytes:
    asked = {"prompt": [[5 + at % 300] * 1000 for at in range(prompts)], "prompt_logprobs": 20, "max_tokens": 1}
    return json.dumps(asked).encode()


TEXT = "the quick brown fox " * (6 * MIB // 20)
CHAT = b'{"max_tokens":1,"truncate_prompt_tokens":9,"messages":[{"role":"user","content":"'
CALL = b'{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"['
bodies("prompt log-probabilities, 64 x 1,000 x 20", "/v1/completions", lambda: scored(64))
bodies("prompt log-probabilities, as many as are possible", "/v1/completions", lambda: scored(24))
bodies("/tokenize of 6 MiB, three times", "/tokenize", lambda: json.dumps({"prompt": TEXT}).encode(), 3)
bodies("truncate_prompt_tokens of 6 MiB, three times", "/v1/completions",
       lambda: json.dumps({"prompt": TEXT, "truncate_prompt_tokens": 9, "max_tokens": 1}).encode(), 3)  # fmt: skip
bodies("31 MiB of messages, three times", "/v1/chat/completions", filled(CHAT, b"lazy dog ", b'"}]}'), 3)
bodies("/tokenize of as much as is possible, three times", "/tokenize",
       lambda: json.dumps({"prompt": TEXT[: MIB // 2]}).encode(), 3)  # fmt: skip
bodies("31 MiB of lists", "/v1/completions", filled(b'{"prompt":[', b"[],", b"[]]}"))
bodies(
    "31 MiB of lists in a field without meaning", "/v1/completions", filled(b'{"prompt":"a","user":[', b"[],", b"1]}")
)
bodies("31 MiB of names", "/v1/chat/completions", lambda: names(2_200_000))
bodies("31 MiB of escapes", "/v1/completions", filled(b'{"prompt":"', b"\\\\", b'\\ud800"}'))
bodies("31 MiB of stop strings", "/v1/completions", filled(b'{"prompt":"a","stop":[', b'"abc",', b'"a"]}'))
bodies("31 MiB of token ids", "/v1/completions", filled(b'{"prompt":[', b"12345,", b"1]}"))
bodies(
    "31 MiB of allowed_token_ids", "/v1/completions", filled(b'{"prompt":"a","allowed_token_ids":[', b"123,", b"1]}")
)
bodies("31 MiB of JSON in a tool call's arguments", "/v1/chat/completions", filled(CALL, b"[],", b']"}}]}]}'))
bodies(
    "a grammar of as much work as is possible",
    "/v1/completions",
    lambda: json.dumps({"prompt": "a", "structured_outputs": {"regex": "(a{1000}){1000}"}}).encode(),
)
bodies("as many token ids as are possible", "/v1/completions", filled(b'{"prompt":[', b"12345,", b"1]}", 6 * MIB - 600))
bodies("as many lists as are possible", "/v1/completions", filled(b'{"prompt":[', b"[],", b"[]]}", 3 * 61_000))


def nested(keyword: str, depth: int) -> Any:
    schema: Any = {"type": "object", "properties": {"a": {"type": "string"}}}
    for _ in range(depth):
        schema = {keyword: [schema, {"type": "object", "additionalProperties": schema}]}
    return schema


def hostile_forms(at: int) -> list[dict[str, Any]]:
    """Each costs much to compile, or at each token, or must be refused. ``at``: no two calls give the same grammar."""
    many = {f"p{i}": {"type": "string", "pattern": f"^(a|b){{{i % 50}}}$"} for i in range(900)}
    most = {name: many[name] for name in [*many][:400]}
    cycle = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    tree = {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "string"}, {"type": "number"}]}
    schemas = [
        nested("oneOf", 9), nested("anyOf", 9), nested("allOf", 9), tree,
        {"type": "object", "properties": many}, {"type": "object", "properties": most},
        {"type": "string", "minLength": 16384 - at},
        {"type": "array", "items": nested("anyOf", 3), "minItems": 16384 - at}, {"$ref": "#/$defs/a", "$defs": cycle},
        {"enum": [f"{at}\0" * 50, "\0"]}, {"enum": [f"{at}{i:07d}" for i in range(4000)]},
    ]  # fmt: skip
    regexes = ["(a{1,1000}){1,1000}", "a{1,100000}", "(.*a){30}", "(a|aa)*b(a|aa)*", "(x+x+)+y"]
    texts = ['start: e\ne: e e | "a"', "start: a\na: b b b b\nb: c*\nc: /x*/ c?", f"start: /(.|\\n)*{'a.?' * 99}/"]
    forms: list[dict[str, Any]] = [{"json": {**one, "title": str(at)}} for one in schemas]
    return [*forms, *({"regex": f"{at}|{one}"} for one in regexes), *({"grammar": f"{one}\n// {at}"} for one in texts)]


async def six_at_a_time(server: Server, forms: list[dict[str, Any] | None]) -> str:
    seats, found = asyncio.Semaphore(6), dict[str, int]()

    async def one(form: dict[str, Any] | None) -> None:
        async with seats:
            said = await server.ask("/v1/completions", {"prompt": "a", "max_tokens": 16, "structured_outputs": form})
        found[said[:3]] = found.get(said[:3], 0) + 1

    await asyncio.gather(*map(one, forms))
    return ", ".join(f"{count} times {status}" for status, count in sorted(found.items()))


@attack("hostile schemas, six at a time")
async def schemas(server: Server) -> str:
    """None may be a 500, or keep others waiting: its compiler has a thread of its own, and its work is counted."""
    return await six_at_a_time(server, [form for at in range(2) for form in hostile_forms(at)])


@attack("trailers without an end, before any key")
async def trailers(server: Server) -> str:
    reader, writer = await server.connect()
    writer.write(CHUNKED + b"1\r\na\r\n0\r\n")
    sent, ends = 0, time.monotonic() + SECONDS
    with contextlib.suppress(OSError):
        while time.monotonic() < ends:
            writer.write(b"a: " + b"b" * 60_000 + b"\r\n")
            await writer.drain()
            sent += 60_005
    head = b""
    with contextlib.suppress(OSError):
        head = await asyncio.wait_for(reader.read(64), 5.0)
    writer.close()
    return f"{head[9:12].decode() or 'closed'} after {sent / MIB:.1f} MiB"


@attack("twenty bodies of 31 MiB without an end")
async def unfinished(server: Server) -> str:
    """Their connections are closed in time; 408 cannot be read by one that still sends."""
    began, ended = time.monotonic(), list[float]()

    async def one() -> None:
        reader, writer = await server.connect()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (31 * MIB)
        with contextlib.suppress(OSError):
            writer.write(head + b'{"prompt":"')
            for _ in range(31 * 16 - 1):  # a few at a time: the victims' clients run on this loop, too
                writer.write(b"a" * (MIB // 16))
                await writer.drain()
            while await reader.read(1 << 16):
                pass
        ended.append(time.monotonic() - began)
        writer.close()

    await asyncio.wait_for(asyncio.gather(*(one() for _ in range(20))), 120.0)
    return f"closed after {min(ended):.0f} to {max(ended):.0f} s"


@attack("a stream of 128 answers that is not read")
async def unread(server: Server) -> str:
    _, writer = await server.connect()
    writer.write(request("/v1/completions", {"prompt": "a", "n": 128, "max_tokens": 2000, "stream": True, "logprobs": 5,
                                             "ignore_eos": True}))  # fmt: skip
    await asyncio.sleep(SECONDS)
    writer.close()
    return "left"


@attack("1,024 answers to long prompts")
async def many(server: Server) -> str:
    _, writer = await server.connect()
    prompts = [[5 + at] * 1000 for at in range(8)]
    writer.write(request("/v1/completions", {"prompt": prompts, "n": 128, "max_tokens": 1000, "ignore_eos": True}))
    await asyncio.sleep(SECONDS)
    writer.close()
    return "left"


@attack("idle connections, twice as many as there are files")
async def idle(server: Server) -> str:
    limit = int(Path(f"/proc/{server.pids['api']}/limits").read_text().partition("Max open files")[2].split()[0])
    mine = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (mine[1], mine[1]))
    held = [await server.connect() for _ in range(min(2 * limit, 4000))]
    await asyncio.sleep(SECONDS / 2)
    for _, writer in held:
        writer.close()
    return f"{len(held)} connections"


@attack("an API process that is stopped")
async def stopped(server: Server) -> str:
    before, began = server.pids["api"], time.monotonic()
    os.kill(before, signal.SIGSTOP)
    while server.pids.get("api", before) == before:
        await asyncio.sleep(0.1)
    while await server.ask("/ready") != "200":
        await asyncio.sleep(0.1)
    return f"replaced, and ready again after {time.monotonic() - began:.0f} s"


@attack("an API process that is killed eight times")
async def killed(server: Server) -> str:
    for _ in range(8):
        pid = server.pids.get("api")
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        while server.pids.get("api") in (None, pid):
            await asyncio.sleep(0.05)
    began = time.monotonic()
    while await server.ask("/ready") != "200":
        await asyncio.sleep(0.1)
    return f"ready again {time.monotonic() - began:.0f} s after the last"


# ---- what others see meanwhile ----


@dataclass
class Others:
    """Another client. ``longest``: by what it did, in seconds; a wait that is not over counts."""

    server: Server
    longest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("health_s", "gap_s", "body_s"), 0.0))
    gaps: list[float] = field(default_factory=list)

    def gap_p99_ms(self) -> float:
        """Of the stream's waits since the last call."""
        waits, self.gaps = sorted(self.gaps), []
        return 1e3 * waits[int(0.99 * (len(waits) - 1))]

    async def note(self, what: str, made: Awaitable[Any]) -> Any:
        began = time.monotonic()
        try:
            return await made
        finally:
            self.longest[what] = max(self.longest[what], time.monotonic() - began)
            if what == "gap_s":
                self.gaps.append(time.monotonic() - began)

    async def probe(self) -> None:
        while True:
            await self.note("health_s", self.server.ask("/health", victim=True))
            await asyncio.sleep(0.05)

    async def send(self) -> None:
        body = {"prompt": [5] * 8, "max_tokens": 1, "user": "x" * (20 << 10)}
        while True:
            await self.note("body_s", self.server.ask("/v1/completions", body, victim=True))
            await asyncio.sleep(0.2)

    async def stream(self) -> None:
        body = {"prompt": "def gcd(a, b):", "max_tokens": 1500, "stream": True, "ignore_eos": True}
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await self.server.connect(victim=True)
                writer.write(request("/v1/completions", body))
                await self.note("body_s", reader.readline())  # which comes with the first token
                while (line := await self.note("gap_s", reader.readline())) and line != b"data: [DONE]\n":
                    pass  # the connection stays open after the stream's end
                writer.close()
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def meanwhile(others: Others) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(made()) for made in (others.probe, others.send, others.stream)]
    await asyncio.sleep(2.0)
    others.longest = dict.fromkeys(others.longest, 0.0)
    try:
        yield
        await asyncio.sleep(1.0)
    finally:
        while not all(task.done() for task in tasks):
            for task in tasks:  # a wait that is over in the same moment swallows it
                task.cancel()
            await asyncio.wait(tasks, timeout=0.1)


def memory(pid: int, name: str) -> float:
    """MiB. ``name``: VmRSS, or VmHWM, the most since it was reset."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) / 1024


@contextlib.asynccontextmanager
async def serving(ranks: int, *options: str, files: int = 4096) -> AsyncIterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder, "address")
        words = [sys.executable, "-m"]
        if ranks > 1:
            words += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        words += ["launch", "serve", "--model", "models/demo", "--device", "cpu", "--port", "0", "--max-num-seqs", "16"]
        words += ["--address-file", str(address), *options]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        limit = f'ulimit -n {files}; exec "$@"'
        process = subprocess.Popen(["bash", "-c", limit, "bash", *words], cwd=ROOT, env=environ)
        try:
            while not address.exists():
                assert process.poll() is None, "it ended"
                await asyncio.sleep(0.1)
            server = Server(process, int(address.read_text().rpartition(":")[2]))
            while await server.ask("/ready") != "200":
                await asyncio.sleep(0.1)
            yield server
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait, 60.0)


async def measure(server: Server, name: str) -> dict[str, Any]:
    """One attack's row."""
    others, before = Others(server), server.pids
    async with meanwhile(others):
        held = {}
        for who, pid in before.items():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # VmHWM begins anew
            held[who] = memory(pid, "VmRSS")
        if "schemas" in name:  # against as many rows without them
            await six_at_a_time(server, [None] * 40)
        quiet = others.gap_p99_ms()
        answer = await ATTACKS[name](server)
        risen = others.gap_p99_ms() - quiet
        await asyncio.sleep(1.0)
        peaks = {who: memory(pid, "VmHWM") - held[who] for who, pid in before.items() if Path(f"/proc/{pid}").exists()}
    row: dict[str, Any] = {"attack": name, **{what: round(value, 2) for what, value in others.longest.items()}}
    if "schemas" in name:
        row |= {"gap_p99_ms": round(quiet, 1), "gap_p99_rise_ms": round(risen, 1)}
    return {**row, **{f"{who}_mib": round(peak) for who, peak in peaks.items()}, "answer": answer}


async def run(chosen: list[str], ranks: int) -> list[dict[str, Any]]:
    rows = []
    for name in chosen:
        few = "files" in name
        warm = ("--warm", "greedy,random,constrained") if "schemas" in name else ()
        async with serving(ranks, *warm, files=128 if few else 4096) as server:
            rows.append(await measure(server, name))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def promised(name: str) -> dict[str, float]:
    """The bounds of an attack's row."""
    if "schemas" in name:
        return PROMISES | {"gap_p99_rise_ms": GAP_RISE_MS}
    if "API process" in name:
        return PROMISES | dict.fromkeys(("health_s", "gap_s", "body_s"), OUTAGE_S)
    return PROMISES | {"api_mib": BODIES_MIB} if "twenty bodies" in name else PROMISES


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="attacks", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; default: all attacks")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(words)
    chosen = [name for name in ATTACKS if not given.names or any(part in name for part in given.names)]
    rows = asyncio.run(run(chosen, given.ranks))
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    broken = [
        (row["attack"], what)
        for row in rows
        for what, most in promised(row["attack"]).items()
        if row.get(what, 0.0) > most
    ]
    print(f"{len(rows)} attacks; beyond what is promised: {broken or 'none'}")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

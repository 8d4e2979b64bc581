"""The whole daemon on two ranks under torchrun, over the demo model: sessions, a person's chat, a rank that dies."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.chat.command import run as chat
from launch.chat.options import ChatCommand
from launch.cli import parse
from launch.daemon.command import run
from launch.daemon.options import MAX_SESSIONS, DaemonCommand
from launch.errors import UsageError
from lockstride import SlotClient
from runtime.daemon.frames import Kind
from runtime.frontend.tokenizer import Tokenizer
from tests.torchrun import started

PATIENCE = 120.0
PAGE = Path(__file__).parents[3] / "docs/daemon.md"


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def children(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


def ranks(launcher: int, path: Path) -> tuple[int, int]:
    """The process ids of rank 0, which listens at ``path``, and of rank 1."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.connect(str(path))
        leader = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    words = Path(f"/proc/{leader}/cmdline").read_bytes()  # ranks look alike
    alike = [child for child in children(launcher) if Path(f"/proc/{child}/cmdline").read_bytes() == words]
    (follower,) = set(alike) - {leader}
    return leader, follower


def talk(path: Path, screen: io.StringIO, *lines: str) -> str:
    command = ChatCommand(path, max_tokens=12, quantum=5, temperature=0.0, seed=1, plain=True)
    assert chat(command, io.StringIO("\n".join(lines) + "\n"), screen) == 0
    return screen.getvalue()


@pytest.mark.multiprocess
def test_two_ranks_talk_and_one_dies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "slots.sock"
    words = ("daemon", "--model", "models/demo", "--device", "cpu", "--max-num-seqs", "4", "--socket", str(path))
    with started(2, "launch", *words, "--bundles", str(tmp_path / "bundles")) as running:
        until(lambda: path.exists() or running.ended)
        with SlotClient(path, timeout=PATIENCE) as client:
            quanta_change_nothing(client)
            text_and_log_probabilities_come_with_the_tokens(client)
            a_probe_finds_no_difference(client)
            a_turn_is_a_request_over_the_whole_talk(client)
            the_example_of_the_page_runs(path, capsys)
            shown = talk(
                path, io.StringIO(), "def gcd(a, b):", "/stats", "/help", "def lcm(a, b):", "/new", "x = 1", "/quit"
            )
            assert len(re.findall(r"\[\d+ tokens, first after", shown)) == 3
            assert "sessions 1, prefill_tokens" in shown
            session = client.start("def gcd(a, b):", max_tokens=1900, quantum=1900)
            client.read()
            leader, follower = ranks(running.pid, path)
            os.kill(follower, signal.SIGKILL)
            last = list(session.frames())[-1]
            assert last.kind is Kind.CLOSED
            assert re.match(r"the engine failed: .*rank 1", last.text), last.text
        ended = running.wait(PATIENCE)
    assert ended.returncode != 0
    assert not path.exists()
    until(lambda: not (Path(f"/proc/{leader}").exists() or Path(f"/proc/{follower}").exists()))


def quanta_change_nothing(client: SlotClient) -> None:
    """In float32 on two ranks: one quantum of 24 tokens, 24 of one, and a drain, greedy and drawn."""
    drawn: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.2},
    )
    for options in drawn:
        found = []
        for quantum in (24, 5, 1):
            session = client.start("def gcd(a, b):", max_tokens=24, quantum=quantum, ignore_eos=True, **options)
            found.append(session.tokens())
        assert found[0] == found[1] == found[2]
        assert len(found[0]) == 24


def text_and_log_probabilities_come_with_the_tokens(client: SlotClient) -> None:
    session = client.start("def gcd(a, b):", max_tokens=16, quantum=5, temperature=0.0, text=True, logprobs=2)
    frames = list(session.answer())
    tokens = [token for frame in frames if frame.kind is Kind.TOKEN for token in frame.tokens]
    entries = [entry for frame in frames if frame.kind is Kind.LOGPROBS for entry in frame.logprobs]
    assert [entry.token_id for entry in entries] == tokens
    assert all(entry.rank == 1 and entry.top[0] == (entry.token_id, entry.logprob) for entry in entries)
    text = "".join(frame.text for frame in frames if frame.kind is Kind.TEXT)
    assert text == Tokenizer.from_folder("models/demo").decode(tokens, ())
    stop = text[len(text) // 2 :][:3]
    stopped = client.start("def gcd(a, b):", max_tokens=16, quantum=16, temperature=0.0, text=True, stop=["~~~~", stop])
    assert "".join(frame.text for frame in stopped.answer() if frame.kind is Kind.TEXT) == text[: text.index(stop)]


def a_probe_finds_no_difference(client: SlotClient) -> None:
    sessions = [
        client.start(text, max_tokens=20, quantum=3, temperature=0.0)
        for text in ("def gcd(a, b):", "import re\n", "# ")
    ]
    for session in sessions:
        list(session.frames())
    before = client.command("LIST_REQUESTS")
    answer = client.command("SCHED_PROBE")
    assert (answer["sessions"], answer["tokens"], answer["mismatches"]) == (3, 6, 0)
    assert 0 <= answer["logprob_difference"] < 1e-3, "float32"
    assert client.command("LIST_REQUESTS") == before
    for session in sessions:
        session.close()


def a_turn_is_a_request_over_the_whole_talk(client: SlotClient) -> None:
    first = client.start([40, 41, 42], max_tokens=9, quantum=4, keep=True, temperature=0.0, ignore_eos=True)
    said = first.tokens()
    before = client.command("STATS")["prefill_tokens"]
    first.extend([50, 51], max_tokens=8)
    answer = first.tokens()
    assert client.command("STATS")["prefill_tokens"] - before == 3
    alone = client.start([40, 41, 42, *said, 50, 51], max_tokens=8, quantum=8, temperature=0.0, ignore_eos=True)
    assert alone.tokens() == answer
    first.close()


def the_example_of_the_page_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands: it connects to slots.sock of the folder in which it is started."""
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (path.parent / "ask.py").write_text(example)
    with contextlib.chdir(path.parent):
        runpy.run_path("ask.py")
    assert re.search(r"\[\d[\d, ]*\]\n$", capsys.readouterr().out)


def test_the_command_line() -> None:
    command = parse(["daemon", "--model", "models/demo", "--session-policy", "refuse"])
    assert isinstance(command, DaemonCommand)
    assert command.engine_config(1).max_sessions == MAX_SESSIONS
    assert command.engine_config(1).session_policy == "refuse"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-sessions", "0"], "--max-sessions 0: a daemon without sessions does nothing"),
        (["--stdio", "--socket", "x"], "--stdio and --socket: one or the other"),
        (["--stdio", "--stream-fd", "912"], "--stream-fd 912 is not open"),
        (["--stream-tagged"], "--stream-tagged is for --stdio"),
        (["--socket", "pyproject.toml"], "--socket pyproject.toml is a file that is no socket"),
        (["--socket", "no/such/folder.sock"], "--socket no/such/folder.sock cannot be listened on"),
    ],
)
def test_a_wrong_command_line_is_found_before_any_work(words: list[str], message: str) -> None:
    command = parse(["daemon", "--model", "models/demo", "--device", "cpu", *words])
    assert isinstance(command, DaemonCommand)

    def never(*_: object) -> None:
        raise AssertionError("the engine was opened")

    with pytest.raises(UsageError, match=re.escape(message)):
        run(command, {}, never)  # type: ignore[arg-type]


def test_chat_without_a_daemon_says_how_to_start_one(tmp_path: Path) -> None:
    command = ChatCommand(tmp_path / "none.sock", 1, 1, None, None, plain=True)
    with pytest.raises(UsageError, match="start one: python -m launch daemon --socket"):
        chat(command)

"""`chat`: lines of a person to a daemon's session, and its answers to the screen as they come.

Knows: what is typed and shown, how a chat template's text is said piece by piece. Does not know: the protocol
(runtime/daemon/client.py).

A template renders whole conversations. What is said in a turn is what the rendering of this turn has after the one of
the turn before and its answer; so the session computes only that. Where a template does not go on so, the conversation
begins again in a new session.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from launch.chat.options import ChatCommand
from launch.errors import UsageError
from runtime.daemon.client import SlotClient, SlotError, SlotSession
from runtime.daemon.frames import Frame, Kind
from runtime.frontend.chat_template import ChatTemplate
from runtime.schedule.request import FinishReason

_SHOWN_STATS = ("sessions", "prefill_tokens", "prefix_hit_tokens", "session_continues", "session_evictions", "steps")
_HELP = "/stats counters, /new another conversation, Ctrl-C ends an answer, /quit leaves"


def run(command: ChatCommand, typed: TextIO = sys.stdin, screen: TextIO = sys.stdout) -> int:
    """Until the person leaves; returns 0.

    Raises UsageError where there is no daemon, or no folder of its model here to read a template from, and SlotError
    where the daemon goes.
    """
    try:
        client = SlotClient(command.connect)
    except OSError as error:
        raise UsageError(
            f"--connect {command.connect}: {error.strerror or error}; start one: python -m launch daemon --socket "
            f"{command.connect} --model FOLDER"
        ) from error
    with client:
        model = client.facts["model"]
        if not command.plain and not Path(model).is_dir():
            raise UsageError(
                f"--connect {command.connect}: the daemon's model {model} is no folder here, so that its chat template "
                "cannot be read: type --plain to talk without one"
            )
        template = None if command.plain else ChatTemplate.from_folder(model)
        screen.write(f"{model}, {'its chat template' if template else 'plain text'}. {_HELP}\n")
        try:
            _Conversation(client, command, template, screen).hold(_lines(typed, screen))
        except KeyboardInterrupt:  # at the prompt
            screen.write("\n")
    return 0


def _lines(typed: TextIO, screen: TextIO) -> Iterator[str]:
    while True:
        screen.write("> ")
        screen.flush()
        line = typed.readline()
        if not line:
            screen.write("\n")
            return
        if line.strip():
            yield line.rstrip("\n")


@contextmanager
def stops() -> Iterator[list[int]]:
    """Ctrl-C only adds its number to the yielded list."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # Python sets handlers nowhere else
        yield came
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


class _Conversation:
    def __init__(self, client: SlotClient, command: ChatCommand, template: ChatTemplate | None, screen: TextIO) -> None:
        self._client, self._command, self._template, self._screen = client, command, template, screen
        self._session: SlotSession | None = None
        self._messages: list[dict[str, Any]] = []
        self._known = ""  # all that the session knows, as text

    def hold(self, lines: Iterator[str]) -> None:
        for line in lines:
            if line == "/quit":
                return
            if line == "/stats":
                self._stats()
            elif line == "/new":
                self._begin_again()
            elif line.startswith("/"):
                self._screen.write(f"{_HELP}\n")
            else:
                self._turn(line)

    def _turn(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        try:
            began = time.monotonic()
            tokens, first = self._say(self._new_text(line), began)
            seconds = max(time.monotonic() - began, 1e-9)
            self._screen.write(f"\n[{tokens} tokens, first after {first:.2f} s, {tokens / seconds:.1f} tokens/s]\n")
        except SlotError as error:
            self._screen.write(f"\n[{error}]\n")
            self._begin_again()

    def _new_text(self, line: str) -> str:
        """What the session does not know yet; of a new one everything."""
        if self._template is None:
            return line if self._session is None else f"\n{line}"
        whole = self._template.render(self._messages)
        if self._session is not None and whole.startswith(self._known):
            return whole[len(self._known) :]
        if self._session is not None:
            self._session.close()
            self._session, self._known = None, ""
        return whole

    def _say(self, text: str, began: float) -> tuple[int, float]:
        """Returns the tokens of the answer, and when the first one came."""
        most, quantum = self._command.max_tokens, self._command.quantum
        if self._session is None:
            wanted = {"temperature": self._command.temperature, "seed": self._command.seed}
            options: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
            if self._command.stop:
                options["stop"] = self._command.stop
            if self._template is not None:
                options["add_special_tokens"] = False  # the template writes them
            self._session = self._client.start(text, max_tokens=most, quantum=quantum, keep=True, text=True, **options)
        else:
            self._session.extend(text, max_tokens=most, quantum=quantum)
        answer, tokens, first = "", 0, 0.0
        for frame in self._until_stopped(self._session):
            if frame.kind is Kind.TOKEN:
                first = first or time.monotonic() - began
                tokens += len(frame.tokens)
            elif frame.kind is Kind.TEXT:
                answer += frame.text
                self._screen.write(frame.text)
                self._screen.flush()
            elif frame.kind is Kind.EVICTED:
                self._screen.write(f"[memory was short: {frame.count} tokens are computed again]")
            elif frame.kind is Kind.CLOSED:
                raise SlotError(f"the session was closed: {frame.text}")
            elif frame.kind is Kind.DONE and frame.done[0] is FinishReason.LENGTH:
                self._screen.write(" ...")
        self._known += text + answer
        self._messages.append({"role": "assistant", "content": answer})
        return tokens, first

    def _until_stopped(self, session: SlotSession) -> Iterator[Frame]:
        """Quantum after quantum until the answer is complete, or Ctrl-C: then it ends with its quantum."""
        with stops() as stopped:
            while True:
                yield from session.frames()
                if session.finished:
                    return
                if stopped:
                    self._screen.write(" [stopped]")
                    return
                session.proceed()

    def _stats(self) -> None:
        stats = self._client.command("STATS")
        self._screen.write(", ".join(f"{name} {stats[name]}" for name in _SHOWN_STATS if name in stats) + "\n")

    def _begin_again(self) -> None:
        session, self._session = self._session, None
        self._messages, self._known = [], ""
        if session is not None and session.request in {
            listed["request"] for listed in self._client.command("LIST_REQUESTS")["requests"]
        }:
            session.close()

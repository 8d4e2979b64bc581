"""What a person sees and types: Ctrl-C ends an answer with its quantum, and the session goes on from there."""

from __future__ import annotations

import io
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from launch.chat.command import _Conversation, run
from launch.chat.options import ChatCommand
from launch.cli import parse
from launch.errors import UsageError
from runtime.daemon.client import SlotClient, SlotError
from runtime.daemon.frames import Kind
from runtime.frontend.chat_template import ChatTemplate
from tests.runtime.daemon.scripted import ScriptedEngine
from tests.runtime.daemon.test_server import IDS, PATIENCE_S, alone, served


def test_ctrl_c_ends_an_answer_with_its_quantum(tmp_path: Path) -> None:
    path = tmp_path / "slots.sock"
    command = ChatCommand(path, 40, 4, None, None, plain=True)
    screen = io.StringIO()
    shown: list[int] = []
    with served(path), SlotClient(path, timeout=PATIENCE_S) as client:
        session = client.start(IDS, max_tokens=40, quantum=4, keep=True)
        before = signal.getsignal(signal.SIGINT)
        for frame in _Conversation(client, command, None, screen)._until_stopped(session):
            if frame.kind is Kind.TOKEN:
                shown += frame.tokens
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before
        assert shown == alone(0, IDS, 4)
        assert screen.getvalue() == " [stopped]"
        session.extend([5, 6], max_tokens=3, quantum=3)
        assert session.tokens() == alone(0, (*IDS, *shown, 5, 6), 3)


def test_the_template_is_that_of_the_daemon_s_folder(tmp_path: Path) -> None:
    """Wherever the person is; where that folder is not, nobody talks without a template unawares."""
    path, model, engine = tmp_path / "slots.sock", tmp_path / "model", ScriptedEngine()
    model.mkdir()
    (model / "chat_template.jinja").write_text("{{ messages }}")
    engine.config = replace(engine.config, model=os.path.relpath(model))
    command = ChatCommand(path, 40, 4, None, None, plain=False)
    screen = io.StringIO()
    with served(path, engine):
        assert run(command, io.StringIO("/quit\n"), screen) == 0
        assert screen.getvalue().startswith(f"{model.resolve()}, its chat template. ")
        model.rename(tmp_path / "gone")
        with pytest.raises(UsageError, match=r"/model is no folder here, .*: type --plain"):
            run(command, io.StringIO("/quit\n"), screen)
        assert run(replace(command, plain=True), io.StringIO("/quit\n"), screen) == 0


def test_the_command_line() -> None:
    command = parse(["chat", "--connect", "x.sock", "--temperature", "0", "--plain"])
    assert command == ChatCommand(Path("x.sock"), 256, 32, 0.0, None, plain=True)


@pytest.mark.parametrize("template", [None, ChatTemplate("<s>{{ messages[0].content }}")])
def test_a_template_writes_all_special_tokens_itself(template: ChatTemplate | None) -> None:
    class Client(SlotClient):
        def __init__(self) -> None:
            self.asked: dict[str, Any] = {}

        def start(self, prompt: Any, **options: Any) -> NoReturn:
            self.asked = {"prompt": prompt, **options}
            raise SlotError("enough")

    client = Client()
    command = ChatCommand(Path("x"), 4, 4, None, None, plain=template is None)
    _Conversation(client, command, template, io.StringIO()).hold(iter(["hi"]))
    adds = client.asked.get("add_special_tokens", True)
    assert (client.asked["prompt"], adds) == (("hi", True) if template is None else ("<s>hi", False))

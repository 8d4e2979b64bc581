"""The command line of `serve`: what is refused before anything is loaded, and where it listens."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import NoReturn

import pytest

from launch.errors import UsageError
from launch.serve.command import is_loopback, settings_of
from launch.serve.options import ServeCommand
from launch.serve.processes import listeners
from launch.serve.settings import ServerSettings, decoded, encoded
from runtime.config import EngineConfig
from runtime.frontend.tokenizer_files import TokenizerError
from runtime.schedule.request import SamplingParams
from tests.launch.api.parsed import parsed


def settings(*words: str, environ: dict[str, str] | None = None, model: str = "models/demo") -> ServerSettings:
    command = parsed(ServeCommand, ["serve", "--model", model, "--device", "cpu", *words])
    return settings_of(EngineConfig(model=model, device="cpu"), command.options, SamplingParams(), environ or {})


def test_settings_travel_unchanged() -> None:
    made = settings("--served-model-name", "a", "b", "--max-tokens", "5", "--api-key", "k")
    assert made.names == ("a", "b")
    assert decoded(encoded(made)) == made


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "--insecure"),
        (["--host", "::"], "--insecure"),
        (["--chat-template", "nowhere.jinja"], "no such file"),
        (["--ssl-keyfile", "pyproject.toml"], "without --ssl-certfile"),
        (["--ssl-certfile", "pyproject.toml"], "--ssl-certfile pyproject.toml cannot be used"),
        (["--ssl-certfile", "pyproject.toml", "--ssl-keyfile", "nowhere"], "--ssl-keyfile nowhere: there is no such"),
        (["--address-file", "pyproject.toml/address"], "--address-file pyproject.toml/address cannot be written"),
        (["--address-file", "models"], "--address-file models cannot be written: .* Is a directory"),
        (["--address-file", "/proc/address"], "--address-file /proc/address cannot be written"),
        (["--api-key-file", "nowhere"], "cannot be read"),
        (["--api-key", "\u00e9"], "no HTTP header"),
    ],
)
def test_what_cannot_be_is_refused_at_once(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        settings(*words)


def test_the_folder_of_the_address_is_made_before_anything_is_loaded(tmp_path: Path) -> None:
    settings("--address-file", str(tmp_path / "new" / "address"))
    assert list((tmp_path / "new").iterdir()) == []


def test_the_address_of_a_server_that_was_killed_is_removed(tmp_path: Path) -> None:
    """Whoever waits for the file would take it for the new one's."""
    file = tmp_path / "address"
    file.write_text("http://127.0.0.1:1")
    settings("--address-file", str(file))
    assert not file.exists()


def test_beyond_loopback_a_key_or_insecure_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    assert settings("--host", "0.0.0.0", "--api-key-file", str(file)).api_keys == ("one", "two")
    assert settings("--host", "0.0.0.0", environ={"LOCKSTRIDE_API_KEY": "three"}).api_keys == ("three",)
    assert settings("--host", "0.0.0.0", "--insecure").api_keys == ()
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "")] == [
        *(True, True, True),
        *(False, False, False),
    ]


def test_a_broken_template_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% if %}")
    with pytest.raises(TokenizerError, match="cannot be compiled"):
        settings("--chat-template", str(broken))


def test_a_port_that_is_taken_is_refused_also_for_several_processes() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for processes in (1, 2):
            with pytest.raises(UsageError, match="cannot be listened on"):
                listeners("127.0.0.1", port, None, processes)


@pytest.mark.parametrize(
    ("host", "number", "said"),
    [
        ("127.0.0.1", errno.EADDRINUSE, "type another --port; 0 takes a free one"),
        ("127.0.0.1", errno.EACCES, "type a --port of 1024 or above"),
        ("192.0.2.1", errno.EADDRNOTAVAIL, "type an address of this machine"),
        ("nohost.invalid", None, "type an address of this machine"),
        ("a..b", None, "type an address of this machine"),
    ],
)
def test_an_address_that_cannot_be_listened_on_is_named_with_what_to_type(
    host: str, number: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bind(*_: object) -> NoReturn:
        assert number is not None
        raise OSError(number, os.strerror(number))

    if number is not None:
        monkeypatch.setattr(socket.socket, "bind", bind)
    for processes in (1, 2):
        with pytest.raises(UsageError) as raised:
            listeners(host, 80, None, processes)
        assert str(raised.value).startswith(f"--host {host} --port 80 cannot be listened on: ")
        assert said in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("host", ["nohost.invalid", "a..b"])
def test_a_name_that_is_no_host_s_is_no_question_of_keys(host: str) -> None:
    with pytest.raises(UsageError, match=f"--host {host} --port 8000 cannot be listened on: .*type an address"):
        settings("--host", host)


def test_several_processes_share_a_port_and_a_unix_socket_is_this_user_s(tmp_path: Path) -> None:
    made, address = listeners("127.0.0.1", 0, None, 3)
    assert {each.getsockname() for each in made} == {("127.0.0.1", int(address.rpartition(":")[2]))}
    path = tmp_path / "s"
    several, shown = listeners("", 0, path, 2)
    assert shown == f"unix:{path}"
    assert path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(UsageError):
        listeners("", 0, path, 1)
    for each in (*made, *several):
        each.close()
    (again,), _ = listeners("", 0, path, 1)  # nobody answers there: it is of a server that was killed
    again.close()

"""`serve`: an OpenAI-compatible server on rank 0, over an engine on all ranks.

Knows: what surrounds the engine's turns: ranks, model folder, sockets, API processes, signals, exit codes.
Does not know: HTTP (app.py), how turns are taken and sent (runtime/frontend/engine_server.py), how an engine works.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from launch.api.sampling_defaults import settled
from launch.errors import UsageError
from launch.ranks.process_group import joined
from launch.ranks.rendezvous import Rendezvous
from launch.ranks.signals import Interrupts
from launch.serve.options import ServeCommand, ServeOptions
from launch.serve.parsers.detect import calls_of, reasoning_of
from launch.serve.parsers.table import CALLS
from launch.serve.processes import ApiProcesses, listeners, not_listening
from launch.serve.settings import ServerSettings
from runtime.config import EngineConfig
from runtime.frontend.api_links import ApiLink, Beats, ServedEngine
from runtime.frontend.chat_template import ChatTemplate
from runtime.frontend.engine_server import EngineServer
from runtime.frontend.tokenizer import Tokenizer, no_tokenizer
from runtime.schedule.request import SamplingParams

OpenEngine = Callable[[EngineConfig, Rendezvous], AbstractContextManager[ServedEngine]]

_NEEDED = ("uvicorn", "starlette", "httptools", "prometheus_client")

log = logging.getLogger("lockstride")


class ApiProcessesFailed(RuntimeError):
    """No API process ever came up: their own log says why."""


def run(command: ServeCommand, environ: Mapping[str, str], open_engine: OpenEngine) -> int:
    """The whole command on this rank; returns its exit code.

    Raises UsageError, ConfigError, ModelConfigError, RendezvousError or TokenizerError before any work is done when it
    cannot be, ApiProcessesFailed later, and whatever the engine raises.
    """
    (rendezvous, config, defaults), options = settled(command, environ), command.options
    if not rendezvous.topology.is_leader:
        with joined(rendezvous, config.device), open_engine(config, rendezvous) as engine:
            return _follow(engine)
    settings = settings_of(config, options, defaults, environ)
    sockets, address = listeners(options.host, options.port, options.uds, options.api_processes)
    if options.ssl_certfile is not None:
        address = address.replace("http://", "https://", 1)
    processes, beats = ApiProcesses(settings, sockets), Beats()
    links: list[ApiLink] = []
    try:
        links += processes.start()
        log.info("%s", config.describe())
        beats.speak_to(links)
        beats.start()
        with joined(rendezvous, config.device), open_engine(config, rendezvous) as engine:
            return _lead(engine, options, processes, links, beats, address)
    finally:
        beats.stop()
        for link in links:
            link.close()  # of an engine that was never there: the processes end
        processes.close()
        if options.uds is not None:
            options.uds.unlink(missing_ok=True)


def _follow(engine: ServedEngine) -> int:
    with Interrupts() as interrupts:  # the leader drains for all: a signal to this rank changes only its exit code
        engine.follow()
        return interrupts.exit_code


def _lead(
    engine: ServedEngine,
    options: ServeOptions,
    processes: ApiProcesses,
    links: list[ApiLink],
    beats: Beats,
    address: str,
) -> int:
    def replace(lost: ApiLink, why: str) -> None:
        processes.replace(lost, server.connect)

    server = EngineServer(engine, links, beats, max_queued=options.max_queued_requests, replace=replace)
    engine.call_on_verdict(server.end)
    with Interrupts() as interrupts:

        def tend() -> None:
            if processes.given_up.is_set():
                raise ApiProcessesFailed("no API process comes up: see their messages above")
            if interrupts.signal is not None:
                server.drain(options.drain_seconds)
            if interrupts.hurry:
                server.hurry()

        log.info("serving on %s", address)
        _announce(options, address)
        server.run(tend)
        return interrupts.exit_code


def _announce(options: ServeOptions, address: str) -> None:
    if options.address_file is not None:
        temporary = _beside(options.address_file)
        temporary.write_text(address + "\n")
        temporary.replace(options.address_file)


def _beside(file: Path) -> Path:
    """Where it is written before it takes the place of ``file``, which is whole whenever it is read."""
    return file.with_name(file.name + ".tmp")


def settings_of(
    config: EngineConfig, options: ServeOptions, defaults: SamplingParams, environ: Mapping[str, str]
) -> ServerSettings:
    """Raises UsageError and TokenizerError: everything that can be wrong with a command line is found here."""
    calls, reasoning = _formats(options, *_texts_of(config, options))
    keys = _keys(options, environ)
    local = options.uds is None and _local(options)
    if not (keys or options.insecure or local) and options.uds is None:
        raise UsageError(
            f"--host {options.host} can be reached from other machines: set --api-key-file, or type --insecure to "
            "serve everybody"
        )
    _check_certificate(options)
    _check_address_file(options.address_file)
    try:
        release = version("lockstride")
    except PackageNotFoundError:
        release = "0"
    return ServerSettings(
        model=config.model,
        names=tuple(options.served_model_name or (config.model,)),
        defaults=defaults,
        max_tokens=options.max_tokens,
        chat_template=None if options.chat_template is None else str(options.chat_template),
        tool_call_parser=calls,
        reasoning_parser=reasoning,
        reasoning_field=options.reasoning_field,
        template_kwargs=options.default_chat_template_kwargs or {},
        api_keys=keys,
        allowed_origins=tuple(options.allowed_origins or ()),
        allowed_hosts=tuple(options.allowed_hosts or ((options.host,) if local and not keys else ())),
        root_path=options.root_path.rstrip("/"),
        max_body_bytes=options.max_body_bytes,
        max_bodies_bytes=options.max_bodies_bytes // options.api_processes,
        max_queued=options.max_queued_requests,
        keep_alive=options.timeout_keep_alive,
        body_seconds=options.timeout_body,
        comment_seconds=options.sse_comment_seconds,
        ssl_certfile=None if options.ssl_certfile is None else str(options.ssl_certfile),
        ssl_keyfile=None if options.ssl_keyfile is None else str(options.ssl_keyfile),
        processes=options.api_processes,
        version=release,
        device=config.device,
    )


def _texts_of(config: EngineConfig, options: ServeOptions) -> tuple[ChatTemplate | None, Tokenizer | None]:
    """The chat template and the tokenizer, once all that is read is there. Raises UsageError and TokenizerError."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(f"serve needs {', '.join(missing)}: pip install 'lockstride[serve]'")
    model = Path(config.model)
    if not model.is_dir():
        raise UsageError(f"--model {model}: there is no such folder")
    for flag, file in (
        ("--chat-template", options.chat_template),
        ("--ssl-certfile", options.ssl_certfile),
        ("--ssl-keyfile", options.ssl_keyfile),
    ):
        if file is not None and not file.is_file():
            raise UsageError(f"{flag} {file}: there is no such file")
    tokenizer = Tokenizer.if_any(model)
    if tokenizer is None:
        log.warning("%s", no_tokenizer(model))
    if options.chat_template is not None:
        return ChatTemplate.from_file(options.chat_template, model), tokenizer
    return ChatTemplate.from_folder(model), tokenizer


def _formats(options: ServeOptions, chat: ChatTemplate | None, tokenizer: Tokenizer | None) -> tuple[str, str]:
    """Of tool calls and of reasoning in answers: those that were asked for, or found. Raises UsageError."""
    calls, reasoning = options.tool_call_parser, options.reasoning_parser
    variables = options.default_chat_template_kwargs or {}
    if chat is None or tokenizer is None:
        calls, reasoning = ("none" if name == "auto" else name for name in (calls, reasoning))
    elif "auto" in (calls, reasoning):
        found = calls_of(chat, variables, tokenizer.added_ids.values()) if calls == "auto" else calls
        if reasoning == "auto":
            reasoning = reasoning_of(chat, variables, tokenizer.added_ids.values(), found) or "none"
        calls = found or "none"
        log.info(
            "answers: tool calls in the format %s, reasoning in %s, as the chat template renders a sample "
            "(--tool-call-parser, --reasoning-parser)",
            calls,
            reasoning,
        )
    if calls == "none" and options.enable_auto_tool_choice:
        raise UsageError(
            "--enable-auto-tool-choice: the chat template renders tool calls in no known format; type "
            f"--tool-call-parser with one of {', '.join(CALLS)}"
        )
    return calls, reasoning


def _check_address_file(file: Path | None) -> None:
    """Whether it can be written, once the model is loaded. Raises UsageError."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        _beside(file).touch()
        _beside(file).unlink()
        file.unlink(missing_ok=True)  # of a server that was killed
    except OSError as error:
        raise UsageError(f"--address-file {file} cannot be written: {error}") from error


def _check_certificate(options: ServeOptions) -> None:
    """Read here as an API process will: there, the model would be loaded before it is found to be none."""
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None:
            raise UsageError("--ssl-keyfile is given without --ssl-certfile")
        return
    key = "" if options.ssl_keyfile is None else f" --ssl-keyfile {options.ssl_keyfile}"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            options.ssl_certfile,
            options.ssl_keyfile,
            lambda: "",  # else OpenSSL asks a terminal, and waits
        )
    except OSError as error:  # SSLError is one
        raise UsageError(
            f"--ssl-certfile {options.ssl_certfile}{key} cannot be used: {error}; give a certificate and its key as "
            "PEM, the key without a password"
        ) from error


def _keys(options: ServeOptions, environ: Mapping[str, str]) -> tuple[str, ...]:
    keys = list(options.api_key or ())
    if options.api_key_file is not None:
        try:
            keys += [line.strip() for line in options.api_key_file.read_text().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key-file {options.api_key_file} cannot be read: {error}") from error
        if not keys:
            raise UsageError(f"--api-key-file {options.api_key_file} has no key in it")
    elif not keys and environ.get("LOCKSTRIDE_API_KEY"):
        keys.append(environ["LOCKSTRIDE_API_KEY"])
    if any(not key or not key.isascii() or not key.isprintable() for key in keys):
        raise UsageError("an API key is empty or has characters that no HTTP header can carry")
    return tuple(keys)


def _local(options: ServeOptions) -> bool:
    """Whether only this machine can reach the host. Raises UsageError for a name that has no address."""
    try:
        return is_loopback(options.host)
    except (OSError, UnicodeError) as error:
        raise not_listening(options.host, options.port, error) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it; a name counts by all of its addresses. Raises OSError or UnicodeError for
    a name that has none.
    """
    if not host:  # bind takes all addresses of this machine
        return False
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    return all(ipaddress.ip_address(str(address).split("%")[0]).is_loopback for address in found)

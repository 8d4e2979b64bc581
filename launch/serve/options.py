"""The command line of `serve`: its own options, besides the engine's.

Knows: flags, defaults and units. Does not know: what is done with them (serve/command.py), the engine's options.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.engine_options import WARMED, EngineCommand, RequestDefaults, add_engine_options
from launch.options import add_command, choice, option, switch
from launch.serve.parsers.table import CALLS, REASONING
from launch.serve.settings import MAX_BODIES_BYTES, MAX_BODY_BYTES
from launch.values import at_least_one, bounded, integer, json_object, number

_FOUND = "auto finds it by rendering a sample with the chat template"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(RequestDefaults):
    """What `serve` needs besides the engine's own options."""

    host: str = option(
        "address to listen on; beyond loopback only with --api-key or --insecure", "address", str, "127.0.0.1"
    )
    port: int = option("port to listen on; 0 takes a free one", "port", bounded(integer, 0, 65535), 8000)
    uds: Path | None = option("Unix socket to listen on instead of a port", "file", Path, None)
    api_processes: int = option(
        "processes for HTTP, templates, tokenizing and JSON", "processes", bounded(integer, 1, 64), 1
    )
    api_key: tuple[str, ...] | None = option(
        "keys that clients must send; better in --api-key-file: others may see command lines",
        "key",
        str,
        None,
        "LOCKSTRIDE_API_KEY, else none",
        nargs="+",
    )
    api_key_file: Path | None = option("file with such keys, one a line", "file", Path, None)
    insecure: bool = switch("allow everybody who can reach the address")
    served_model_name: tuple[str, ...] | None = option(
        "names of the model in requests; the first is reported", "name", str, None, "--model", nargs="+"
    )
    root_path: str = option("path under which a proxy passes requests on", "path", str, "", "none")
    allowed_origins: tuple[str, ...] | None = option(
        "web pages of these origins may call (CORS)", "origin", str, None, nargs="+"
    )
    allowed_hosts: tuple[str, ...] | None = option(
        "names in the Host header besides those of this machine; * is any",
        "name",
        str,
        None,
        "none on loopback without a key, else any",
        nargs="+",
    )
    ssl_certfile: Path | None = option("TLS certificate", "file", Path, None, "none: HTTP")
    ssl_keyfile: Path | None = option("its key", "file", Path, None, "in --ssl-certfile")
    chat_template: Path | None = option(
        "chat template instead of the model folder's", "file", Path, None, "the model folder's"
    )
    default_chat_template_kwargs: dict[str, Any] | None = option(
        "variables of the chat template where a request sets none", "JSON", json_object, None
    )
    enable_auto_tool_choice: bool = switch(
        "refuse to start where the format of tool calls is not found", shown="requests with tools are refused"
    )
    tool_call_parser: str = choice(
        f"format of tool calls in answers; none refuses tools; {_FOUND}", ("auto", "none", *CALLS), "auto"
    )
    reasoning_parser: str = choice(
        f"format of reasoning in answers; none leaves it in the content; {_FOUND}", ("auto", "none", *REASONING), "auto"
    )
    reasoning_field: str = choice("name of the reasoning in answers", ("reasoning", "reasoning_content"), "reasoning")
    max_queued_requests: int = option(
        "answers that may wait for their first step; more are refused with 503", "answers", at_least_one, 4096
    )
    max_body_bytes: int = option(
        "longest body of a request; longer ones are refused with 413",
        "bytes",
        bounded(integer, 1, 1 << 30),
        MAX_BODY_BYTES,
    )
    max_bodies_bytes: int = option(
        "all bodies not decoded yet; beyond, the largest is refused with 503", "bytes", at_least_one, MAX_BODIES_BYTES
    )
    timeout_keep_alive: int = option("an idle connection is kept for so long", "seconds", at_least_one, 120)
    timeout_body: float = option(
        "a body that is not whole after so long is cut off with 408", "seconds", bounded(number, 1), 60.0
    )
    sse_comment_seconds: float = option(
        "send a comment after so long a silence in a stream; some clients break on them",
        "seconds",
        bounded(number, 0),
        0.0,
        "0: never",
    )
    address_file: Path | None = option(
        "file for the address, written once it is ready to answer", "file", Path, None, "not written"
    )


class ServeCommand(EngineCommand[ServeOptions]):
    """A parsed command line."""

    name = "serve"


def serve_command(given: dict[str, Any], engine: Mapping[str, Any]) -> ServeCommand:
    """From what argparse found, the engine's options taken out."""
    return ServeCommand(engine, ServeOptions(**given))


def add_serve_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = add_command(
        commands,
        "serve",
        "an OpenAI-compatible server",
        "Serve completions and chats over HTTP, as OpenAI's API does. SIGTERM drains: what runs may finish "
        "within --drain-seconds; a second one ends it. Exit code: 143, 130 or 129 after SIGTERM, SIGINT or SIGHUP, 2 "
        "the command line is wrong, 70 the engine failed.",
        ServeOptions,
    )
    add_engine_options(serve, shown=WARMED)

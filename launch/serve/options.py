"""The command line of `serve`: its own options, beside the engine's.

Knows: flags, defaults and units. Does not know: what is done with them (serve/command.py), the engine's options.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launch.engine_options import WARMED, add_engine_options
from launch.serve.parsers.table import CALLS, REASONING
from launch.serve.settings import MAX_BODIES_BYTES, MAX_BODY_BYTES
from launch.values import at_least_one, bounded, integer, json_object, number
from runtime.config import EngineConfig


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `serve` needs beside the engine's own options."""

    host: str
    port: int
    uds: Path | None
    api_processes: int
    api_key: list[str] | None
    api_key_file: Path | None
    insecure: bool
    served_model_name: list[str] | None
    root_path: str
    allowed_origins: list[str] | None
    allowed_hosts: list[str] | None
    ssl_certfile: Path | None
    ssl_keyfile: Path | None
    chat_template: Path | None
    default_chat_template_kwargs: dict[str, Any] | None
    enable_auto_tool_choice: bool
    tool_call_parser: str
    reasoning_parser: str
    reasoning_field: str
    max_queued_requests: int
    max_body_bytes: int
    max_bodies_bytes: int
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    generation_config: Literal["auto", "none"]
    timeout_keep_alive: int
    timeout_body: float
    sse_comment_seconds: float
    drain_seconds: float
    address_file: Path | None


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """A parsed command line. ``engine`` holds the EngineConfig fields that were given, and only those."""

    name: str
    engine: Mapping[str, Any]
    serve: ServeOptions

    def engine_config(self, tensor_parallel: int) -> EngineConfig:
        """``tensor_parallel``: as check_degrees found it. Raises ConfigError."""
        return EngineConfig(**{**self.engine, "tensor_parallel": tensor_parallel})


def serve_command(given: dict[str, Any], engine: Mapping[str, Any]) -> ServeCommand:
    """From what argparse found, the engine's options taken out."""
    return ServeCommand("serve", engine, ServeOptions(**given))


def add_serve_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser(
        "serve",
        help="an OpenAI-compatible server",
        description="Serve completions and chats over HTTP, as OpenAI's API does. SIGTERM drains: what runs may finish "
        "within --drain-seconds; a second one ends it. Exit code: 143, 130 or 129 after SIGTERM, SIGINT or SIGHUP, 2 "
        "the command line is wrong, 70 the engine failed.",
        allow_abbrev=False,
    )
    _add_options(serve)
    add_engine_options(serve.add_argument_group("engine"), shown=WARMED)


def _add_options(parser: argparse.ArgumentParser) -> None:
    def option(flag: str, help_text: str, unit: str, read: Callable[[str], Any], default: Any, shown: str = "") -> None:
        help_text = f"{help_text} (default: {shown or default}) [{unit}]"
        parser.add_argument(flag, help=help_text, type=read, default=default, metavar=unit.upper())

    def several(flag: str, help_text: str, unit: str, shown: str) -> None:
        parser.add_argument(
            flag, nargs="+", default=None, metavar=unit.upper(), help=f"{help_text} (default: {shown}) [{unit}]"
        )

    option("--host", "address to listen on; beyond loopback only with --api-key or --insecure", "address", str,
           "127.0.0.1")  # fmt: skip
    option("--port", "port to listen on; 0 takes a free one", "port", bounded(integer, 0, 65535), 8000)
    option("--uds", "Unix socket to listen on instead of a port", "file", Path, None, "none")
    option("--api-processes", "processes for HTTP, templates, tokenizing and JSON", "processes",
           bounded(integer, 1, 64), 1)  # fmt: skip
    several("--api-key", "keys that clients must send; better in --api-key-file: others may see command lines", "key",
            "LOCKSTRIDE_API_KEY, else none")  # fmt: skip
    option("--api-key-file", "file with such keys, one a line", "file", Path, None, "none")
    parser.add_argument(
        "--insecure", action="store_true", help="allow everybody who can reach the address (default: off) [switch]"
    )
    several("--served-model-name", "names of the model in requests; the first is reported", "name", "--model")
    option("--root-path", "path under which a proxy passes requests on", "path", str, "", "none")
    several("--allowed-origins", "web pages of these origins may call (CORS)", "origin", "none")
    several("--allowed-hosts", "names in the Host header besides those of this machine; * is any", "name",
            "none on loopback without a key, else any")  # fmt: skip
    option("--ssl-certfile", "TLS certificate", "file", Path, None, "none: HTTP")
    option("--ssl-keyfile", "its key", "file", Path, None, "in --ssl-certfile")
    option("--chat-template", "chat template instead of the model folder's", "file", Path, None, "the model folder's")
    option("--default-chat-template-kwargs", "variables of the chat template where a request sets none", "JSON",
           json_object, None, "none")  # fmt: skip
    parser.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="refuse to start where the format of tool calls is not found (default: requests with tools are refused) "
        "[switch]",
    )
    found = "auto finds it by rendering a sample with the chat template"
    for flag, names, what in (
        ("--tool-call-parser", CALLS, "tool calls in answers; none refuses tools"),
        ("--reasoning-parser", REASONING, "reasoning in answers; none leaves it in the content"),
    ):
        help_text = f"format of {what}; {found} (default: auto) [word]"
        parser.add_argument(flag, choices=("auto", "none", *names), default="auto", help=help_text)
    parser.add_argument(
        "--reasoning-field",
        choices=("reasoning", "reasoning_content"),
        default="reasoning",
        help="name of the reasoning in answers (default: reasoning) [word]",
    )
    option("--max-queued-requests", "answers that may wait for their first step; more are refused with 503", "answers",
           at_least_one, 4096)  # fmt: skip
    option("--max-body-bytes", "longest body of a request; longer ones are refused with 413", "bytes",
           bounded(integer, 1, 1 << 30), MAX_BODY_BYTES)  # fmt: skip
    option("--max-bodies-bytes", "all bodies not decoded yet; beyond, the largest is refused with 503", "bytes",
           at_least_one, MAX_BODIES_BYTES)  # fmt: skip
    silent = "default for requests without one: "
    option("--max-tokens", silent + "maximum number of output tokens", "tokens", at_least_one, None,
           "16; chats: what fits")  # fmt: skip
    option("--temperature", silent + "sampling temperature, 0 is greedy", "number", bounded(number, 0), None, "1.0")
    option("--top-p", silent + "top-p", "share", bounded(number, 1e-9, 1), None, "1.0")
    option("--top-k", silent + "top-k, 0 is all tokens", "tokens", bounded(integer, 0, 2**31 - 1), None, "0")
    parser.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="sampling parameters that neither request nor option gives; auto takes them from the model's "
        "generation_config.json, none the API's defaults (default: auto) [word]",
    )
    option("--timeout-keep-alive", "an idle connection is kept for so long", "seconds", at_least_one, 120)
    option("--timeout-body", "a body that is not whole after so long is cut off with 408", "seconds",
           bounded(number, 1), 60.0)  # fmt: skip
    option("--sse-comment-seconds", "send a comment after so long a silence in a stream; some clients break on them",
           "seconds", bounded(number, 0), 0.0, "0: never")  # fmt: skip
    option("--drain-seconds", "after SIGTERM or SIGINT, time for running requests to finish", "seconds",
           bounded(number, 0), 20.0)  # fmt: skip
    option("--address-file", "file for the address, written once it is ready to answer", "file", Path, None,
           "not written")  # fmt: skip

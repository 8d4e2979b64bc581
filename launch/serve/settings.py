"""What rank 0 sends an API process before anything else: how to listen, what to serve under which names, limits.

Knows: the settings and their defaults. Does not know: the command line they come from (options.py), how they are acted
on (app.py, api_process.py).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from runtime.schedule.request import SamplingParams

MAX_BODY_BYTES: Final = 32 << 20
MAX_BODIES_BYTES: Final = 256 << 20


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``names``: what the model is called in requests; the first is reported. ``defaults``: sampling where a request
    does not say; ``max_tokens`` the same for that one, None for the OpenAI API's.

    ``tool_call_parser`` and ``reasoning_parser``: formats of answers (parsers/table.py), or none; ``reasoning_field``:
    the name of reasoning in answers. ``template_kwargs``: variables of the chat template where a request sets none.
    ``index`` of ``processes``: which API process this is. ``metrics``: descriptors of memory where they leave their
    counts, one for each. ``version``: Lockstride's. ``retry_after``: seconds that a refused client is asked to wait.
    """

    model: str
    names: tuple[str, ...]
    metrics: tuple[int, ...] = ()
    defaults: SamplingParams = msgspec.field(default_factory=SamplingParams)
    max_tokens: int | None = None
    chat_template: str | None = None
    tool_call_parser: str = "none"
    reasoning_parser: str = "none"
    reasoning_field: str = "reasoning"
    template_kwargs: dict[str, Any] = {}
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    root_path: str = ""
    max_body_bytes: int = MAX_BODY_BYTES
    max_bodies_bytes: int = MAX_BODIES_BYTES  # of this process
    max_queued: int = 2**31  # answers that may wait at once
    keep_alive: int = 120
    header_seconds: float = 30.0
    body_seconds: float = 60.0
    comment_seconds: float = 0.0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    index: int = 0
    processes: int = 1
    retry_after: int = 1
    version: str = "0"
    device: str = "cpu"


def encoded(settings: ServerSettings) -> bytes:
    return msgspec.json.encode(settings)


def decoded(data: bytes) -> ServerSettings:
    return msgspec.json.decode(data, type=ServerSettings)

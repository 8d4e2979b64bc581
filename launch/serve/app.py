"""The ASGI application of an API process: routes, keys, limits, health. Any ASGI server can run it.

Knows: the routes and what each answers; what every request passes on its way in and out. Does not know: how requests
become sequences (requests.py), how answers are streamed (generation.py), sockets, processes.

Probes (/health, /ready, /ping, /version, /metrics, /load) answer from memory, need no key and send nothing to the
engine.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from launch.serve.access import Access
from launch.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, decode
from launch.serve.errors import ApiError, bad_request, unavailable
from launch.serve.generation import Generation
from launch.serve.http_protocol import CROWDED
from launch.serve.incoming import Incoming
from launch.serve.metrics import Metrics
from launch.serve.requests import MOST_TOKENS, Asked, RequestBuilder
from launch.serve.responses import ResponsesBody, as_chat, as_sent, respond
from launch.serve.settings import ServerSettings
from launch.serve.sse import EventStream
from runtime.frontend.chat_template import ChatTemplate
from runtime.frontend.remote_engine import EngineLost, RemoteEngine
from runtime.frontend.tokenizer import Tokenizer
from runtime.frontend.validation import RequestError, check_ids_exist

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version", "/metrics", "/load", "/"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_UNKNOWN = "unknown"  # the handler of a path that no route has: clients must not invent labels

log = logging.getLogger("lockstride.api")

_Answer = Response | EventStream
_Made = TypeVar("_Made")


class ServeApp:
    """One an API process. ``tokenizer`` and ``chat`` are None where the model's folder has none."""

    def __init__(
        self,
        settings: ServerSettings,
        engine: RemoteEngine,
        metrics: Metrics,
        tokenizer: Tokenizer | None,
        chat: ChatTemplate | None,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.metrics = metrics
        self._tokenizer = tokenizer
        self._chat = chat
        self._builder: RequestBuilder | None = None
        self._started = int(time.time())
        self._keys = [sha256(key.encode()).digest() for key in settings.api_keys]
        self._access = Access(settings.allowed_hosts, settings.allowed_origins)
        self._page = (files("launch.serve") / "page.html").read_bytes()
        self.in_flight = 0  # HTTP requests, probes aside
        self._incoming = Incoming(settings.max_body_bytes, settings.max_bodies_bytes, settings.retry_after)

        def route(path: str, handler: Callable[[Request], Awaitable[_Answer]], *methods: str) -> Route:
            return Route(path, handler, methods=list(methods or ("GET",)))

        self._router = Router(
            [
                route("/v1/completions", self._completions, "POST"),
                route("/v1/chat/completions", self._chat_completions, "POST"),
                route("/v1/responses", self._responses, "POST"),
                route("/v1/models", self._models),
                route("/v1/models/{name:path}", self._model),
                route("/tokenize", self._tokenize, "POST"),
                route("/detokenize", self._detokenize, "POST"),
                route("/reset_prefix_cache", self._reset_prefix_cache, "POST"),
                route("/tokenizer_info", self._tokenizer_info),
                route("/health", self._health),
                route("/ping", self._health, "GET", "POST"),
                route("/ready", self._ready),
                route("/version", self._version),
                route("/load", self._load),
                route("/metrics", self._metrics),
                route("/", self._index),
            ],
            redirect_slashes=False,
        )
        self._app: ASGIApp = self._answer
        if settings.allowed_origins:  # around everything: a browser shows no error that comes without these headers
            from starlette.middleware.cors import CORSMiddleware

            self._app = CORSMiddleware(
                self._answer,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "POST", "OPTIONS"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        root = self.settings.root_path
        if root and scope["path"].startswith(root):
            scope = {**scope, "path": scope["path"][len(root) :] or "/", "root_path": ""}
        began, status = time.monotonic(), 500
        scope["app"] = self  # so that Starlette raises, where it would else answer in plain text
        scope["request_id"] = request_id = _request_id(scope)

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        refused = self._access.refusal(scope)
        try:
            await (self._app if refused is None else refused.response())(scope, receive, send_noted)
        except ClientDisconnect:
            status = 499
        finally:
            self.metrics.http(scope["method"], _handler(scope), status, time.monotonic() - began)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """By a route, or with what went wrong. Raises ClientDisconnect, and what fails in the middle of an answer."""
        headed = False

        async def send_noted(message: Message) -> None:
            nonlocal headed
            headed = headed or message["type"] == "http.response.start"
            await send(message)

        try:
            self._admit(scope)
            await self._router(scope, receive, send_noted)
        except ApiError as error:
            self.metrics.refused(error.param)
            await error.response()(scope, receive, send)
        except HTTPException as error:
            await _of_http(error)(scope, receive, send)
        except ClientDisconnect:
            raise
        except Exception:
            log.exception("a request failed that should not have")
            if headed:
                raise
            failed = ApiError(500, "an internal error; the server's log has it", kind="internal_server_error")
            await failed.response()(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        """Raises ApiError 401 without a key that is one of ours. Takes as long for every wrong key.

        And 503 on a connection that is there for probes alone.
        """
        if scope["path"] in OPEN_PATHS:
            return
        if CROWDED in scope.get("state", ()):
            raise self._rejected("too many connections", "too_many_connections")
        if not self._keys or scope["method"] == "OPTIONS":
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        digest = sha256(token.strip()).digest()
        known = [hmac.compare_digest(digest, key) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(known):
            raise ApiError(
                401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key"
            )

    # ---- generation ----

    async def _completions(self, request: Request) -> _Answer:
        return await self._generate(
            request, "cmpl", lambda data: self._requests().completion(decode(data, CompletionBody))
        )

    async def _chat_completions(self, request: Request) -> _Answer:
        return await self._generate(request, "chatcmpl", lambda data: self._requests().chat(decode(data, ChatBody)))

    async def _responses(self, request: Request) -> _Answer:
        bodies: list[ResponsesBody] = []

        def asked(data: bytearray) -> Asked:
            bodies.append(decode(data, ResponsesBody))
            return self._requests().chat(as_chat(bodies[0]))

        try:
            answer = await self._generate(request, "resp", asked)
        except ApiError as error:
            raise as_sent(error) from None
        return await respond(answer, bodies[0], self.settings)

    async def _generate(self, request: Request, prefix: str, read: Callable[[bytearray], Asked]) -> _Answer:
        arrived_at = time.monotonic()
        self._refuse_unless_serving()
        asked = await self._take(request, read)
        stats, waiting = self.engine.stats, len(asked.sequences)
        if stats is not None and stats.full and waiting:
            raise self._rejected("queue full: too many requests wait already", "queue_full")
        answer_id = f"{prefix}-{request.scope['request_id']}"
        generation = Generation(asked, self.engine, self.settings, self.metrics, self._tokenizer, answer_id, arrived_at)
        return await generation.respond(request)

    async def _take(self, request: Request, use: Callable[[bytearray], _Made]) -> _Made:
        """``use`` of the request's body. Clients are identified by their keys, else by their addresses."""
        name = request.headers.get("authorization") if self._keys else request.client and request.client.host
        return await self._incoming.take(request, name, use)

    def _requests(self) -> RequestBuilder:
        """Raises ApiError 503 while the engine loads."""
        if self._builder is None:
            if self.engine.ready is None:
                raise unavailable("the model is loading", "loading", 5)
            self._builder = RequestBuilder(self.settings, self.engine.ready, self._tokenizer, self._chat)
        return self._builder

    def _refuse_unless_serving(self) -> None:
        if self.engine.draining:
            raise self._rejected("the server is shutting down", "shutting_down")
        if self.engine.ended is not None:
            raise self._rejected(f"the engine ended: {self.engine.ended}", "engine_lost")
        if self.engine.ready is None:
            raise self._rejected("the model is loading", "loading", 5)

    def _rejected(self, message: str, code: str, retry_after: int | None = None) -> ApiError:
        """Of a request to generate, at the door; counted."""
        self.metrics.rejected(code)
        return unavailable(message, code, self.settings.retry_after if retry_after is None else retry_after)

    # ---- models and tokens ----

    def _card(self, name: str) -> dict[str, object]:
        ready = self.engine.ready
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "lockstride",
            "root": self.settings.model,
            "parent": None,
            "max_model_len": None if ready is None else ready.max_model_len,
        }

    async def _models(self, request: Request) -> Response:
        self._requests()
        return _json({"object": "list", "data": [self._card(name) for name in self.settings.names]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.settings.names:
            raise ApiError(404, f"the model {name[:200]!r} is not served here", code="model_not_found", param="model")
        self._requests()
        return _json(self._card(name))

    async def _tokenize(self, request: Request) -> Response:
        def tokens(data: bytearray) -> bytes:
            body = decode(data, TokenizeBody)
            ids = self._requests().tokens(body)
            strings = None
            if body.return_token_strs and self._tokenizer is not None:
                strings = [self._tokenizer.id_to_token(token) for token in ids]
            ready = self.engine.ready
            most = 0 if ready is None else ready.max_model_len
            row = {"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": strings}
            return msgspec.json.encode(row)

        return _json_bytes(await self._take(request, tokens))

    async def _detokenize(self, request: Request) -> Response:
        def prompt(data: bytearray) -> bytes:
            body = decode(data, DetokenizeBody)
            self._requests().model_name(body.model)
            tokenizer, ready = self._tokenizer, self.engine.ready
            if tokenizer is None or ready is None:
                raise bad_request("the model folder has no tokenizer.json", "tokens")
            if len(body.tokens) > max(ready.max_model_len, MOST_TOKENS):
                raise bad_request(
                    f"tokens has {len(body.tokens)} ids, but at most {MOST_TOKENS} are possible", "tokens"
                )
            try:
                check_ids_exist(body.tokens, ready.vocab_size, "tokens[{}]")
            except RequestError as error:
                raise bad_request(str(error), "tokens") from None
            return msgspec.json.encode({"prompt": tokenizer.decode_with_special_tokens(body.tokens)})

        return _json_bytes(await self._take(request, prompt))

    async def _tokenizer_info(self, request: Request) -> Response:
        path = Path(self.settings.model) / "tokenizer_config.json"
        try:
            config = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        except (OSError, msgspec.MsgspecError):
            config = {}
        return _json({**config, "tokenizer_class": config.get("tokenizer_class", "PreTrainedTokenizerFast")})

    async def _reset_prefix_cache(self, request: Request) -> Response:
        self._requests()
        try:
            await self.engine.reset_prefix_cache()
        except EngineLost as error:
            raise unavailable(str(error), "engine_lost", self.settings.retry_after) from None
        return Response()

    # ---- probes ----

    async def _trouble(self) -> str | None:
        """Of the engine. What this process may have been too busy to read, it reads first."""
        for _ in range(2):
            if self.engine.health().trouble is None:
                return None
            await asyncio.sleep(0)
        return self.engine.health().trouble

    async def _health(self, request: Request) -> Response:
        trouble = await self._trouble()
        return _json({"status": "ok"}) if trouble is None else _unwell(trouble)

    async def _ready(self, request: Request) -> Response:
        engine, trouble = self.engine, await self._trouble()
        if trouble is None and engine.draining:
            trouble = "draining"
        if trouble is None and engine.stats is not None and engine.stats.full:
            trouble = "the queue is full"
        return _json({"status": "ready"}) if trouble is None else _unwell(trouble)

    async def _version(self, request: Request) -> Response:
        return _json({"version": self.settings.version})

    async def _load(self, request: Request) -> Response:
        stats = self.engine.stats
        if stats is None:
            return _json({"server_load": 0})
        usage = stats.used_blocks / stats.blocks if stats.blocks else 0.0
        running = {"running": stats.running, "waiting": stats.queued, "kv_cache_usage": round(usage, 6)}
        return _json({"server_load": stats.running + stats.queued, **running})

    async def _metrics(self, request: Request) -> Response:
        page = self.metrics.text(self.settings.names[0], self.engine.ready, self.engine.stats)
        return Response(page, headers={"content-type": _METRICS_TYPE})

    async def _index(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html")


def _handler(scope: Scope) -> str:
    """The route that a request took, for labels of bounded number."""
    route = scope.get("route")
    path = getattr(route, "path", None)
    if isinstance(path, str):
        return path
    return str(scope["path"]) if scope["path"] in OPEN_PATHS else _UNKNOWN


def _request_id(scope: Scope) -> str:
    """The client's own, where it is printable and short; else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin-1")):
            return str(value, "latin-1")
    return uuid4().hex


def _json(value: object, status: int = 200) -> Response:
    return _json_bytes(msgspec.json.encode(value), status)


def _json_bytes(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


def _unwell(trouble: str) -> Response:
    return _json({"status": "unavailable", "reason": trouble}, 503)


def _of_http(error: HTTPException) -> Response:
    """Starlette's own: a path or a method that is not there."""
    said = {404: "there is no such route", 405: "the route has no such method"}.get(error.status_code, error.detail)
    response = ApiError(error.status_code, said, code={404: "not_found"}.get(error.status_code)).response()
    response.headers.update(error.headers or {})
    return response

"""What a client gets when a request is not served: status, OpenAI error object, headers.

Knows: which trouble is which status, type and code. Does not know: who finds it.
"""

from __future__ import annotations

import re

import msgspec
from starlette.responses import Response

_AT = re.compile(r" - at (?:`\w+` in )?`\$((?:\.[\w]+|\[[^\]]*\])*)`")
_MISSING = re.compile(r"missing required field `(\w+)`$")
_JSON = "application/json"


class ApiError(Exception):
    """``status`` and the four fields of an OpenAI error object. ``retry_after``: seconds, where trying again helps."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> bytes:
        """The JSON object, in one line."""
        fields = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": fields})

    def response(self) -> Response:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(self.body, self.status, headers, _JSON)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(name: str, why: str = "this engine does not have it") -> ApiError:
    """A field that is understood, but cannot be done: it is never ignored silently."""
    return bad_request(f"{name} is not supported: {why}; leave it out", name, "unsupported_parameter")


def unavailable(message: str, code: str, retry_after: int) -> ApiError:
    return ApiError(503, message, kind="service_unavailable", code=code, retry_after=retry_after)


def undecodable(error: Exception) -> ApiError:
    """Of a body that is not JSON, or not what the route takes."""
    if isinstance(error, RecursionError):
        return bad_request("the body is nested too deeply")
    if isinstance(error, UnicodeDecodeError):
        wrong = error.object[error.start]  # its place is known within one text only, not within the body
        return bad_request(f"the body is not UTF-8: {error.reason} (byte 0x{wrong:02x})")
    text = str(error)
    found = _AT.search(text)
    path = found.group(1).lstrip(".") if found else ""
    if path:
        return bad_request(f"{path}: {_AT.sub('', text)}", path.split(".")[0].split("[")[0])
    missing = _MISSING.search(text)
    return bad_request(f"the body is no JSON that this route takes: {text}", missing and missing.group(1))


def refused_by_engine(detail: str, retry_after: int) -> ApiError:
    """Of a request that the engine refused before its first token; ``detail`` begins with why in one word."""
    if detail.startswith("invalid: "):
        return bad_request(detail.removeprefix("invalid: "))
    if detail.startswith("queue full"):
        return unavailable(detail, "queue_full", retry_after)
    if detail.startswith("draining"):
        return unavailable(detail, "shutting_down", retry_after)
    if "queue" in detail:
        return unavailable(detail, "queue_full", retry_after)
    return bad_request(detail or "the engine refused the request")


def engine_failed(detail: str) -> ApiError:
    return ApiError(500, detail, kind="internal_server_error", code="engine_error")

"""Which names a server answers to, and which web pages may ask it, where it has no key that would say so.

Knows: the headers Host and Origin. Does not know: keys, CORS (app.py).

A browser of this machine reaches what listens on loopback, for any page that it shows. A page of another site names
itself in Origin; one whose own name was made to point at 127.0.0.1 (DNS rebinding) has that name in Host, and to the
browser it is the same site as the server.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from starlette.types import Scope

from launch.serve.errors import ApiError


class Access:
    """``hosts``: names besides those of this machine; "*" is any, and none at all leaves requests unchecked.

    ``origins``: of pages that may ask, besides this machine's own; "*" is any.
    """

    def __init__(self, hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._checks = bool(hosts) and "*" not in hosts
        self._hosts = set(map(_name_in, hosts))
        self._origins = set(origins)

    def refusal(self, scope: Scope) -> ApiError | None:
        """Why the request is not to be answered, 403, or None."""
        if not self._checks:
            return None
        for host in _values(scope, b"host"):
            if not self._is_here(_name_in(host)):
                return _forbidden(f"the Host {host[:200]!r} is not this server's: --allowed-hosts adds names")
        for origin in _values(scope, b"origin"):
            scheme, _, rest = origin.partition("://")
            if not self._origins & {origin, "*"} and not (
                scheme in ("http", "https") and self._is_here(_name_in(rest))
            ):
                return _forbidden(f"pages of {origin[:200]!r} may not ask: --allowed-origins adds origins")
        return None

    def _is_here(self, name: str) -> bool:
        if name in self._hosts or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or address.is_unspecified


def _values(scope: Scope, name: bytes) -> Iterable[str]:
    return (value.decode("latin-1") for given, value in scope["headers"] if given == name)


def _name_in(host: str) -> str:
    """Without its port."""
    name = host[1:].partition("]")[0] if host.startswith("[") and "]" in host else host.partition(":")[0]
    return name.strip().lower().removesuffix(".")


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, code="forbidden")

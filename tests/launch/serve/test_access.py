"""Who may ask a server without a key: names in Host, and pages in Origin."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Scope

from launch.serve.access import Access
from tests.launch.serve.rig import Client, served
from tests.launch.serve.test_command import settings

HERE = [
    "localhost",
    "LOCALHOST:8000",
    "127.0.0.1:8000",
    "127.3.2.1",
    "[::1]:8000",
    "0.0.0.0:8000",
    "a.localhost",
    "my.name:1",
]
OTHERS = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "[::2]",
          "", "1.0.0.127", "[localhost", "localhost@evil.example"]  # fmt: skip


def scope(**headers: str) -> Scope:
    return {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]}


@pytest.mark.parametrize("host", HERE)
def test_this_machine_s_names_are_answered(host: str) -> None:
    access = Access(("my.name",), ())
    assert access.refusal(scope(host=host)) is None
    for scheme in ("http", "https"):
        assert access.refusal(scope(host=host, origin=f"{scheme}://{host}")) is None


@pytest.mark.parametrize("host", OTHERS)
def test_a_name_that_was_made_to_point_here_is_refused(host: str) -> None:
    refused = Access(("127.0.0.1",), ()).refusal(scope(host=host))
    assert refused is not None
    assert (refused.status, refused.code) == (403, "forbidden")
    assert "--allowed-hosts" in refused.message
    for hosts in ((), ("*",), (host, "x") if host else ("*", "x")):
        assert Access(hosts, ()).refusal(scope(host=host)) is None


@pytest.mark.parametrize("origin", ["null", "file://", "http://evil.example", "https://localhost.evil.example",
                                    "chrome-extension://localhost", "http://"])  # fmt: skip
def test_pages_of_other_sites_are_refused(origin: str) -> None:
    refused = Access(("127.0.0.1",), ("https://app.example",)).refusal(scope(host="localhost", origin=origin))
    assert refused is not None
    assert "--allowed-origins" in refused.message
    for origins in ((origin,), ("*",)):
        assert Access(("127.0.0.1",), origins).refusal(scope(host="localhost", origin=origin)) is None


def test_a_client_that_names_no_host_is_no_browser() -> None:
    assert Access(("127.0.0.1",), ()).refusal(scope()) is None


@pytest.mark.parametrize("origins", [(), ("https://app.example",)])
def test_nothing_of_a_server_is_answered_to_another_site(origins: tuple[str, ...]) -> None:
    """Not the question of a browser either whether it may ask."""

    async def body(client: Client) -> None:
        for method, path in (("GET", "/health"), ("GET", "/metrics"), ("OPTIONS", "/v1/completions"), ("GET", "/")):
            reply = await client.call(method, path, b"", {"host": "evil.example"})
            assert (reply.status, reply.error["code"]) == (403, "forbidden")
        for origin, status in (("http://evil.example", 403), ("https://app.example", 200 if origins else 403)):
            reply = await client.post(
                "/v1/completions", {"prompt": [5], "max_tokens": 1}, origin=origin, host="localhost"
            )
            assert reply.status == status

    async def inside() -> None:
        async with served(allowed_hosts=("127.0.0.1",), allowed_origins=origins) as client:
            await body(client)

    asyncio.run(inside())


@pytest.mark.parametrize(
    ("words", "hosts"),
    [
        ((), ("127.0.0.1",)),
        (("--host", "localhost", "--insecure"), ("localhost",)),
        (("--api-key", "k"), ()),
        (("--api-key", "k", "--allowed-hosts", "a"), ("a",)),
        (("--allowed-hosts", "a", "b"), ("a", "b")),
        (("--allowed-hosts", "*"), ("*",)),
        (("--host", "0.0.0.0", "--insecure"), ()),
        (("--uds", "socket"), ()),
    ],
)
def test_without_a_key_loopback_is_for_this_machine_s_pages(words: tuple[str, ...], hosts: tuple[str, ...]) -> None:
    assert settings(*words).allowed_hosts == hosts

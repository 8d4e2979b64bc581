"""The short form of soak.py: HTTP around an engine without a model, in processes of its own."""

from __future__ import annotations

import asyncio

import pytest

from tests.launch.serve import soak

pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
def test_requests_aborts_and_broken_bytes_leave_nothing_behind() -> None:
    words = ["--requests", "50", "--aborts", "50", "--malformed", "60", "--overload", "80"]
    words += ["--answers", "12", "--max-queued", "40"]  # more work than a server on a busy machine accepts meanwhile
    told = asyncio.run(soak.soak(soak.parsed(words)))
    assert told["requests"]["outcomes"] == {"answered": 50}
    assert told["malformed"]["outcomes"]["neighbours"] >= 1
    ended = told["overload"]["outcomes"]
    assert min(ended["200"], ended["503"]) > 0
    assert (ended["200"] + ended["503"], ended["probes"] > 0) == (80, True)
    assert ended["most waiting"] <= 40


@pytest.mark.long  # two of them answer in test_processes.py
def test_two_api_processes_share_the_work_and_the_counts() -> None:
    async def body() -> None:
        async with soak.target("fake", "--api-processes", "2") as server:
            await soak.requests(server, 60, seed=3)
            async with asyncio.timeout(soak.PATIENCE):  # each leaves its counts for the other once a second
                answered = {0.0}
                while answered != {60.0}:  # whichever process answers
                    asked = "vllm:time_to_first_token_seconds_count"
                    answered = {await server.metric(asked) for _ in range(8)}
            await server.at_rest()

    asyncio.run(body())

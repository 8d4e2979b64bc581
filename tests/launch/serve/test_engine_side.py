"""Rank 0's side of the API processes knows token ids: text is made, and stop strings are found, on the other side.

Knows: every method that makes text or takes it (runtime/frontend/tokenizer.py), and in which thread it ran. Here the
two sides are two threads; in a server they are two processes (test_served.py). Does not know: the check of a command
line, which reads a model's tokenizer once so that an error is told there.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import tokenizers

from runtime.config import EngineConfig
from runtime.frontend import answer_text, chat_template, tokenizer
from runtime.frontend.api_links import Beats
from runtime.frontend.client import EngineClient
from runtime.frontend.engine_server import EngineServer
from runtime.frontend.tokenizer import Tokenizer
from tests.launch.serve.rig import ServedFake, served
from tests.launch.serve.test_app import PROMPT, expected, text_of

DEMO = Path(__file__).parents[3] / "models" / "demo"


def with_a_tokenizer() -> ServedFake:
    """An engine whose model's folder has a tokenizer, for whoever would read it."""
    fake = ServedFake()
    fake.config = EngineConfig(model=str(DEMO), device="cpu", max_num_seqs=4)
    return fake


def reached_from(whole: object) -> Iterator[object]:
    """All that an object holds, at any depth; not what its code could import."""
    seen, ahead = {id(whole)}, [whole]
    while ahead:
        one = ahead.pop()
        yield one
        for held in gc.get_referents(one):
            if id(held) not in seen and not isinstance(held, (type, ModuleType, FunctionType)):
                seen.add(id(held))
                ahead.append(held)


def makers_of_text(whole: object) -> list[object]:
    return [one for one in reached_from(whole) if isinstance(one, (Tokenizer, tokenizers.Tokenizer))]


def test_the_engine_s_side_holds_no_tokenizer() -> None:
    fake = with_a_tokenizer()
    server = EngineServer(fake, [], Beats(), max_queued=10, replace=lambda lost, why: None)
    assert server._client.tokenizer is None
    assert makers_of_text(server) == []
    assert makers_of_text(EngineClient(fake)), "a client that makes text has one"


def noted_threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """By name of each function of tokenizer.py, answer_text.py and chat_template.py: in which threads it has run."""
    threads: dict[str, set[int]] = {}

    def noted(function: Any, name: str) -> Any:
        @wraps(function)
        def run(*arguments: Any, **keywords: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return function(*arguments, **keywords)

        return run

    for module in (tokenizer, answer_text, chat_template):
        for kind in (held for held in vars(module).values() if inspect.isclass(held)):
            if kind.__module__ == module.__name__ and not issubclass(kind, Exception):
                for name, function in [*vars(kind).items()]:
                    if isinstance(function, FunctionType):
                        monkeypatch.setattr(kind, name, noted(function, f"{kind.__name__}.{name}"))
    return threads


def test_text_and_stop_strings_are_the_other_side_s(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = noted_threads(monkeypatch)
    fake = with_a_tokenizer()
    tokens, _ = expected(PROMPT, 30, 3)
    whole = text_of(tokens)
    stop = next(whole[i : i + 2] for i in range(8, len(whole)) if whole.find(whole[i : i + 2]) == i)
    engine_threads: set[int] = set()
    step = fake.step

    def stepped() -> Any:
        engine_threads.add(threading.get_ident())
        return step()

    monkeypatch.setattr(fake, "step", stepped)

    async def body() -> None:
        async with served(fake) as client:
            asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 30, "seed": 3, "stop": [stop], "logprobs": 1}
            stopped = (await client.post("/v1/completions", asked)).json["choices"][0]
            assert (stopped["text"], stopped["finish_reason"]) == (whole[: whole.index(stop)], "stop")
            streamed = await client.post("/v1/completions", {**asked, "stream": True})
            assert streamed.status == 200
            chat = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 8, "seed": 1}
            assert (await client.post("/v1/chat/completions", chat)).status == 200
            await client.until(lambda: len(fake.ended) == 3)
            assert makers_of_text(client.server) == []

    asyncio.run(body())
    assert {"Tokenizer.encode", "TextStream.push", "ChatTemplate.render"} <= threads.keys()
    assert threads["TextStream.push"] == {threading.get_ident()}
    assert len(engine_threads) == 1
    assert not engine_threads & set().union(*threads.values()), "log-probabilities have a thread of the other side"

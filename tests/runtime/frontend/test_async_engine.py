"""Streams of an engine that runs in a thread: what they bring, and every way to stop listening."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest

from runtime.config import EngineConfig
from runtime.frontend.async_engine import AsyncEngine
from runtime.frontend.client import EngineClient, EngineStopped, PromptRequest
from runtime.frontend.outputs import Delta, RequestOutput
from runtime.frontend.validation import RequestError
from runtime.plan_late import PlanLate
from runtime.schedule.plan import StepOutput
from runtime.schedule.request import FinishReason, Request, SamplingParams
from tests.launch.generate.fake_engine import FakeEngine
from tests.runtime.engine.rig import rig
from tests.runtime.frontend import small_tokenizers

PATIENCE = 120.0


class SlowEngine(FakeEngine):
    """A fake engine whose steps take a moment; ``ended`` are the reasons of what ended."""

    def __init__(self, **options: Any) -> None:
        super().__init__(EngineConfig(model="none", device="cpu", max_num_seqs=4), **options)
        self.ended: list[FinishReason] = []
        self.threads: set[int] = set()

    def bind_thread(self) -> None:
        self.threads.add(threading.get_ident())

    def step(self) -> StepOutput:
        self.threads.add(threading.get_ident())
        time.sleep(0.001)
        output = super().step()
        self.ended += [finished.reason for finished in output.finished]
        return output


def llm_of(engine: FakeEngine) -> AsyncEngine:
    return AsyncEngine(engine, small_tokenizers.byte_level())


def asked(number: int = 0, max_tokens: int = 20, **options: Any) -> PromptRequest:
    return PromptRequest(
        (1 + number, 7), SamplingParams(max_tokens=max_tokens, seed=number, ignore_eos=True), **options
    )


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "it does not come to pass"
        time.sleep(0.005)


def in_a_loop(program: Callable[[AsyncEngine, Any], Coroutine[Any, Any, None]], engine: Any = None) -> Any:
    """Runs ``program(llm, engine)`` and closes both; returns the engine."""
    engine = engine or SlowEngine()

    async def run() -> None:
        async with asyncio.timeout(PATIENCE), llm_of(engine) as llm:
            await program(llm, engine)

    asyncio.run(run())
    assert engine.stopped
    return engine


async def collect(llm: AsyncEngine, request: PromptRequest) -> list[Delta]:
    return [delta async for delta in llm.stream(request)]


def expected(*requests: PromptRequest) -> dict[Any, RequestOutput]:
    client = EngineClient(SlowEngine(), small_tokenizers.byte_level())
    return {output.key: output for turn in client.run(requests) for output in turn.finished}


def test_streams_bring_the_answers_of_a_plain_client() -> None:
    requests = [asked(i, 5 + i, key=f"k{i}") for i in range(10)]
    answers = expected(*requests)

    async def program(llm: AsyncEngine, engine: SlowEngine) -> None:
        streams = await asyncio.gather(*(collect(llm, request) for request in requests[:5]))
        wholes = await asyncio.gather(*(llm.complete(request) for request in requests[5:]))
        for request, deltas in zip(requests[:5], streams, strict=True):
            output = deltas[-1].output
            assert output is not None
            assert output.completions == answers[request.key].completions
            assert "".join(delta.text for delta in deltas) == output.completions[0].text
            assert {delta.key for delta in deltas} == {request.key}
        assert [output.completions for output in wholes] == [answers[f"k{i}"].completions for i in range(5, 10)]
        assert llm.live == 0

    engine = in_a_loop(program)
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_a_real_engine_streams_what_it_completes() -> None:
    async def program(llm: AsyncEngine) -> None:
        request = PromptRequest((5, 6, 7), SamplingParams(max_tokens=12, temperature=0.0, seed=0, logprobs=1))
        deltas = await collect(llm, request)
        whole = await llm.complete(llm.prepare(request))
        assert tuple(token for delta in deltas for token in delta.token_ids) == whole.completions[0].token_ids
        assert deltas[-1].output is not None
        assert deltas[-1].output.completions == whole.completions

    async def run(engine: Any) -> None:
        async with AsyncEngine(engine) as llm:
            await program(llm)

    with rig(rows=4) as engine:
        engine.stop = lambda: None  # type: ignore[method-assign]  # the rig stops it, too, and an engine stops once
        asyncio.run(run(engine))
        del engine.stop


@pytest.mark.parametrize("depth", [1, 2])
def test_turns_that_are_put_off_change_no_token(depth: int) -> None:
    """Requests that arrive in the middle of steps, beside others, have the answers of the serial engine."""
    requests = [
        PromptRequest((5, 6 + i, 7), SamplingParams(max_tokens=6 + i, temperature=1.0, seed=i), key=i)
        for i in range(10)
    ]
    with rig(rows=8, depth=0) as engine:
        client = EngineClient(engine, text=False)
        alone = {done.key: done.completions for one in requests for turn in client.run([one]) for done in turn.finished}

    class Eager(PlanLate):
        """Whatever the machine is like, turns are put off for a while."""

        times = 0

        def slack(self) -> float:
            super().slack()
            self.times += 1
            return 1e-3 if self.times % 3 else 0.0

    async def ask(engine: Any) -> list[RequestOutput]:
        async with AsyncEngine(engine) as llm:
            tasks = []
            for request in requests:
                tasks.append(asyncio.ensure_future(llm.complete(request)))
                await asyncio.sleep(0.002)
            return await asyncio.gather(*tasks)

    late = Eager(depth)
    with rig(rows=8, depth=depth, late=late) as engine:
        engine.stop = lambda: None  # type: ignore[method-assign]  # as above
        outputs = asyncio.run(ask(engine))
        del engine.stop
    assert late.times > 10
    assert [output.completions for output in outputs] == [alone[request.key] for request in requests]


@pytest.mark.parametrize("way", ["break", "aclose", "timeout", "cancel"])
def test_who_stops_listening_cancels_the_request(way: str) -> None:
    async def first_of(llm: AsyncEngine) -> None:
        async for _ in llm.stream(asked(0, 60)):
            break

    async def program(llm: AsyncEngine, engine: SlowEngine) -> None:
        if way == "break":
            await first_of(llm)
        elif way == "aclose":
            async with aclosing(llm.stream(asked(0, 60))) as stream:
                await anext(stream)
        elif way == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await llm.complete(asked(0, 60))
        else:
            task = asyncio.create_task(collect(llm, asked(0, 60)))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.to_thread(wait_for, lambda: engine.ended != [])
        assert engine.ended == [FinishReason.CANCELLED]
        assert llm.live == 0
        assert (await llm.complete(asked(1, 3))).failed is None, "the engine goes on"

    in_a_loop(program, SlowEngine(on_step=lambda step: time.sleep(0.005)))


def test_an_answer_that_was_read_to_its_end_is_not_cancelled() -> None:
    async def program(llm: AsyncEngine, engine: SlowEngine) -> None:
        async for delta in llm.stream(asked(0, 5)):
            if delta.output is not None:
                break
        await llm.complete(asked(1, 5))

    cancels: list[int] = []

    class Listening(SlowEngine):
        def cancel(self, request_id: int, reason: FinishReason) -> None:
            cancels.append(request_id)

    in_a_loop(program, Listening())
    assert cancels == []


def test_closing_ends_every_stream() -> None:
    engine = SlowEngine()

    async def run() -> None:
        llm = llm_of(engine)
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(collect(llm, asked(i, 60))) for i in range(3)]
        tasks.append(asyncio.create_task(llm.complete(asked(9, 60))))
        await asyncio.sleep(0.02)
        await llm.close()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(error) for error in found] == ["the engine was closed"] * 4
        with pytest.raises(EngineStopped, match="the engine was closed"):
            await llm.complete(asked(1))
        await llm.close()
        assert llm.live == 0
        with pytest.raises(EngineStopped, match="stopped when its client closed"):
            llm_of(engine)

    asyncio.run(run())
    assert engine.stopped


def test_a_failure_of_the_engine_reaches_everybody() -> None:
    def fail(step: int) -> None:
        if step == 20:
            raise RuntimeError("the device is gone")

    engine = SlowEngine(on_step=fail)

    async def run() -> None:
        async with llm_of(engine) as llm:
            tasks = [collect(llm, asked(0, 60)), collect(llm, asked(1, 60)), llm.complete(asked(2, 60))]
            found = await asyncio.gather(*tasks, return_exceptions=True)
            for error in found:
                assert isinstance(error, EngineStopped)
                assert "the engine failed: RuntimeError: the device is gone" in str(error)
                assert isinstance(error.__cause__, RuntimeError)
            with pytest.raises(EngineStopped, match="the device is gone"):
                await llm.complete(asked(3))

    with pytest.raises(EngineStopped, match="the device is gone"):
        asyncio.run(run())
    assert not engine.stopped, "an engine that failed is not asked to agree on anything"


def test_what_is_refused_is_refused_where_it_was_asked() -> None:
    async def program(llm: AsyncEngine, engine: SlowEngine) -> None:
        with pytest.raises(RequestError, match="prompt token 0 is 360"):
            await llm.complete(PromptRequest((360,)))
        with pytest.raises(RequestError, match="max_tokens is 0"):
            await collect(llm, asked(0, 0))
        stream = llm.stream(asked(0, 60, key="k"))
        await anext(stream)
        with pytest.raises(RequestError, match="key 'k' is in use"):
            await llm.complete(asked(1, key="k"))
        assert [delta.key async for delta in stream][-1] == "k"
        assert (await llm.complete(asked(1, key="k"))).failed is None

    engine = in_a_loop(program)
    assert len(engine.added) == 2


def test_no_key_ends_the_engine() -> None:
    """Seeds are drawn from keys in the engine's own thread."""

    class Unwritable:
        def __str__(self) -> str:
            raise OSError("no text")

    async def program(llm: AsyncEngine, engine: SlowEngine) -> None:
        other = llm.stream(asked(0, 60))
        await anext(other)
        with pytest.raises(
            RequestError, match=r"key is of type Unwritable, but str\(\) of it fails: OSError\('no text'\)"
        ):
            await llm.complete(PromptRequest((1, 7), key=Unwritable()))
        named = PromptRequest((1, 7), SamplingParams(max_tokens=4), key="caf\udce9")  # os.fsdecode of a Latin-1 name
        assert (await llm.complete(named)).failed is None
        last = [delta async for delta in other][-1]
        assert last.output is not None
        assert last.output.failed is None

    in_a_loop(program)


def test_several_event_loops_share_one_engine() -> None:
    llm = llm_of(SlowEngine())
    found: dict[int, list[Delta]] = {}

    def one_loop(number: int) -> None:
        found[number] = asyncio.run(collect(llm, asked(number, 15)))

    threads = [threading.Thread(target=one_loop, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    asyncio.run(llm.close())
    answers = expected(*(asked(number, 15, key=number) for number in range(4)))
    for number, deltas in found.items():
        output = deltas[-1].output
        assert output is not None
        assert output.completions == answers[number].completions


def test_a_loop_that_ended_leaves_nobody_waiting() -> None:
    engine = SlowEngine(on_step=lambda step: time.sleep(0.002))
    llm = llm_of(engine)

    async def abandon() -> None:
        llm_stream = llm.stream(asked(0, 60))
        await anext(llm_stream)
        asyncio.get_running_loop().stop()
        await asyncio.sleep(PATIENCE)

    loop = asyncio.new_event_loop()
    task = loop.create_task(abandon())
    loop.run_forever()
    loop.close()
    wait_for(lambda: FinishReason.CANCELLED in engine.ended)
    assert asyncio.run(llm.complete(asked(1, 4))).failed is None
    asyncio.run(llm.close())
    assert not task.done()


def test_an_idle_engine_is_told_of_at_once() -> None:
    """A wait that is not cut short by an order would take its whole time."""
    waits: list[float] = []

    class Patient(SlowEngine):
        def wait(self, ready: Callable[[float], bool], timeout: float) -> None:
            waits.append(timeout)
            assert ready(PATIENCE), "no order came"

    def more_than(number: int) -> bool:
        return len(waits) > number

    async def program(llm: AsyncEngine, engine: SlowEngine) -> None:
        for number in range(3):
            await asyncio.to_thread(wait_for, partial(more_than, number))
            await llm.complete(asked(number, 3))

    in_a_loop(program, Patient())


def test_who_asks_while_a_turn_is_put_off_is_in_it() -> None:
    added_at: list[int] = []

    class Late(SlowEngine):
        """Whose second turn may be put off until two requests are there."""

        asked = 0

        def slack(self) -> float:
            if self._now == 0 and not self.asked:
                Late.asked += 1
                return PATIENCE  # longer than any machine needs: the next request ends it
            return 0.0

        def add(self, request: Request) -> None:
            added_at.append(self._now)
            super().add(request)

    async def program(llm: AsyncEngine, engine: SlowEngine) -> None:
        first = asyncio.ensure_future(llm.complete(asked(0, 4)))
        await asyncio.to_thread(wait_for, lambda: Late.asked > 0)
        await asyncio.gather(first, llm.complete(asked(1, 4)))

    in_a_loop(program, Late())
    assert added_at == [0, 0]


def test_requests_reach_the_engine_in_their_order() -> None:
    async def program(llm: AsyncEngine, engine: SlowEngine) -> None:
        await asyncio.gather(*(llm.complete(asked(number, 4)) for number in range(30)))

    engine = in_a_loop(program)
    added: list[Request] = engine.added
    assert [request.sampling.seed for request in added] == list(range(30))
    assert engine.most_live <= 8


def test_a_reset_of_the_prefix_cache_comes_before_what_is_asked_for_after_it() -> None:
    engine = SlowEngine()

    async def program() -> None:
        async with llm_of(engine) as llm:
            await llm.complete(asked(0))
            await llm.reset_prefix_cache()
            await llm.complete(asked(1))
        with pytest.raises(EngineStopped):
            await llm.reset_prefix_cache()

    asyncio.run(program())
    assert engine.resets == [1]

"""The one request loop, over an engine whose answers are known and whose steps come in any order."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

import runtime.frontend.client as client_module
from runtime.config import EngineConfig
from runtime.frontend.client import Batch, EngineClient, EngineIdle, EngineStopped, PromptRequest, Turn
from runtime.frontend.output_processor import OutputProcessor
from runtime.frontend.outputs import Delta, RequestOutput
from runtime.frontend.validation import RequestError
from runtime.schedule.plan import StepOutput
from runtime.schedule.request import FinishReason, Request, SamplingParams
from tests.launch.generate.fake_engine import FakeEngine, serial_answer
from tests.runtime.engine.rig import rig
from tests.runtime.frontend import small_tokenizers


def fake(rows: int = 4, max_waiting: int = 100, **options: Any) -> FakeEngine:
    return FakeEngine(EngineConfig(model="none", device="cpu", max_num_seqs=rows, max_waiting=max_waiting), **options)


def client_of(engine: FakeEngine, **options: Any) -> EngineClient:
    return EngineClient(engine, small_tokenizers.byte_level(), **options)


def asked(number: int, **options: Any) -> PromptRequest:
    fields = {"max_tokens": 3 + number % 20, "seed": number} | options.pop("sampling", {})
    return PromptRequest((1 + number, 7), SamplingParams(**fields), **options)


def turns(client: EngineClient, requests: Sequence[PromptRequest] = (), most: int = 3000) -> list[Turn]:
    found = []
    for turn in client.run(requests):
        found.append(turn)
        assert len(found) < most, "it does not come to an end"
    return found


def outputs(found: Sequence[Turn]) -> dict[Any, RequestOutput]:
    done = [output for turn in found for output in turn.finished]
    assert len({output.key for output in done}) == len(done), "each comes out once"
    return {output.key: output for output in done}


def put_together(key: object, index: int, deltas: Sequence[Delta]) -> tuple[str, tuple[int, ...], FinishReason | None]:
    mine = [delta for delta in deltas if (delta.key, delta.index) == (key, index)]
    assert [delta.finish_reason for delta in mine[:-1]] == [None] * (len(mine) - 1)
    return "".join(d.text for d in mine), tuple(t for d in mine for t in d.token_ids), mine[-1].finish_reason


# ---- answers and their pieces ----


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_deltas_put_together_are_the_answers(width: int, seed: int) -> None:
    """Stop strings, several answers, ends by eos and by length, tokens that are parts of characters."""
    draw = random.Random(seed)
    stops = [(), ("e",), ("th", "o"), ("\ufffd",)]
    requests = [
        asked(i, key=f"r{i}", stream=True, sampling={"n": draw.choice((1, 3)), "stop": draw.choice(stops)})
        for i in range(20)
    ]
    engine = fake(width=width, seed=seed)
    found = turns(client_of(engine), requests)
    deltas = [delta for turn in found for delta in turn.deltas]
    done = outputs(found)
    assert done.keys() == {request.key for request in requests}
    for key, output in done.items():
        for completion in output.completions:
            expected = completion.text, completion.token_ids, completion.finish_reason
            assert put_together(key, completion.index, deltas) == expected
        *others, last = [delta for delta in deltas if delta.key == key]
        assert last.output is output
        assert [delta.output for delta in others] == [None] * len(others)
    plain = outputs(turns(client_of(fake(width=width, seed=seed + 100)), [replace(r, stream=False) for r in requests]))
    assert {k: v.completions for k, v in plain.items()} == {k: v.completions for k, v in done.items()}


def test_log_probabilities_come_with_the_tokens_they_are_of() -> None:
    request = PromptRequest((5, 6, 7), SamplingParams(max_tokens=9, temperature=0.0, logprobs=2, seed=0), stream=True)
    with rig(rows=4) as engine:
        found = turns(EngineClient(engine, text=False), [request])
    (output,) = outputs(found).values()
    (completion,) = output.completions
    pieces = [entry for turn in found for delta in turn.deltas for entry in delta.logprobs or ()]
    assert tuple(pieces) == completion.logprobs
    assert [entry.token_id for entry in pieces] == list(completion.token_ids)


def test_nobody_gets_deltas_without_asking() -> None:
    found = turns(client_of(fake()), [asked(1, sampling={"stop": ("e",)}), asked(2, sampling={"n": 2})])
    assert [delta for turn in found for delta in turn.deltas] == []
    assert len(outputs(found)) == 2


def test_steady_rows_are_not_looked_at_unless_somebody_wants_to_see_them() -> None:
    class Untouchable(list[int]):
        def __getitem__(self, index: Any) -> Any:
            raise AssertionError("a row was looked at")

    processor = OutputProcessor(None)
    request = processor.open("k", (9,), SamplingParams(seed=0))
    step = StepOutput(0, [request.request_id], [4], [1])
    processor.route(step)
    untouchable = step._replace(tokens=Untouchable([4]), counts=Untouchable([1]))
    assert processor.route(untouchable) == ([], [], [])
    processor.open("streamed", (9,), SamplingParams(seed=0), stream=True)
    with pytest.raises(AssertionError, match="a row was looked at"):
        processor.route(untouchable._replace(request_ids=[request.request_id + 1]))


# ---- back-pressure ----


@pytest.mark.parametrize(("rows", "max_waiting", "n"), [(4, 100, 1), (4, 2, 3), (2, 1, 1), (2, 1, 9)])
def test_the_engine_never_has_more_than_it_has_room_for(rows: int, max_waiting: int, n: int) -> None:
    """But that all answers of a request go together: they wait over one prompt."""
    engine = fake(rows, max_waiting)
    client = client_of(engine)
    found = turns(client, [asked(i, sampling={"n": n}) for i in range(12)])
    assert len(outputs(found)) == 12
    assert engine.most_live <= rows + min(rows, max_waiting) + n - 1
    assert engine.most_live > rows or max_waiting == 1


class Noted(FakeEngine):
    """``most``: answers and tokens that requests of a batch have had here at once. Their prompts begin with 9."""

    def __init__(self, **options: Any) -> None:
        super().__init__(EngineConfig(model="none", device="cpu", max_num_seqs=8), **options)
        self.most = (0, 0)

    def step(self) -> StepOutput:
        live = [one.request for one in self._running.values()] + list(self._waiting)
        mine = [one for one in live if one.prompt_token_ids[0] == 9]
        tokens = sum(one.sampling.max_tokens for one in mine)
        tokens += sum(len(prompt) for prompt in {tuple(one.prompt_token_ids) for one in mine})
        self.most = max(self.most[0], len(mine)), max(self.most[1], tokens)
        return super().step()


def part(number: int, batch: Batch, n: int = 1, max_tokens: int = 8) -> PromptRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=number, n=n)
    return PromptRequest((9, 10 + number), sampling, apart=True, batch=batch)


@pytest.mark.parametrize(("answers", "tokens", "n"), [(3, 1000, 1), (7, 40, 1), (6, 1000, 3), (7, 50, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_requests_of_a_batch_leave_rows_and_kv_cache_to_others(answers: int, tokens: int, n: int, seed: int) -> None:
    engine, batch = Noted(seed=seed), Batch(answers, tokens)
    client = client_of(engine)
    keys = [client.submit(part(i, batch, n)) for i in range(20)]
    others = [client.submit(asked(i)) for i in range(5)]
    assert client.sequences == client.not_begun == 20 * n + 5
    client.turn()
    assert {9} < {request.prompt_token_ids[0] for request in engine.added}, "others do not wait for all of it"
    assert len([one for one in engine.added if one.prompt_token_ids[0] != 9]) == 5
    done = outputs(turns(client))
    assert engine.most[0] == answers or engine.most[1] > tokens - n * 8 - 2
    assert engine.most[0] <= answers
    assert engine.most[1] <= tokens
    assert len(done) == 20 * n + 5
    assert {*keys, *others} <= done.keys()
    assert (batch.answers, batch.tokens, len(batch.behind), client._parts) == (0, 0, 0, {})


def test_a_request_that_is_more_than_its_batch_may_hold_runs_alone() -> None:
    engine, batch = Noted(), Batch(2, 10)
    client = client_of(engine)
    for i in range(4):
        client.submit(part(i, batch, max_tokens=30))
    assert len(outputs(turns(client))) == 4
    assert engine.most[0] == 1


def test_a_batch_goes_on_when_some_of_it_is_cancelled() -> None:
    """What runs, what is about to, and what waits behind."""
    engine, batch = Noted(lag=1), Batch(3, 1000)
    client = client_of(engine)
    keys = [client.submit(part(i, batch, max_tokens=40)) for i in range(9)]
    client.cancel(keys[1], keys[5])
    client.turn()
    client.cancel(keys[0], keys[3], keys[8])
    done = outputs(turns(client))
    assert {key for key in keys if key in done} | {keys[1], keys[5]} == set(keys)
    assert (batch.answers, batch.tokens, engine.most[0]) == (0, 0, 3)
    assert {one.request_id for one in engine.added} == {keys[i] for i in (0, 2, 4, 6, 7)}


@pytest.mark.parametrize("max_waiting", [1, 3, 100])
def test_a_scheduler_s_queue_is_never_full(max_waiting: int) -> None:
    """Announced in one turn, more than ``max_waiting`` would be refused."""
    requests = [PromptRequest((5 + i, 6), SamplingParams(max_tokens=6, seed=0, n=1 + i % 3)) for i in range(20)]
    with rig(rows=3, horizon=2) as engine:
        engine.config = replace(engine.config, max_waiting=max_waiting)
        engine.scheduler.ledger.config = replace(engine.scheduler.ledger.config, max_waiting=max_waiting)
        done = outputs(turns(EngineClient(engine, text=False), requests))
    assert len(done) == 20
    assert all(output.failed is None for output in done.values())


def test_concurrency_bounds_what_the_engine_has() -> None:
    engine = fake(rows=8)
    assert len(outputs(turns(client_of(engine, concurrency=3), [asked(i) for i in range(10)]))) == 10
    assert engine.most_live == 3


def test_requests_are_taken_from_their_source_when_there_is_room() -> None:
    taken = []

    def source() -> Iterator[PromptRequest]:
        for i in range(40):
            taken.append(i)
            yield asked(i)

    engine = fake(rows=2)
    client = client_of(engine)
    for _ in client.run(source()):
        assert len(taken) - len(engine.added) <= 1
        assert client.live <= client.capacity + 1
    assert len(engine.added) == 40


@pytest.mark.parametrize(("max_waiting", "concurrency", "first"), [(100, None, 16), (3, None, 3), (100, 5, 5)])
def test_the_first_turn_has_as_many_requests_as_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, max_waiting: int, concurrency: int | None, first: int
) -> None:
    monkeypatch.setattr(client_module, "READ_SECONDS", 1e9)  # a busy machine may be slow
    engine = fake(rows=8, max_waiting=max_waiting)
    source = iter([asked(i) for i in range(20)])
    next(client_of(engine, concurrency=concurrency).run(source))
    assert len(engine.added) == first
    assert len(list(source)) == 20 - first, "what has no room yet is left where it is"


def test_turns_do_not_wait_for_texts_that_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "READ_SECONDS", 0.0)
    engine, source = fake(rows=8), iter([asked(i) for i in range(5)])
    life = client_of(engine).run(source)
    for taken in (1, 2, 3):
        next(life)
        assert len(engine.added) == taken
    assert list(life)[-1].finished
    assert len(engine.added) == 5


def test_what_waits_is_taken_by_priority_and_then_in_order() -> None:
    engine = fake(rows=1)
    client = client_of(engine, concurrency=1)
    for i, priority in enumerate((0, 5, 0, -5, 5)):
        client.submit(asked(i, priority=priority))
    turns(client)
    assert [request.sampling.seed for request in engine.added] == [3, 0, 2, 1, 4]


# ---- ends ----


def test_a_request_that_is_cancelled_ends_with_what_it_has() -> None:
    engine = fake(rows=1)
    client = client_of(engine)
    running = client.submit(asked(0, key="running", stream=True, sampling={"max_tokens": 40}))
    while not (turn := client.turn()).deltas:
        assert not turn.finished
    for number in range(1, 4):
        client.submit(asked(number, key=number))
    client.cancel(running)
    client.cancel(3)  # the engine has room for two: it never hears of this one
    client.cancel("unknown")
    found = turns(client)
    done = outputs(found)
    assert done.keys() == {"running", 1, 2, 3}
    assert done["running"].completions[0].finish_reason is FinishReason.CANCELLED
    assert done["running"].completions[0].token_ids
    assert (done[3].completions[0].finish_reason, done[3].completions[0].token_ids) == (FinishReason.CANCELLED, ())
    assert len(engine.added) == 3
    assert done[1].failed is done[2].failed is None
    client.cancel(running)


def test_everything_or_what_has_no_token_can_be_cancelled() -> None:
    client = client_of(fake(rows=1))
    for number in range(6):
        client.submit(asked(number, key=number, sampling={"max_tokens": 40}))
    client.turn()
    client.turn()
    client.cancel_all(unbegun=True)
    begun = {key for key, output in outputs(turns(client)).items() if output.failed is None}
    assert begun == {0}
    for number in range(6):
        client.submit(asked(number, key=number, sampling={"max_tokens": 40}))
    client.cancel_all()
    done = outputs(turns(client))
    assert len(done) == 6
    assert all(output.failed is not None for output in done.values())


@pytest.mark.parametrize("backwards", [False, True])
def test_cancels_one_by_one_cost_the_same_however_many_wait(backwards: bool) -> None:
    """Counted in lines of client.py that run."""
    many = 10_000
    client = EngineClient(fake(rows=1, max_waiting=1), text=False)
    for number in range(many):
        client.submit(PromptRequest((1,), SamplingParams(seed=0), key=number, priority=number % 3))
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != client_module.__file__:
            return None
        lines += event == "line"
        if lines > 40 * many:
            raise AssertionError("a cancel looks at all that waits")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        for number in range(many)[:: -1 if backwards else 1]:
            client.cancel(number)
    finally:
        sys.settrace(before)
    assert (client.waiting, client.has_room(), client.live) == (0, False, many)
    assert len(client.turn().finished) == many
    assert client.live == 0


def test_others_go_on_in_order_between_those_that_are_cancelled() -> None:
    engine = fake(rows=1, max_waiting=1)
    client = client_of(engine)
    for number in range(40):
        client.submit(asked(number, key=number, priority=number % 3, sampling={"n": 1 + number % 2}))
    for number in range(0, 40, 4):
        client.cancel(number)
    for number in range(1, 40, 4):
        client.cancel(number)
    assert client.waiting == 30
    done = outputs(turns(client))
    left = {number for number in range(40) if number % 4 > 1}
    assert {key for key, output in done.items() if output.failed is None} == left
    in_order = sorted(left, key=lambda number: (number % 3, number))
    seeds = [number + answer for number in in_order for answer in range(1 + number % 2)]
    assert [request.sampling.seed for request in engine.added] == seeds


def test_a_scheduler_s_refusal_is_an_output_with_its_reason() -> None:
    client = client_of(fake(reject=lambda request: "the pool is too small"))
    found = turns(client, [asked(1, key="k", stream=True)])
    (delta,) = [delta for turn in found for delta in turn.deltas]
    assert (delta.finish_reason, delta.token_ids) == (FinishReason.REJECTED, ())
    assert delta.output is not None
    assert delta.output.failed is not None
    assert delta.output.failed.detail == "the pool is too small"


def test_an_engine_that_loses_a_request_is_found_out() -> None:
    class Loser(FakeEngine):
        has_work = False

    client = EngineClient(Loser(EngineConfig(model="none", device="cpu")), text=False)
    with pytest.raises(EngineIdle, match="1 requests have not ended"):
        turns(client, [asked(1)])


def test_closing_stops_the_engine_once() -> None:
    stops = []

    class Counting(FakeEngine):
        def stop(self) -> None:
            stops.append(self.stopped)
            super().stop()

    with EngineClient(Counting(EngineConfig(model="none", device="cpu")), text=False) as client:
        turns(client, [asked(1)])
    client.close()
    assert stops == [False]


def test_an_engine_has_one_client() -> None:
    with rig(rows=2) as engine:
        with EngineClient(engine, text=False) as client:
            assert len(outputs(turns(client, [PromptRequest((5, 6), SamplingParams(max_tokens=3))]))) == 1
        words = "this engine was stopped when its client closed: keep one client for all requests, or open another"
        with pytest.raises(EngineStopped, match=words):
            EngineClient(engine, text=False)
        with pytest.raises(EngineStopped, match=words):
            client.submit(asked(1))
        with pytest.raises(EngineStopped, match=words):
            client.turn()
        engine.stop = lambda: None  # type: ignore[method-assign]  # the rig stops it, too, and an engine stops once
    del engine.stop


# ---- what is refused ----


def test_a_bad_request_is_refused_before_the_engine_hears_of_it() -> None:
    engine = fake()
    client, bare = client_of(engine), EngineClient(engine, text=False)
    good: Any = asked(1)
    request: Any
    for request, words in (
        (replace(good, prompt=""), "the prompt is empty"),
        (replace(good, prompt="a\ud800"), "the prompt is no Unicode text: character 1"),
        (replace(good, prompt="the dog " * 100), "tokens, but prompt and answer together may have 64"),
        (replace(good, prompt=5), "the prompt is 5, but must be a sequence of token ids"),
        (replace(good, prompt=(360,)), "prompt token 0 is 360"),
        (replace(good, sampling={}), "the sampling parameters are of type dict"),
        (replace(good, priority=None), "priority is None"),
        (replace(good, key=["a"]), "key is a list, but must be hashable"),
        (replace(good, key=10**5000), r"key is of type int, but str\(\) of it fails: ValueError"),
        (replace(good, arrived_at="now"), "arrived_at is 'now', but must be a time"),
        ("the dog", "the request is a str, but must be a PromptRequest"),
    ):
        with pytest.raises(RequestError, match=words):
            client.submit(request)
    for request, words in (
        (replace(good, prompt="the dog"), "there is no tokenizer"),
        (asked(1, sampling={"stop": ("x",)}), "stop strings need a tokenizer"),
    ):
        with pytest.raises(RequestError, match=words):
            bare.submit(request)
    assert client.submit(replace(good, key="k")) == "k"
    with pytest.raises(RequestError, match="key 'k' is in use"):
        client.submit(replace(good, key="k"))
    assert outputs(turns(client)).keys() == {"k"}
    assert client.submit(replace(good, key="k")) == "k", "it has ended: the key is free again"
    assert len(engine.added) == 1


def test_who_names_no_key_gets_one_that_nobody_has() -> None:
    client = client_of(fake())
    assert client.submit(replace(asked(1), key=1)) == 1
    assert client.submit(replace(asked(2), key=3)) == 3
    given = [client.submit(replace(asked(3 + number), key=None)) for number in range(2)]
    assert len({1, 3, *given}) == 4
    assert outputs(turns(client)).keys() == {1, 3, *given}


def test_lengths_are_cut_and_seeds_are_drawn_from_the_key() -> None:
    engine = fake()
    client = client_of(engine)
    for key in ("a", "b", None):
        client.submit(PromptRequest("the dog", SamplingParams(max_tokens=2**40, min_tokens=2**31), key))
    turns(client)
    rooms = {64 - len(request.prompt_token_ids) for request in engine.added}
    assert {(r.sampling.max_tokens, r.sampling.min_tokens) for r in engine.added} == {(room, room) for room in rooms}
    seeds = [request.sampling.seed for request in engine.added]
    assert len(set(seeds)) == 3
    again = fake()
    other = client_of(again)
    other.submit(PromptRequest("the dog", SamplingParams(), "b"))
    turns(other)
    assert again.added[0].sampling.seed == seeds[1]


def test_an_answer_is_what_a_serial_engine_gives() -> None:
    engine = fake(width=2)
    (output,) = outputs(turns(client_of(engine), [asked(3, sampling={"max_tokens": 30})])).values()
    tokens, reason = serial_answer(Request(0, (4, 7), SamplingParams(max_tokens=30, seed=3), (0,)), engine.model_config)
    assert (output.completions[0].token_ids, output.completions[0].finish_reason) == (tokens, reason)


def test_a_reset_of_the_prefix_cache_is_the_engines() -> None:
    engine = fake()
    client = client_of(engine)
    turns(client, [asked(0)])
    client.reset_prefix_cache()
    turns(client, [asked(1)])
    assert engine.resets == [1], "between the two"
    client.close()

"""Whole batches drawn from a seed: lines of every form, through the front end, over an engine that is given no rest.

Against them stands the plainest engine there is: depth 0, room for everything, no prefix cache, one line at a time.
What random_lives.py leaves out is here: n > 1, stop strings, echo, drawn and named seeds, priorities, requests that
break, tokens without a text, pauses of what is being cancelled, times in which there is nothing to do, slow streams,
two ranks that share the model, steps with chunks that are captured, with decode rows or without.

    python -m tests.runtime.engine.random_batches --first 0 --seeds 500  prints each batch that differs (a make target)

Knows: the ranges of everything that is drawn, and what must be equal. Does not know: how an engine works.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from launch.api.parser import BadLine, PreparedRequest
from launch.api.response import answer_row
from runtime.engine import Engine
from runtime.frontend.output_processor import OutputProcessor
from runtime.frontend.outputs import Completion, RequestOutput
from runtime.schedule.request import FinishReason
from tests.launch.generate.batches import parser
from tests.launch.generate.fake_engine import FakeModel
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.lives import check_all_is_back
from tests.runtime.engine.rig import MIXED
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.frontend import small_tokenizers

CONTEXT = 96
VOCABULARY = 363  # odd, and the tokenizer has 360: the last ids have no text
BROKEN = 361  # its embedding is not a number: whoever reads it breaks one step later
EOS = 2
LAST_ARRIVAL = 60
MOST_TURNS = 4000
STOPS = ("e", "o", " t", "the", "on", "\n", "é", "世", "\ufffd", "q fox", "zzz")
Row = dict[str, Any]


@dataclass
class Batch:
    """``arrivals`` and ``events`` by turn; an event is (verb, line id, which of its answers or None for all)."""

    arrivals: dict[int, list[PreparedRequest]]
    events: dict[int, list[tuple[str, object, int | None]]] = field(default_factory=dict)
    limits: Row = field(default_factory=dict)

    @property
    def requests(self) -> list[PreparedRequest]:
        return [one for listed in self.arrivals.values() for one in listed]


# ---- drawing one ----


def random_batch(seed: int) -> Batch:
    """Everything is drawn here, from ``seed`` alone."""
    draw = random.Random(f"batch {seed}")
    stems = [tuple(draw.randrange(3, 360) for _ in range(40)) for _ in range(2)]
    lines = [_line(draw, f"r{i}", stems) for i in range(draw.randrange(2, 9))]
    parse = parser(FakeModel(VOCABULARY, CONTEXT, (EOS,)), base_seed=seed)
    batch = Batch({})
    for number, line in enumerate(lines, 1):
        data = json.dumps(line).encode()
        prepared = parse.parse(number, data, parse.peek(number, data))
        assert not isinstance(prepared, BadLine), prepared.message
        turn = draw.choice((0, 0, draw.randrange(LAST_ARRIVAL)))
        batch.arrivals.setdefault(turn, []).append(prepared)
        _events(draw, batch, prepared, turn)
    rows, size, depth = draw.choice((1, 2, 4, 8)), draw.choice((4, 8, 16)), seed % 5
    least = -(-(CONTEXT + depth + 1) // size)  # one request of the full length
    batch.limits = {
        "depth": depth,
        "rows": rows,
        "buckets": draw.choice((None, tuple(bucket for bucket in (1, 2, 4, 8) if bucket <= rows))),
        "block_size": size,
        "blocks": draw.choice((least, least + 1, 2 * least, 200)),
        "max_prefill_tokens": draw.choice((4, 24, 64)),
        "prefill_burst": draw.choice((1, 2, 4)),
        "prefix_caching": draw.random() < 0.75,
        "horizon": draw.choice((0, 1, 3)),
    }
    if draw.random() < 0.2:
        batch.limits["jitter_s"] = 0.0005
    batch.limits["ranks"] = draw.choice((1, 1, 1, 2))
    if seed % 2:  # other seeds give what they always gave
        batch.limits |= _chunks(random.Random(f"chunks {seed}"), rows, batch.limits["max_prefill_tokens"])
    return batch


def _chunks(draw: random.Random, rows: int, most: int) -> Row:
    """How steps with chunks of prompts are cut and launched."""
    mixed = draw.choice((None, MIXED, MIXED, replace(MIXED, stride=2), replace(MIXED, stride=3)))
    largest = most + rows if mixed is not None else most
    smaller = tuple(bucket for bucket in (8, 16, 40) if bucket < largest)
    buckets = draw.choice(((), (*smaller, largest), (*smaller, largest), (max(1, largest // 2),)))
    if mixed is not None and buckets and buckets[-1] > rows and draw.random() < 0.5:
        mixed = replace(mixed, buckets=buckets)
    return {"mixed": mixed, "prefill_buckets": buckets}


def _line(draw: random.Random, name: str, stems: list[tuple[int, ...]]) -> Row:
    sampling = _sampling(draw)
    form = draw.choice(("text", "ids", "ids", "completion", "chat"))
    text = "the quick brown fox jumps over the lazy dog, and"[: draw.randrange(1, 48)]
    ids = [
        *draw.choice(stems)[: draw.choice((0, 9, 17, 40))],
        *(draw.randrange(360) for _ in range(draw.randrange(1, 40))),
    ]
    if draw.random() < 0.06:
        ids[draw.randrange(len(ids))] = BROKEN
    asked = draw.choice((None, None, 0, 1, 5, 20))
    if form == "chat":
        body = {"messages": [{"role": "user", "content": text[:8]}], **sampling}
        if asked is not None:
            body |= {"logprobs": True, "top_logprobs": asked}
        return {"custom_id": name, "url": "/v1/chat/completions", "body": body}
    sampling |= {} if asked is None else {"logprobs": asked}
    if form == "completion":
        body = {"prompt": draw.choice((text, ids)), "echo": draw.random() < 0.6, **sampling}
        return {"custom_id": name, "url": "/v1/completions", "body": body}
    return {"id": name, **({"prompt": text} if form == "text" else {"prompt_token_ids": ids}), **sampling}


def _sampling(draw: random.Random) -> Row:
    most = draw.choice((1, 2, 5, 12, 30, 200))
    fields: Row = {"max_tokens": most, "n": draw.choice((1, 1, 1, 2, 3)), "priority": draw.choice((0, 0, 0, 1, -1))}
    fields["temperature"] = draw.choice((None, 0, 0.4, 1.0, 1.8))
    if draw.random() < 0.5:
        fields |= {"top_k": draw.choice((0, 1, 3, 40, 1000)), "top_p": draw.choice((1.0, 0.9, 0.3, 0.001))}
        fields |= {"min_p": draw.choice((0.0, 0.02, 0.5, 1.0))}
    if draw.random() < 0.3:
        fields |= {
            "repetition_penalty": draw.choice((0.7, 1.0, 1.3)),
            "presence_penalty": draw.choice((-1.5, 0.0, 0.8)),
        }
        fields |= {"frequency_penalty": draw.choice((-0.5, 0.0, 1.2))}
    if draw.random() < 0.3:
        fields["min_tokens"] = draw.randrange(min(most, 8) + 1)
    if draw.random() < 0.5:
        fields["stop"] = draw.choice((draw.choice(STOPS), draw.sample(STOPS, draw.randrange(1, 5))))
    if draw.random() < 0.4:
        fields["stop_token_ids"] = draw.sample(range(VOCABULARY), draw.randrange(1, 12))
    if draw.random() < 0.2:
        fields["ignore_eos"] = True
    if draw.random() < 0.4:
        fields["seed"] = draw.choice((0, 7, -5, 2**63 - 1, -(2**63)))
    if draw.random() < 0.25:
        fields["prompt_logprobs"] = draw.choice((0, 2, 20))
    return fields | _edits(draw)


def _edits(draw: random.Random) -> Row:
    """What names tokens; few are allowed, so that bad words of several tokens are met."""
    fields: Row = {}
    if draw.random() < 0.15:
        tokens = draw.sample(range(VOCABULARY), draw.choice((1, 5, 200)))
        fields["logit_bias"] = {str(token): draw.choice((-100, -2.5, 3, 100)) for token in tokens}
    if draw.random() < 0.15:
        fields["allowed_token_ids"] = draw.sample(range(3, 360), draw.choice((1, 2, 4, 100)))
    if draw.random() < 0.15:
        fields["bad_words"] = draw.sample(("the", "fox", "o", "quick brown", "e e", "世", "aa", "lazy"), 3)
    return fields


def _events(draw: random.Random, batch: Batch, prepared: PreparedRequest, turn: int) -> None:
    def at(when: int, verb: str, which: int | None) -> None:
        batch.events.setdefault(when, []).append((verb, prepared.id, which))

    if draw.random() < 0.3:
        which = draw.choice((None, draw.randrange(prepared.sampling.n)))
        begin = turn + draw.randrange(14)
        at(begin, "pause", which)
        at(begin + draw.randrange(1, 25), "resume", which)
    if draw.random() < 0.2:
        which = draw.choice((None, draw.randrange(prepared.sampling.n)))
        at(turn + draw.randrange(20), "cancel", which)


# ---- playing it ----


@contextmanager
def _engine(limits: Row) -> Iterator[Engine]:
    exact: Row = {"kernels": exact_kernels(tables=True), "dtype": torch.float64, "max_model_len": CONTEXT}
    exact["shape"] = {"vocab_size": VOCABULARY, "tie_word_embeddings": False}
    with tensor_rig(
        limits.get("ranks", 1), prepare=_break, **(exact | {k: limits[k] for k in limits.keys() - {"ranks"}})
    ) as engine:
        yield engine


def _break(engine: Engine) -> None:
    """Whoever reads BROKEN has logits that are not finite; the rank that has its row."""
    embedding = engine.executor._model.embedding
    if embedding.vocab.start <= BROKEN < embedding.vocab.end:
        embedding.weight.data[BROKEN - embedding.vocab.start] = float("nan")


def play(batch: Batch) -> tuple[dict[object, RequestOutput], dict[str, int | float]]:
    """Every request's output by line id, and the engine's counters. All blocks, slots and epochs are back."""
    done: dict[object, RequestOutput] = {}
    ids: dict[object, list[int]] = {}
    arrivals, turn = dict(batch.arrivals), 0
    with _engine(batch.limits) as engine:
        assembler = OutputProcessor(small_tokenizers.byte_level())
        while arrivals or assembler.live:
            for prepared in arrivals.pop(turn, ()):
                ids[prepared.id] = _add(engine, assembler, prepared)
            for verb, line_id, which in batch.events.get(turn, ()):
                for request_id in ids[line_id] if which is None else [ids[line_id][which]]:
                    getattr(engine, verb)(request_id)
            routed = assembler.route(engine.step())
            for request_id in routed.stop:
                engine.cancel(request_id, FinishReason.STOP)
            for output in routed.finished:
                assert output.key not in done, f"{output.key} came out twice"
                done[output.key] = output
            turn += 1
            assert turn < MOST_TURNS, "the engine does not come to an end"
        engine.stop()
        check_all_is_back(engine)
        return done, dict(engine.counters)


def _add(engine: Engine, assembler: OutputProcessor, prepared: PreparedRequest) -> list[int]:
    (prompt,) = prepared.prompts
    request = assembler.open(
        prepared.id,
        prompt.token_ids,
        prepared.sampling,
        prompt=prompt.text,
        eos_token_ids=(EOS,),
        priority=prepared.priority,
    )
    engine.add(request)
    return list(request.answer_ids)


def plainly(requests: list[PreparedRequest]) -> dict[object, RequestOutput]:
    """One after the other, serially, with room for everything and nothing to find."""
    limits: Row = {"depth": 0, "rows": 4, "blocks": 200, "max_prefill_tokens": CONTEXT, "prefix_caching": False}
    arrivals: dict[object, RequestOutput] = {}
    with _engine(limits) as engine:
        for prepared in requests:
            assembler = OutputProcessor(small_tokenizers.byte_level())
            assembler.next_id = 10 * len(arrivals)
            _add(engine, assembler, prepared)
            while assembler.live:
                routed = assembler.route(engine.step())
                for request_id in routed.stop:
                    engine.cancel(request_id, FinishReason.STOP)
                arrivals |= {output.key: output for output in routed.finished}
        assert engine.counters["chained_steps"] == 0
    return arrivals


# ---- what must be equal ----


def check_seed(seed: int) -> dict[str, int | float]:
    """Raises AssertionError where a batch differs from what its lines get one by one; returns the engine's counters."""
    batch = random_batch(seed)
    found, counters = play(batch)
    expected = plainly(batch.requests)
    assert found.keys() == expected.keys()
    for prepared in batch.requests:
        mine, plain = found[prepared.id], expected[prepared.id]
        whole = True
        for answer, other in zip(mine.completions, plain.completions, strict=True):
            if answer.finish_reason is FinishReason.CANCELLED:
                whole = False
                _check_beginning(seed, prepared, answer, other)
            else:
                assert answer == other, f"seed {seed}, {prepared}:\n{answer}\nalone:\n{other}"
        if whole:
            if plain.failed is None:  # of a prompt that breaks, how much is no number depends on how it was cut
                assert mine.prompt_logprobs == plain.prompt_logprobs, f"seed {seed}, {prepared}"
            assert _row(prepared, mine) == _row(prepared, plain), f"seed {seed}, {prepared}"
    return counters


def _check_beginning(seed: int, prepared: PreparedRequest, cut: Completion, whole: Completion) -> None:
    """A cancelled answer is a beginning of the whole one."""
    length = len(cut.token_ids)
    logprobs = None if whole.logprobs is None else whole.logprobs[:length]
    assert cut.token_ids == whole.token_ids[:length], f"seed {seed}, {prepared}:\n{cut}\nalone:\n{whole}"
    assert cut.logprobs == logprobs, f"seed {seed}, {prepared}:\n{cut}\nalone:\n{whole}"


def _row(prepared: PreparedRequest, output: RequestOutput) -> bytes:
    """As it is written down, but for times."""
    timeless = replace(output.timing, queued=0.0, ttft=None, tpot=None, e2e=0.0)
    return answer_row(prepared, [replace(output, timing=timeless)], small_tokenizers.byte_level(), 0)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--seeds", type=int, default=500)
    options.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    given = options.parse_args()
    torch.set_num_threads(1)
    began, failed, done = time.monotonic(), 0, 0
    sums: dict[str, int | float] = {}
    for seed in range(given.first, given.first + given.seeds):
        if time.monotonic() - began > given.seconds:
            break
        try:
            for name, count in check_seed(seed).items():
                sums[name] = sums.get(name, 0) + count
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
        done += 1
        if done % 100 == 0:
            print(f"{done} batches, {failed} differ, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{done} batches, {failed} differ, {time.monotonic() - began:.0f} s; {json.dumps(sums)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

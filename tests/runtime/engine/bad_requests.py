"""Bad and border requests through two doors, `complete` and Engine.add, of one engine that must not notice:
``torchrun ... -m tests.runtime.engine.bad_requests FOLDER COUNT OUTPUT`` does it with several ranks.

A request is refused with RequestError, or it is served to a regular end. Between them run neighbours, whose tokens are
the same as without them.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from lockstride import EngineClient, EngineConfig, PromptRequest, RequestError, SamplingParams, complete, open_engine
from runtime.engine import Engine
from runtime.frontend.tokenizer import Tokenizer
from runtime.schedule.request import FinishReason, Request
from tests.runtime.engine.rig import VOCABULARY, run, tiny_folder
from tests.runtime.frontend import small_tokenizers

CONTEXT = 24
ROWS = 32
BATCH = 256
NEIGHBOURS = 10**6  # their request ids begin here
BAD_IDS = (-1, 2**62, 10**400, True, None, "5", 1.0)
WELL = {FinishReason.STOP, FinishReason.LENGTH}
Fields = dict[str, Any]  # of SamplingParams, and ``prompt``, ``priority`` and ``request_id``
HUGE = (2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, 10**400)
NO_NUMBERS: tuple[Any, ...] = (
    None,
    "5",
    "",
    b"5",
    (5,),
    [5],
    {},
    {5: 5},
    object(),
    5j,
    float("nan"),
    float("inf"),
    -float("inf"),
)
WHOLE = (-(2**63) - 1, -(2**63), -(2**31), -1, 0, 1, 2, 5, 20, 21, CONTEXT, 128, 129, *HUGE, True, False, 1.0, 0.5)
REAL = (-1e308, -2.0001, -2.0, -0.0, 0, 0.0, 5e-324, 1e-7, 0.001, 0.5, 1, 1.0, 1.0001, 2.0, 1000.0, 1000.1, 1e308)
NUMPY = (np.int64(3), np.int32(2**31 - 1), np.float32(0.5), np.float64(1.0), np.bool_(True), np.array(3), np.array([3]))
TEXTS = ("END", "", "x" * 1024, "x" * 1025, "\ud800", "a\udfff", "\U0001f600", "\x00", "e", b"e", None, 5, True, ["e"])
IDS = (-(2**63), -1, 0, 2, VOCABULARY - 1, VOCABULARY, 2**31, 2**63, 10**400, True, None, 1.0, "7", (7,), np.int64(7))
FIELDS: dict[str, Sequence[Any]] = {
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs", "seed"), WHOLE),
    "n": (-1, 0, 1, 2, 3, 128, 129, *HUGE, True, 1.0),
    **dict.fromkeys(("temperature", "top_p", "min_p"), (*REAL, *HUGE, Fraction(1, 3), Fraction(1, 10**400))),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), (*REAL, *HUGE, True)),
    "ignore_eos": (True, False, 0, 1, None, "yes", np.bool_(True)),
    "priority": WHOLE,
}


def legal(draw: random.Random) -> Fields:
    """A short request that every engine serves: fields of SamplingParams, and ``prompt`` and ``priority``."""
    return {
        "prompt": tuple(draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 8))),
        "max_tokens": draw.randint(1, 6),
        "temperature": draw.choice((0.0, 0.8)),
        "seed": draw.randrange(1000),
        "priority": 0,
    }


def odd(draw: random.Random) -> Fields:
    """A legal request of which one to three fields are bad, or at a border."""
    fields = legal(draw)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        name = draw.choice((*FIELDS, "prompt", "prompt", "stop", "stop_token_ids"))
        if name == "prompt":
            fields[name] = _prompt(draw)
        elif name == "stop":
            strings = [draw.choice(TEXTS) for _ in range(draw.choice((0, 1, 2, 16, 17)))]
            fields[name] = draw.choice((tuple(strings), strings, "END", None, 5, iter("e"), {"e"}))
        elif name == "stop_token_ids":
            ids = [draw.choice((2, 7, draw.choice(IDS))) for _ in range(draw.choice((0, 1, 15, 16, 17)))]
            fields[name] = draw.choice((tuple(ids), ids, None, 7, "7", {7}, np.array([7]), range(10**12)))
        else:
            fields[name] = draw.choice((*FIELDS[name], draw.choice(NO_NUMBERS), draw.choice(NUMPY)))
    return fields


def _prompt(draw: random.Random) -> Any:
    length = draw.choice((0, 1, 2, CONTEXT - 2, CONTEXT - 1, CONTEXT, CONTEXT + 1, 500))
    plain = [draw.randrange(3, VOCABULARY) for _ in range(length)]
    strange: list[Any] = [*plain[:-1], draw.choice(IDS)]
    others = (None, 5, 5.0, True, "", "a", "a" * 500, "\ud800", b"abc", {3}, {3: 3}, iter([3]), range(10**12), object())
    arrays = (np.array(plain or [3]), np.array([[3, 4]]), np.array(3), torch.tensor([3, 4]), torch.tensor([3.5]))
    return draw.choice((plain, strange, strange, draw.choice(others), draw.choice(arrays), range(3, 3 + length)))


OTHERS = ("prompt", "priority", "request_id")


def neighbours() -> list[Fields]:
    draw = random.Random(77)
    return [legal(draw) for _ in range(8)]


def sampling_of(fields: Fields) -> SamplingParams:
    return SamplingParams(**{name: value for name, value in fields.items() if name not in OTHERS})


class Doors:
    """Both doors of one open engine."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.config = EngineConfig(model=str(folder), load_format="dummy", device="cpu")
        self.client = EngineClient(engine, Tokenizer.if_any(folder))

    def complete(self, requests: Sequence[Fields]) -> list[list[tuple[int, ...]]]:
        """The tokens of each request's answers, of a `complete` that finds this engine when it opens one."""

        @contextmanager
        def opened(config: EngineConfig) -> Iterator[Engine]:
            yield self.engine

        tokenizer = patch.object(Tokenizer, "if_any", return_value=self.client.tokenizer)
        with tokenizer, patch("launch.complete.open_engine", opened):
            outputs = complete(self.config, [fields["prompt"] for fields in requests], list(map(sampling_of, requests)))
        assert {c.finish_reason for output in outputs for c in output.completions} <= WELL
        return [[completion.token_ids for completion in output.completions] for output in outputs]

    def through_complete(self, odd_ones: Sequence[Fields]) -> int:
        """What ``prepare`` refuses is refused beside a good request, too, and all else is served. Returns how many were
        refused."""
        alone, refused, good = self.complete(neighbours()), 0, []
        for fields in odd_ones:
            try:
                self.client.prepare(PromptRequest(fields["prompt"], sampling_of(fields)))
            except RequestError:
                refused += 1
                with pytest.raises(RequestError):
                    self.complete([neighbours()[0], fields])
            else:
                good.append(fields)
        for begin in range(0, len(good), BATCH):
            found = self.complete([*neighbours(), *good[begin : begin + BATCH]])
            assert found[: len(alone)] == alone
        return refused

    def through_add(self, odd_ones: Sequence[Fields]) -> int:
        """Returns how many were refused."""
        beside = [self.request(NEIGHBOURS + at, fields) for at, fields in enumerate(neighbours())]
        alone, refused, number = run(self.engine, beside), 0, 0
        for begin in range(0, len(odd_ones), BATCH):
            first = number
            for fields in odd_ones[begin : begin + BATCH]:
                try:
                    self.engine.add(self.request(fields.get("request_id", number), fields))
                except RequestError:
                    refused += 1
                else:
                    number += sampling_of(fields).n  # an id for each answer
            found = run(self.engine, beside)
            assert found.keys() == {*range(first, number), *alone}
            assert {one.reason for one in found.values()} <= WELL
            assert {key: found[key] for key in alone} == alone
        return refused

    @staticmethod
    def request(request_id: Any, fields: Fields) -> Request:
        stops = fields.get("stop_token_ids", ())
        return Request(request_id, fields["prompt"], sampling_of(fields), stops, fields["priority"])


def check(engine: Engine, folder: Path, count: int) -> dict[str, int]:
    """``count`` requests through each door; raises AssertionError, or whatever an engine that broke raises."""
    doors, draw = Doors(engine, folder), random.Random(count)
    odd_ones = [odd(draw) for _ in range(count)]
    by_complete = doors.through_complete(odd_ones)
    for fields in odd_ones[:: len(BAD_IDS) * 10]:
        fields["request_id"] = draw.choice(BAD_IDS)
    return {"complete": by_complete, "add": doors.through_add(odd_ones), "steps": int(engine.counters["steps"])}


def model_folder(folder: Path) -> Path:
    """The tiny model, with a tokenizer that has more ids than the model."""
    small_tokenizers.save(small_tokenizers.byte_level_backend(), tiny_folder(folder))
    return folder


def main(folder: Path, count: int, output: Path) -> None:
    torch.set_num_threads(1)
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        device="cpu",
        max_num_seqs=ROWS,
        block_size=8,
        max_model_len=CONTEXT,
        num_blocks=200,
        max_prefill_tokens=128,
        decode_buckets=(ROWS,),
        bundles=str(output.parent / "bundles"),
    )
    with open_engine(config) as engine:
        if engine.is_leader:
            output.write_text(json.dumps(check(engine, folder, count)))
        else:
            engine.follow()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

"""Masks that an engine applies, against a matcher that reads each answer alone: random schemas, bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from runtime.execute.proposer import MakeProposer
from runtime.frontend.structured import structured
from runtime.grammar import Grammars, Matcher, Words
from runtime.schedule.request import FinishReason, Request, SamplingParams
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculate.tree import branching
from runtime.speculative_config import speculative_config
from tests.plant import invariant_kernels
from tests.runtime.engine import rig as rigs
from tests.runtime.engine.conftest import long
from tests.runtime.engine.lives import live
from tests.runtime.engine.replay_proposer import script_of
from tests.runtime.engine.rig import request, rig
from tests.runtime.engine.same_bits import OpenRig, answers, difference, plainly
from tests.runtime.engine.table_rigs import hold
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_grammar import EOS, NO_BLANKS, SHAPE, VOCABULARY, mixture
from tests.runtime.engine.test_trees import RANKS, KnownAnswers
from tests.runtime.frontend import small_tokenizers

pytest.importorskip("llguidance")

pytestmark = pytest.mark.slow
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


@pytest.fixture(autouse=True)
def _over_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rigs, "TINY", rigs.TINY | SHAPE)


def schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Of a document that can be short."""
    kind = draw.choice(("integer", "enum", "string", "boolean", *(("object", "array", "anyOf") if depth < 3 else ())))
    if kind == "integer":
        low = draw.randrange(-20, 2000)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randrange(1, 500)}
    if kind == "enum":
        return {"enum": draw.sample(["cat", "ca", 'a"b', None, 5, 55, [1], {"a": 1}, "\u00e9"], draw.randrange(1, 5))}
    if kind == "string":
        limits = {"maxLength": draw.randrange(1, 6)}
        return {"type": "string", **draw.choice((limits, {"pattern": "^[a-c]{1,3}x?$"}, {"format": "date"}))}
    if kind == "array":
        return {"type": "array", "items": schema(draw, depth + 1), "maxItems": draw.randrange(0, 3)}
    if kind == "anyOf":
        return {"anyOf": [schema(draw, depth + 1) for _ in range(draw.randrange(1, 4))]}
    if kind == "object":
        names = draw.sample(["a", "ab", "b", "name"], draw.randrange(0, 4))
        properties = {name: schema(draw, depth + 1) for name in names}
        required = [name for name in names if draw.random() < 0.6]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "boolean"}


class Watched(Grammars):
    """``masks``: of each request (by its seed) what its latest matcher allowed, one after the other, and the tokens of
    its answer before the first of them."""

    def __init__(self) -> None:
        super().__init__(lambda: small_tokenizers.byte_level().to_json(), VOCABULARY, (EOS,))
        self.masks: dict[int | None, list[tuple[int, list[Words]]]] = {}

    def matcher(self, sampling: SamplingParams, stop_token_ids: Any, answer: Sequence[int]) -> Matcher:
        made = super().matcher(sampling, stop_token_ids, answer)
        found: list[Words] = []
        self.masks.setdefault(sampling.seed, []).append((len(answer), found))
        restrict = made.restrict

        def noted(allowed_W: Words) -> None:
            restrict(allowed_W)
            found.append(allowed_W.copy())

        made.restrict = noted  # type: ignore[method-assign]
        return made


def asked(seed: int, count: int) -> tuple[list[Request], dict[int, Any]]:
    """Requests with schemas of their own, and one beside them without."""
    draw = random.Random(f"masks {seed}")
    schemas = {i: schema(draw) for i in range(count)}
    fields: dict[str, Any] = {"temperature": 2.0, "max_tokens": 40, "logit_bias": NO_BLANKS, "stops": (EOS,)}
    requests = [
        request(i, [5 + (7 * i + j) % 300 for j in range(3 + i)], seed=i, grammar=structured(json=one), **fields)
        for i, one in schemas.items()
    ]
    return [*requests, request(count, [9, 8, 7], seed=count, max_tokens=30, stops=())], schemas


HOW: list[tuple[int, int, bool, int]] = [  # depth, tokens of a draft window, a tree, ranks
    (0, 1, False, 1), (2, 4, False, 1), (3, 3, True, 1), (2, 3, False, 2),
]  # fmt: skip
MANY = [(depth, width, False, ranks) for depth in range(5) for width in range(1, 5) for ranks in (1, 2)]
MANY += [(depth, 3, True, 1) for depth in range(5)]


@pytest.mark.parametrize(("seeds", "hows"), [((1,), HOW), long((2, 3), MANY)])
def test_masks_are_those_of_a_matcher_that_reads_the_answer_alone(
    seeds: Sequence[int], hows: list[tuple[int, int, bool, int]]
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    alone = Grammars(lambda: small_tokenizers.byte_level().to_json(), VOCABULARY, (EOS,))
    for seed in seeds:
        requests, schemas = asked(seed, 6)
        script = None
        for depth, width, tree, ranks in hows:
            watched = Watched()
            how: dict[str, Any] = {"depth": depth, "grammars": watched}
            if width > 1:
                config = speculative_config(NGRAM | {"num_speculative_tokens": width - 1})
                how |= {"proposer": proposer_for(config), "speculation": Speculation(width, mixed_percent=100)}
            if tree:
                assert script is not None
                known = script
                proposer = branching(lambda parts, known=known: KnownAnswers(parts, known), RANKS)  # type: ignore[misc]
                how |= {"proposer": proposer, "speculation": Speculation(width, mixed_percent=0), "tree": 8}
            if ranks > 1:
                how["over"] = lambda **more: tensor_rig(2, **more)
            finished = live(requests, **how).finished
            script = script or script_of(requests, {i: ended.token_ids for i, ended in finished.items()})
            compared = 0
            for one in requests[:-1]:
                ended = finished[one.request_id]
                if ended.reason is FinishReason.STOP:
                    text = small_tokenizers.byte_level().decode(ended.token_ids)
                    jsonschema.validate(json.loads(text), schemas[one.request_id])
                for first, masks in watched.masks[one.sampling.seed]:
                    hold(alone, one.sampling.grammar)
                    matcher = alone.matcher(one.sampling, (EOS,), ended.token_ids[:first])
                    for at, mask_W in enumerate(masks[: len(ended.token_ids) - first], first):
                        expected_W = np.zeros_like(mask_W)
                        matcher.allow(expected_W)
                        assert (mask_W == expected_W).all(), (seed, depth, width, tree, ranks, at)
                        token = ended.token_ids[at]
                        assert mask_W[token // 32] >> token % 32 & 1
                        matcher.accept((token,))
                        compared += 1
            assert compared >= 30
    alone.close()


def grammars_change_no_bit(
    over: OpenRig,
    grammars: Grammars | None = None,
    requests: Sequence[Request] = (),
    proposer: MakeProposer | None = None,
    **trees: Any,
) -> None:
    """Of tokens and log-probabilities, alone and beside others, chained and with draft tokens. ``grammars``: those of
    the latter; alone it is the host that masks. ``requests``: others than a mixture, whose grammars force tokens."""
    asked, alone = requests or mixture(6, logprobs=3), Watched()
    expected, grammars = plainly(over, asked, grammars=alone), grammars or alone
    proposer = proposer or proposer_for(speculative_config(NGRAM))
    drafts: dict[str, Any] = {"proposer": proposer, "speculation": Speculation(4, mixed_percent=100), **trees}
    for limits in ({"depth": 1, "rows": 7, "buckets": (1, 2, 7)}, {"depth": 3, "rows": 4, **drafts}):
        with over(grammars=grammars, **limits) as engine:
            found = answers(engine, asked)
            forced = engine.counters["spec_num_accepted_tokens"] if requests and "proposer" in limits else 20
        assert forced >= 20
        told = difference(found, expected)
        assert (told.flips, told.bits) == (0, 0), told
        assert told.compared > 60


@pytest.mark.long  # with tables, too: test_grammar_tables.py
def test_a_grammar_in_the_deterministic_mode_is_its_own_in_every_bit() -> None:
    grammars_change_no_bit(partial(rig, kernels=invariant_kernels()))

"""Tokens that a grammar forces are draft tokens: fewer steps, and the tokens of the serial engine without windows."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.execute.proposer import ProposerParts
from runtime.execute.sampling.token_tables import MOST_FORCED
from runtime.frontend.client import EngineClient, PromptRequest
from runtime.frontend.structured import structured
from runtime.schedule.request import FinishReason, Request, SamplingParams
from runtime.schedule.speculation import Speculation
from runtime.speculate.guesses import ProbabilisticProposer
from runtime.speculate.methods import proposer_for
from runtime.speculate.synthetic import scripted
from runtime.speculate.tree import branching
from runtime.speculative_config import speculative_config
from tests.plant import invariant_kernels
from tests.runtime.engine import rig as rigs
from tests.runtime.engine.conftest import long, over_model
from tests.runtime.engine.group_rigs import dealt_rig
from tests.runtime.engine.lives import Life, live, oracle, same
from tests.runtime.engine.replay_proposer import script_of
from tests.runtime.engine.rig import request, rig, run
from tests.runtime.engine.same_bits import OpenRig
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_grammar import EOS, GRAMMARS, NO_BLANKS, SHAPE, VOCABULARY, text_of
from tests.runtime.engine.test_grammar_masks import NGRAM, grammars_change_no_bit
from tests.runtime.engine.test_trees import RANKS, KnownAnswers
from tests.runtime.frontend import small_tokenizers
from tests.runtime.speculate.recorded import Drafter

pytest.importorskip("llguidance")

pytestmark = pytest.mark.slow
SIZES = "hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "intermediate_size"
SAID = "forced: {all of this}"
NESTED = structured(grammar=f'start: "{SAID}" tail\ntail: "" | "(" tail ")"')  # recursive: it gets no table
WORDS = small_tokenizers.byte_level().encode(SAID)


@pytest.fixture(autouse=True)
def _over_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rigs, "TINY", rigs.TINY | SHAPE)


def windows(width: int = 4, percent: int = 100) -> dict[str, Any]:
    config = speculative_config(NGRAM | {"num_speculative_tokens": width - 1})
    return {"proposer": proposer_for(config), "speculation": Speculation(width, mixed_percent=percent)}


def recursive(draw: random.Random) -> dict[str, Any]:
    """A schema of documents whose keys are forced here and there, within each other."""
    names = draw.sample(["name", "names", "kind", "a key that is long", "n"], draw.randrange(1, 4))
    leaves: list[dict[str, Any]] = [
        {"const": "always the same"}, {"enum": ["alpha", "alphabet"]}, {"type": "integer"}, {"type": "boolean"},
    ]  # fmt: skip
    properties = {name: draw.choice(leaves) for name in names}
    properties["below"] = {"type": "array", "items": {"$ref": "#"}, "maxItems": draw.randrange(1, 3)}
    required = [name for name in properties if draw.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def asked(seed: int, count: int = 4) -> list[Request]:
    """Of every kind of sampling; the last has no grammar."""
    draw, made = random.Random(f"forced {seed}"), []
    for i in range(count):
        fields: dict[str, Any] = {
            "temperature": (0.0, 1.0, 2.0)[i % 3],
            "max_tokens": draw.randrange(20, 70),
            "min_tokens": draw.choice((0, 0, 12)),
            "logprobs": i % 2,
            "repetition_penalty": draw.choice((1.0, 1.3)),
            "frequency_penalty": draw.choice((0.0, 0.5)),
            "logit_bias": NO_BLANKS,
            "bad_words_token_ids": draw.choice(((), ((19,),))),
            "grammar": structured(json=recursive(draw)),
        }
        made.append(request(i, [5 + (7 * i + j) % 300 for j in range(3 + 4 * i)], stops=(EOS,), **fields))
    return [*made, request(count, [9, 8, 7], seed=count, max_tokens=30, stops=())]


def ridden(life: Life, requests: Sequence[Request]) -> int:
    """Tokens of answers with a grammar that came with another one in a step."""
    return sum(sum(life.rounds.get(one.request_id, ())) - len(life.rounds.get(one.request_id, ())) for one in requests)


HOW: list[tuple[int, int, bool, int]] = [(2, 4, False, 1), (3, 4, True, 1), (1, 3, False, 2)]
MANY = [(depth, width, tree, 1) for depth in range(5) for width in range(1, 5) for tree in (False, width > 2)]
MANY += [(depth, width, False, 2) for depth, width in ((0, 4), (1, 3), (2, 2), (3, 4), (4, 3))]


@pytest.mark.parametrize(("seeds", "hows"), [((1,), HOW), long((2, 3, 4), MANY)])
def test_random_recursive_schemas(seeds: Sequence[int], hows: list[tuple[int, int, bool, int]]) -> None:
    """Tokens, log-probabilities and ends, to the last bit."""
    for seed in seeds:
        requests = asked(seed)
        alone = oracle(requests, grammars=GRAMMARS)
        script = script_of(requests, {i: ended.token_ids for i, ended in alone.finished.items()})
        for depth, width, tree, ranks in hows:
            how: dict[str, Any] = {"depth": depth, "grammars": GRAMMARS}
            if tree:
                proposer = branching(lambda parts, known=script: KnownAnswers(parts, known), RANKS)  # type: ignore[misc]
                how |= {"proposer": proposer, "speculation": Speculation(width, mixed_percent=0), "tree": 9}
            elif width > 1:
                how |= windows(width)
            if ranks > 1:
                how["over"] = lambda **more: tensor_rig(2, **more)
            life = live(requests, **how)
            same(life, alone)
            assert (ridden(life, requests[:-1]) >= 9) == (width > 1), (seed, depth, width, tree, ranks)


@pytest.mark.parametrize("width", [4, long(2), long(16), long(19)])
def test_a_run_takes_as_few_steps_as_fit_it(width: int) -> None:
    """W tokens a step, as long as all are forced; then one."""
    asked = [request(0, [5, 6, 7], stops=(EOS,), max_tokens=60, grammar=NESTED)]
    life = live(asked, depth=2, grammars=GRAMMARS, **windows(width))
    same(life, oracle(asked, grammars=GRAMMARS))
    steps, most = life.rounds[0], min(width, 1 + MOST_FORCED)
    full, after = divmod(len(WORDS) - 1, most)  # the first token comes with the prompt
    assert steps[: full + 1] == [most] * full + [after + 1]
    assert life.counters["spec_num_accepted_tokens"] == sum(steps) - len(steps)


@pytest.mark.parametrize("percent", [100, long(0)])
def test_limits_within_a_run(percent: int) -> None:
    """max_tokens at every place of it; a stop id that ends no text, a bad word and other ids that leave nothing;
    a bias that forbids nothing; min_tokens after it; and whoever writes something else."""
    usual: dict[str, Any] = {"stops": (EOS,), "max_tokens": 40, "grammar": NESTED, "logprobs": 1, "temperature": 1.0}
    many: list[dict[str, Any]] = [{"max_tokens": most} for most in range(1, 8)]
    many += [{"stops": (EOS, WORDS[3])}, {"bad_words_token_ids": ((WORDS[1], WORDS[2]),)}, {"ignore_eos": True}]
    many += [{"logit_bias": ((WORDS[5], -100.0),)}, {"min_tokens": len(WORDS) + 6}, {"frequency_penalty": 2.0}]
    many += [{"allowed_token_ids": tuple(WORDS[:4])}, {"grammar": ""}]
    requests = [request(i, [5, 6, 7 + i], seed=i, **(usual | fields)) for i, fields in enumerate(many)]
    life = live(requests, depth=2, rows=5, grammars=GRAMMARS, **windows(4, percent))
    same(life, oracle(requests, grammars=GRAMMARS))
    reasons = [life.finished[i].reason for i in range(len(many))]
    assert reasons[:7] == [FinishReason.LENGTH] * 7
    assert [reasons[i] for i in (7, 8, 13)] == [FinishReason.ERROR] * 3
    assert [life.finished[i].token_ids for i in (7, 8, 13)] == [tuple(WORDS[:n]) for n in (3, 2, 4)]


def test_a_stop_string_within_a_run() -> None:
    with rig(depth=2, grammars=GRAMMARS, **windows()) as engine:
        client = EngineClient(engine, small_tokenizers.byte_level())
        sampling = SamplingParams(max_tokens=40, stop=("all of",), grammar=NESTED)
        (ended,) = [one for turn in client.run([PromptRequest([5, 6, 7], sampling)]) for one in turn.finished]
        client.close()
    (answer,) = ended.completions
    assert (answer.text, answer.finish_reason) == ("forced: {", FinishReason.STOP)


def test_forks_and_whoever_is_evicted() -> None:
    requests = asked(5, 6)
    tight = live(requests, depth=2, blocks=20, grammars=GRAMMARS, **windows())
    assert tight.counters["evictions"]
    same(tight, oracle(requests, grammars=GRAMMARS))
    several = [replace(requests[1], sampling=replace(requests[1].sampling, n=3, logprobs=None))]
    forked = live(several, depth=2, grammars=GRAMMARS, **windows())
    same(forked, oracle(several, grammars=GRAMMARS))
    assert forked.counters["forks"] == 2


def test_whoever_is_cancelled_within_a_run_leaves_a_ghost() -> None:
    requests = asked(6)
    with rig(depth=3, grammars=GRAMMARS, **windows()) as engine:
        finished = run(engine, requests, lambda engine, turn: engine.cancel(turn // 9) if turn in (9, 18, 27) else None)
        assert engine.counters["ghost_rows"] > 0
    alone = oracle(requests, grammars=GRAMMARS).answers
    for i, (tokens, _) in alone.items():
        assert finished[i].token_ids == tokens[: len(finished[i].token_ids)]


@pytest.mark.long
def test_a_model_with_recurrent_state(monkeypatch: pytest.MonkeyPatch) -> None:
    over_model("nemotron-h", monkeypatch)
    requests = asked(7)
    life = live(requests, depth=2, grammars=GRAMMARS, **windows())
    same(life, oracle(requests, grammars=GRAMMARS))
    assert ridden(life, requests[:-1]) >= 9


def test_groups_that_deal_requests_out() -> None:
    requests = asked(8)
    alone = oracle(requests, grammars=GRAMMARS).answers
    with dealt_rig(depth=2, grammars=GRAMMARS, **windows()) as engine:
        finished = run(engine, requests)
    assert {i: (ended.token_ids, ended.reason) for i, ended in finished.items()} == alone


def test_beside_drafts_that_are_drawn_or_scripted(tmp_path: Path) -> None:
    """What is forced is kept whatever a drafter drew there, and whatever a script keeps."""
    drafter = Drafter("mtp", tmp_path, vocab_size=VOCABULARY, hidden_size=rigs.TINY["hidden_size"])

    def drawn(parts: ProposerParts) -> Any:
        inner: Any = drafter(parts).inner
        return ProbabilisticProposer(parts.device, inner)

    asked = [request(i, [5, 6, 7 + i], stops=(EOS,), max_tokens=60, temperature=1.0, grammar=NESTED) for i in range(3)]
    for proposer in (drawn, scripted(windows()["proposer"], (0.5, 0.4, 0.3))):
        life = live(asked, depth=2, grammars=GRAMMARS, proposer=proposer, speculation=Speculation(4, mixed_percent=100))
        for i, ended in life.finished.items():
            assert text_of(ended).startswith(SAID)
            assert max(life.rounds[i]) == 4
        assert proposer is not drawn or life.rounds[0][: len(WORDS) // 4 - 1] == [4] * (len(WORDS) // 4 - 1)


@pytest.mark.long  # on a GPU: tests/gpu/test_grammar_gpu.py
@pytest.mark.parametrize("kind", ["ngram", "mtp", "tree"])
def test_in_the_deterministic_mode_runs_change_no_bit(kind: str, tmp_path: Path) -> None:
    runs_change_no_bit(kind, tmp_path, partial(rig, kernels=invariant_kernels()), rigs.TINY)


def runs_change_no_bit(kind: str, folder: Path, over: OpenRig, shape: Mapping[str, object]) -> None:
    """``shape``: of the model, whose vocabulary is small; ``folder``: for a drafter of random weights."""
    requests = [*asked(1), request(9, [5, 6, 7], stops=(EOS,), max_tokens=40, temperature=1.0, grammar=NESTED)]
    requests = [replace(one, sampling=replace(one.sampling, logprobs=3)) for one in requests if one.sampling.grammar]
    sizes: dict[str, Any] = {key: shape[key] for key in (*SIZES, "vocab_size")}
    drafter = Drafter("mtp", folder, top_k=2 if kind == "tree" else 0, **sizes)
    proposer = None if kind == "ngram" else lambda parts: drafter(parts).inner
    trees: dict[str, Any] = {"tree": 9} if kind == "tree" else {}
    grammars_change_no_bit(over, requests=requests, proposer=proposer, **trees)


def test_a_matcher_is_where_it_was_before_a_run() -> None:
    """And reads on from any place of it."""
    matcher = GRAMMARS.matcher(SamplingParams(grammar=NESTED), (EOS,), ())
    allowed_GW = np.zeros((1, -(-VOCABULARY // 32)), np.int32)
    for at in range(len(WORDS) + 1):
        for most in (3, 0):
            allowed_GW.fill(0)
            (run,) = GRAMMARS.allow([matcher], allowed_GW, [most])
            assert run == WORDS[at : at + most]
            bits = np.flatnonzero(np.unpackbits(allowed_GW.view(np.uint8), bitorder="little")).tolist()
            after = at + len(run)
            assert bits == WORDS[after : after + 1] or (after == len(WORDS) and EOS in bits and len(bits) > 1)
        if at < len(WORDS):
            matcher.accept(WORDS[at : at + 1])

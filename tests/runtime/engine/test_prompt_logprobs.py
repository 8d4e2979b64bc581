"""Log-probabilities of prompts through the engine: a float32 forward of the whole prompt says what they must be."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Unpack

import pytest
import torch
from torch import Tensor

from models.inputs import PrefillAttention, StepInputs
from models.registry import config_from_dict
from models.weights import load_model
from parallel.comm.collectives import SingleRank
from runtime.engine import Engine
from runtime.execute.device.cpu_twin import TwinDevice
from runtime.schedule import reservation
from runtime.schedule.request import Request
from runtime.schedule.states import State
from tests.models.kv_layers import kv_layers
from tests.plant import reference_kernels
from tests.runtime.engine.conftest import long
from tests.runtime.engine.prompt_ranks import TOP, Score, Scores, prompts
from tests.runtime.engine.rig import TINY, VOCABULARY, RigLimits, request, rig, run, tiny_folder
from tests.torchrun import torchrun

CLOSE = 1e-4
SMALL = 24  # prompts come in chunks, and chunks of several prompts share a step


@cache
def reference(prompt: tuple[int, ...]) -> Tensor:
    """Log-probabilities [T, V] of what follows each token of ``prompt``, from one forward over all of it."""
    config = config_from_dict(TINY)
    model = load_model(
        config,
        None,
        load_format="dummy",
        dtype=torch.float32,
        device="cpu",
        collectives=SingleRank(),
        kernels=reference_kernels(),
    )
    length = len(prompt)
    caches = kv_layers(model.cache_layout, 2, length)
    positions = torch.arange(length)
    attention = PrefillAttention(torch.ones(1, 1, dtype=torch.int32), (length,), (length,))
    with torch.inference_mode():
        hidden = model.forward(StepInputs(torch.tensor(prompt), positions, length + positions, attention), caches)
        return torch.log_softmax(model.logits(hidden).to(torch.float64), 1)


def check(one: Request, found: dict[int, Score]) -> None:
    """Every position but the first is there and right; where two tokens are as good as equal, either may be first."""
    prompt, top = one.prompt_token_ids, one.sampling.prompt_logprobs
    assert sorted(found) == list(range(1, len(prompt)))
    for position, (chosen, rank, top_ids, top_values) in found.items():
        expected = reference(prompt)[position - 1]
        value = expected[prompt[position]].item()
        assert chosen == pytest.approx(value, abs=CLOSE)
        assert 1 + int((expected > value + CLOSE).sum()) <= rank <= 1 + int((expected > value - CLOSE).sum())
        assert top_values == pytest.approx(expected.topk(top or 0).values.tolist(), abs=CLOSE)
        assert top_values == pytest.approx(expected[top_ids].tolist(), abs=CLOSE)
        assert len(set(top_ids)) == top


def scored(requests: list[Request], **limits: Unpack[RigLimits]) -> tuple[Scores, Engine]:
    scores = Scores()
    with rig(**limits) as engine:
        run(engine, requests, watch=scores)
    return scores, engine


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("max_prefill_tokens", [200, 24, 7])
def test_every_prompt_token_but_the_first_is_scored(depth: int, max_prefill_tokens: int) -> None:
    requests = prompts()
    scores, _ = scored(requests, depth=depth, max_prefill_tokens=max_prefill_tokens)
    asked = [r for r in requests if r.sampling.prompt_logprobs is not None and len(r.prompt_token_ids) > 1]
    assert sorted(scores.by_request) == [r.request_id for r in asked]
    for one in asked:
        check(one, scores.by_request[one.request_id])


@pytest.mark.parametrize("depth", [long(1), 2, long(4)])
def test_every_depth_reports_the_serial_engine_s_bits(depth: int) -> None:
    """Prompts come one at a time, so that the same chunks are cut at any depth."""
    for one in prompts(seed=1):
        serial, _ = scored([one], depth=0, max_prefill_tokens=SMALL)
        deep, _ = scored([one], depth=depth, max_prefill_tokens=SMALL)
        assert deep.by_request == serial.by_request


def test_slow_and_uneven_streams_mix_nothing_up() -> None:
    """Every step of a long prefill reuses an entry of the side channel that a late copy may still be reading."""
    steady, _ = scored(prompts(), max_prefill_tokens=7)
    for seed in range(2):
        device = TwinDevice(jitter_s=0.002, seed=seed)
        uneven, _ = scored(prompts(), max_prefill_tokens=7, device=device)
        assert uneven.by_request == steady.by_request


def test_generated_and_prompt_log_probabilities_at_once() -> None:
    one = request(0, range(30, 60), max_tokens=5, logprobs=2, prompt_logprobs=4)
    plain = request(0, range(30, 60), max_tokens=5)
    scores = Scores()
    with rig(max_prefill_tokens=SMALL) as engine:
        tokens = run(engine, [one], watch=scores)[0].token_ids
    with rig(max_prefill_tokens=SMALL) as engine:
        assert run(engine, [plain])[0].token_ids == tokens
    check(one, scores.by_request[0])


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("evicted_in", [State.PREFILL, State.DECODE])
def test_a_request_that_is_recomputed_reports_nothing_twice(depth: int, evicted_in: State) -> None:
    requests = [request(0, range(10), max_tokens=20), request(1, range(50, 110), max_tokens=10, prompt_logprobs=3)]
    scores = Scores()

    def act(engine: Engine, turn: int) -> None:
        sequence = engine.scheduler.ledger.sequences.get(1)
        ready = sequence is not None and sequence.state is evicted_in and engine.scheduler.counters.evictions == 0
        if ready and sequence is not None and sequence.prefilled >= 24:
            reservation.evict(engine.scheduler.ledger, sequence)

    with rig(depth=depth, max_prefill_tokens=SMALL) as engine:
        run(engine, requests, act, watch=scores)
        assert engine.counters["evictions"] == 1
    check(requests[1], scores.by_request[1])


def test_a_cached_prompt_is_computed_again_for_whoever_asks() -> None:
    one, again = request(0, range(40)), request(1, range(40), prompt_logprobs=1)
    scores = Scores()
    with rig() as engine:
        run(engine, [one])
        run(engine, [again], watch=scores)
        assert engine.counters["prefix_hit_tokens"] == 0
        run(engine, [request(2, range(40))])
        assert engine.counters["prefix_hit_tokens"] == 32
    check(again, scores.by_request[1])


def test_whoever_does_not_ask_pays_nothing() -> None:
    silent = [request(r.request_id, r.prompt_token_ids, max_tokens=6) for r in prompts()]
    _, engine = scored(silent)
    assert engine.executor.prompt_scores.nbytes == 0
    assert engine.counters["device_allocs_after_warmup"] == 0
    scores, curious = scored(prompts())
    assert scores.by_request
    entries, words = 2 + 3, 64 * (2 + 2 * 20)
    assert curious.executor.prompt_scores.nbytes == 4 * entries * words
    assert curious.counters["device_allocs_after_warmup"] == 1, "once, for whoever asks first"
    assert curious.counters["graph_captures_after_warmup"] == 0, "decode steps are none the wiser"
    tokens = [(len(r.prompt_token_ids) - 1, top) for r, top in zip(prompts(), TOP, strict=True) if top is not None]
    grown = curious.counters["device_to_host_bytes"] - engine.counters["device_to_host_bytes"]
    least = sum(4 * count * (2 + 2 * top) for count, top in tokens)
    most = sum(4 * count * (2 + 2 * 20) for count, _ in tokens)
    assert least <= grown <= most


def of_two_ranks(parent: Path) -> dict[int, dict[int, Score]]:
    """What two tensor-parallel ranks report."""
    folder, output = tiny_folder(parent / "model"), parent / "scores.json"
    ran = torchrun(2, "tests.runtime.engine.prompt_ranks", str(folder), str(output))
    assert ran.returncode == 0, ran.said[-3000:]
    found = json.loads(output.read_text())
    return {int(i): {int(p): tuple(score) for p, score in scores.items()} for i, scores in found.items()}


@pytest.mark.multiprocess
def test_two_ranks_score_the_whole_vocabulary(tmp_path: Path) -> None:
    assert VOCABULARY % 2, "one rank has a padding column, which must never be likely"
    asked = [r for r in prompts() if r.sampling.prompt_logprobs is not None and len(r.prompt_token_ids) > 1]
    found = of_two_ranks(tmp_path)
    assert sorted(found) == [r.request_id for r in asked]
    for one in asked:
        check(one, found[one.request_id])

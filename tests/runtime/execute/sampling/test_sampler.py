"""sample, local_best, merge_best and stop_check: the same token everywhere, and the right distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from parallel.comm.peer_buffers import SENTINEL
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.logprobs import token_logprobs
from runtime.execute.sampling.packed_argmax import NO_CANDIDATE, pack, unpack
from runtime.execute.sampling.penalties import count_tokens_, load_tokens_, reset_slots_
from runtime.execute.sampling.sampler import (
    local_share,
    merge_and_check,
    merge_best,
    merge_shares,
    sample,
    sample_and_check,
    stop_check,
)
from runtime.schedule.request import FinishReason, SamplingParams
from tests.dispatch_mode import DispatchMode
from tests.runtime.execute.sampling import sampling_reference as reference
from tests.runtime.execute.sampling.sampling_cases import processed, random_params, rows_for, seen_for

EVERYTHING = SamplingVariant(random=True, filters=True, penalties=True, min_tokens=True)


def _mixture(seed: int, rows: int, vocab: int) -> tuple[torch.Tensor, list[SamplingParams], list[int]]:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 3, (rows, vocab)).astype(np.float32))
    return logits, [random_params(rng) for _ in range(rows)], rng.integers(0, 5000, rows).tolist()


# ---- the right tokens ----


@pytest.mark.parametrize("vocab", [1, 2, 5, 333, 1024, 2001])
def test_tokens_are_those_of_the_float64_reference(vocab: int) -> None:
    logits, params, positions = _mixture(vocab, 64, vocab)
    got = sample(logits, rows_for(params, positions), SamplingVariant.covering(params))
    wanted = [
        reference.draw(logits[i].double().numpy(), p, (p.seed or 0) % 2**64, positions[i]) for i, p in enumerate(params)
    ]
    assert got.token_B.tolist() == wanted
    assert got.token_B.dtype == torch.int64
    assert got.ok_B.all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=3.0),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.5, top_k=12, top_p=0.8, min_p=0.05),
        SamplingParams(repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.4, top_p=0.9),
    ],
    ids=str,
)
@pytest.mark.parametrize("vary", ["seed", pytest.param("position", marks=pytest.mark.long)])  # test_noise.py mixes both
def test_draws_have_the_exact_distribution(params: SamplingParams, vary: str) -> None:
    draws, vocab = 40_000, 23
    logits = np.random.default_rng(8).normal(0, 1.5, vocab).astype(np.float32)
    prompt, output = [1, 2, 3, 3], [4, 4, 5, 1]
    features = SamplingVariant.covering([params])
    rows = rows_for([params], [17]).select(torch.zeros(draws, dtype=torch.int64))
    varied: dict[str, Any] = {vary: torch.arange(draws)}
    rows = replace(rows, **varied)
    seen = seen_for(vocab, [prompt], [output]).select(torch.zeros(draws, dtype=torch.int64))
    tokens = sample(torch.from_numpy(logits).expand(draws, vocab), processed(rows, features, seen), features).token_B
    exact = reference.probabilities(reference.shape(logits.astype(np.float64), params, prompt, output), params)
    observed = np.bincount(tokens.numpy(), minlength=vocab)
    assert (observed[exact == 0] == 0).all()
    statistic, degrees = reference.chi_square(observed, exact * draws)
    assert statistic < reference.chi_square_bound(degrees)


@pytest.mark.slow
def test_rare_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should() -> None:
    """One token has half the mass, 65,536 equal ones the rest: coarse noise would favour some of them."""
    vocab, draws = 1 + (1 << 16), 100
    logits = torch.zeros(vocab)
    logits[0] = np.log(1 << 16)
    rows = rows_for([SamplingParams()], [0]).select(torch.zeros(draws, dtype=torch.int64))
    rows = replace(rows, seed=torch.arange(draws))
    tokens = sample(logits.expand(draws, vocab), rows, SamplingVariant(random=True)).token_B
    rare = tokens[tokens > 0]
    assert abs(len(rare) - draws / 2) < 5 * np.sqrt(draws / 4)
    observed = torch.histc(rare.double(), bins=8, min=1, max=vocab - 1).long().numpy()
    statistic, degrees = reference.chi_square(observed, np.full(8, len(rare) / 8))
    assert statistic < reference.chi_square_bound(degrees)


# ---- the same tokens ----


def test_a_row_draws_the_same_token_in_any_batch() -> None:
    logits, params, positions = _mixture(5, 40, 777)
    rows = rows_for(params, positions)
    features = SamplingVariant.covering(params)
    together = sample(logits, rows, features).token_B
    order = torch.from_numpy(np.random.default_rng(6).permutation(40))
    assert torch.equal(sample(logits[order], rows.select(order), features).token_B, together[order])
    for size in (1, 2, 7):
        for start in range(0, 40 - size, size):
            part = torch.arange(start, start + size)
            assert torch.equal(sample(logits[part], rows.select(part), features).token_B, together[part])


def test_variants_agree_on_rows_that_do_not_use_the_difference() -> None:
    logits, params, positions = _mixture(9, 48, 555)
    rows = rows_for(params, positions)
    seen = seen_for(555, [[1, 2]] * 48, [[3, 3]] * 48)
    everything = sample(logits, processed(rows, EVERYTHING, seen), EVERYTHING).token_B
    for row, p in enumerate(params):
        own = SamplingVariant.covering([p])
        alone = torch.tensor([row])
        assert sample(logits[alone], rows.select(alone), own).token_B[0] == everything[row], (p, own)


def test_greedy_takes_the_lowest_id_of_ties_under_every_variant() -> None:
    logits = torch.full((3, 1000), -1.0)
    logits[0, [900, 31, 500]] = 2.0
    logits[1, 0] = 0.0
    logits[1, 7] = -0.0
    logits[2] = 5.0
    rows = rows_for([SamplingParams(temperature=0.0)] * 3, [3] * 3)
    seen = seen_for(1000, [[]] * 3, [[]] * 3)
    for features in (SamplingVariant(), SamplingVariant(random=True), SamplingVariant(filters=True), EVERYTHING):
        assert sample(logits, processed(rows, features, seen), features).token_B.tolist() == [31, 0, 0]


def test_logits_are_not_modified_and_bfloat16_is_taken() -> None:
    logits, params, positions = _mixture(12, 8, 64)
    half = logits.bfloat16()
    rows, features = rows_for(params, positions), SamplingVariant.covering(params)
    before = half.clone()
    assert torch.equal(sample(half, rows, features).token_B, sample(half.float(), rows, features).token_B)
    assert torch.equal(half, before)
    full = logits.clone()
    sample(full, processed(rows, EVERYTHING, seen_for(64, [[1]] * 8, [[2]] * 8)), EVERYTHING)
    assert torch.equal(full, logits)


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 100.0])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 8, (200, 51)).astype(np.float32))
    rows = rows_for([SamplingParams(temperature=temperature, seed=3)] * 200, list(range(200)))
    draw = sample(logits, rows, SamplingVariant(random=True))
    assert draw.ok_B.all()
    if temperature < 1:
        assert torch.equal(draw.token_B, logits.argmax(1))
    else:
        assert len(set(draw.token_B.tolist())) > 40


# ---- shares of the vocabulary ----


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("vocab", [7, 64, 1001])
@pytest.mark.parametrize("filtered", [False, True])
def test_shares_of_the_vocabulary_give_the_token_of_the_whole(tp: int, vocab: int, filtered: bool) -> None:
    logits, params, positions = _mixture(tp * vocab, 32, vocab)
    logits = (logits * 2).round() / 2  # plenty of ties
    params = [replace(p, repetition_penalty=1.25, min_tokens=9) for p in params]
    for row, p in enumerate(params):
        if not filtered or row % 8 == 7:  # rows without a filter beside the others
            params[row] = replace(p, top_k=0, top_p=1.0, min_p=0.0)
        elif not p.top_k:
            params[row] = replace(p, top_k=row * 2 + 1)
    stop_ids = [[i % vocab, vocab - 1] for i in range(32)]
    rows = rows_for(params, [p % 16 for p in positions], stop_ids=stop_ids)
    seen = seen_for(vocab, [[i % vocab] for i in range(32)], [[0, vocab // 2]] * 32)
    features = SamplingVariant.covering(params)
    assert features.vocabulary_parallel
    assert features.filters == filtered
    whole = sample(logits, processed(rows, features, seen), features)

    share = -(-vocab // tp)  # the last ranks hold padding, or nothing but padding
    padded = torch.nn.functional.pad(logits, (0, share * tp - vocab), value=1e9)
    rows = processed(rows, features, seen)
    keys = []
    for rank in range(tp):
        part = slice(rank * share, (rank + 1) * share)
        keys.append(local_share(padded[:, part], rank * share, rows, features, vocab_size=vocab))
    for order in (range(tp), reversed(range(tp))):
        merged, _ = merge_shares(torch.cat([keys[rank] for rank in order], 1), rows, features)
        assert torch.equal(merged.token_B, whole.token_B)
        assert torch.equal(merged.ok_B, whole.ok_B)


@pytest.mark.parametrize("filters", [False, True])
def test_a_bad_share_ends_only_its_row(filters: bool) -> None:
    logits = torch.zeros(5, 16)
    logits[1, 3], logits[2, 12], logits[3] = float("nan"), float("inf"), float("-inf")
    params = [SamplingParams(temperature=0.0), *[SamplingParams(seed=1, top_k=7 if filters else 0)] * 4]
    rows, features = rows_for(params, [0] * 5), SamplingVariant.covering(params)
    keys = torch.cat([local_share(logits[:, s : s + 4], s, rows, features) for s in range(0, 16, 4)], 1)
    draw, _ = merge_shares(keys, rows, features)
    assert draw.ok_B.tolist() == [True, False, False, False, True]
    assert torch.equal(draw.token_B, sample(logits, rows, features).token_B)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(top_p=0.5), SamplingParams(min_p=0.5), SamplingParams(top_k=65), SamplingParams(logprobs=1)],
    ids=["top-p", "min-p", "top-k", "logprobs"],
)
def test_what_needs_whole_rows_refuses_a_share(params: SamplingParams) -> None:
    features = SamplingVariant.covering([params, SamplingParams(top_k=3)])
    with pytest.raises(ValueError, match="gather them and call sample"):
        local_share(torch.zeros(1, 4), 0, rows_for([SamplingParams(seed=1)], [0]), features)


def test_one_rank_draws_all_filters_in_one_variant() -> None:
    bounded, unbounded = (SamplingVariant.covering([SamplingParams(top_k=k, top_p=0.9)]) for k in (64, 65))
    assert bounded.on_ranks(2) == bounded != unbounded == unbounded.on_ranks(2)
    assert bounded.on_ranks(1) == unbounded.on_ranks(1)
    assert unbounded.covers(bounded)
    assert not bounded.covers(unbounded)


def test_candidates_order_as_scores_then_lowest_id() -> None:
    inf, nan = float("inf"), float("nan")
    scores = torch.tensor([-inf, -1e30, -1.0, -0.0, 0.0, 1e-40, 2.5, inf, nan, -nan])
    ids = torch.arange(10)
    keys = pack(scores, ids)
    values, back = unpack(keys)
    assert torch.equal(back, ids)
    assert torch.equal(values.nan_to_num(7.0), scores.nan_to_num(7.0))
    descending = keys.sort(descending=True).indices.tolist()
    assert descending == [8, 9, 7, 6, 5, 3, 4, 2, 1, 0]  # -0.0 and 0.0 tie, and so do the NaNs: the lower id first
    assert (keys > NO_CANDIDATE).all()


# ---- rows that cannot be drawn from, and rows that end ----


def test_no_half_of_a_key_is_what_empty_peer_buffers_hold() -> None:
    """parallel/comm/key_gather_triton.py would wait for such a key for ever."""
    empty = (SENTINEL & 0xFFFF) << 16 | SENTINEL & 0xFFFF
    high, low = torch.arange(1 << 16), torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (high[:, None] << 16 | low).flatten()
    scores = torch.where(bits < 1 << 31, bits, bits - (1 << 32)).to(torch.int32).view(torch.float32)
    ids = torch.tensor([0, 0x7FFF, 0x8000, 0x7FFF7FFF, 2**31 - 1])
    keys = pack(scores[:, None], ids).flatten()
    for key in (keys, torch.tensor([NO_CANDIDATE])):
        assert not bool(((key & 0xFFFFFFFF) == empty).any())
        assert not bool((((key >> 32) & 0xFFFFFFFF) == empty).any())


@pytest.mark.parametrize("features", [SamplingVariant(), SamplingVariant(random=True), EVERYTHING], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_unusable_rows_are_isolated(features: SamplingVariant, bad: float) -> None:
    logits, params, positions = _mixture(21, 6, 50)
    if not features.random:
        params = [SamplingParams(temperature=0.0)] * 6
    if not features.filters:
        params = [replace(p, top_k=0, top_p=1.0, min_p=0.0) for p in params]
    rows = rows_for(params, positions, stop_ids=[[13]] * 6)
    seen = seen_for(50, [[1]] * 6, [[2]] * 6)
    clean = sample(logits, processed(rows, features, seen), features)
    assert clean.ok_B.all()
    spoiled = logits.clone()
    for row, columns in ((1, [49]), (4, [0, 13])):
        spoiled[row, columns if bad > 0 or bad != bad else slice(None)] = bad
    got = sample(spoiled, processed(rows, features, seen), features)
    assert got.ok_B.tolist() == [True, False, True, True, False, True]
    assert got.token_B[[1, 4]].tolist() == [0, 0]
    healthy = torch.tensor([0, 2, 3, 5])
    assert torch.equal(got.token_B[healthy], clean.token_B[healthy])


def test_some_minus_infinity_is_usable() -> None:
    logits = torch.full((2, 9), float("-inf"))
    logits[:, 6] = -3.0
    rows = rows_for([SamplingParams(seed=2), SamplingParams(temperature=0.0)], [0, 0])
    for features in (SamplingVariant(random=True), EVERYTHING):
        draw = sample(logits, processed(rows, features, seen_for(9, [[], []], [[], []])), features)
        assert draw.token_B.tolist() == [6, 6]
        assert draw.ok_B.all()


def test_stop_check() -> None:
    cases = [  # position, min_tokens, max_tokens (prompt of 10), token, finished, usable -> count, reason
        (12, 0, 99, 5, False, True, 1, FinishReason.NONE),
        (12, 0, 99, 7, False, True, 1, FinishReason.STOP),
        (12, 0, 99, 8, False, True, 1, FinishReason.STOP),
        (12, 2, 99, 7, False, True, 1, FinishReason.STOP),  # two tokens stand before it
        (12, 3, 99, 7, False, True, 1, FinishReason.NONE),  # too early
        (12, 0, 3, 5, False, True, 1, FinishReason.LENGTH),  # the third token of three
        (11, 0, 3, 5, False, True, 1, FinishReason.NONE),
        (12, 0, 3, 7, False, True, 1, FinishReason.STOP),  # stop comes before length
        (12, 3, 3, 7, False, True, 1, FinishReason.LENGTH),
        (12, 0, 3, 7, False, False, 0, FinishReason.ERROR),
        (12, 0, 3, 7, True, True, 0, FinishReason.NONE),
        (12, 0, 3, 7, True, False, 0, FinishReason.NONE),
    ]
    rows = rows_for(
        [SamplingParams(min_tokens=c[1], max_tokens=c[2]) for c in cases],
        [c[0] for c in cases],
        prompt_lengths=[10] * len(cases),
        stop_ids=[[7, 8]] * len(cases),
        finished=[c[4] for c in cases],
    )
    verdict = stop_check(torch.tensor([c[3] for c in cases]), rows, torch.tensor([c[5] for c in cases]))
    assert verdict.count_B.tolist() == [c[6] for c in cases]
    assert verdict.finish_B.tolist() == [int(c[7]) for c in cases]
    assert verdict.count_B.dtype == verdict.finish_B.dtype == torch.int32


def test_min_tokens_keeps_stop_ids_from_being_drawn() -> None:
    """With a stop id that holds nearly all the mass, the first two tokens are others and the third is the stop."""
    logits = torch.zeros(1, 12).expand(3, 12).clone()
    logits[:, 4] = 40.0
    for temperature in (0.0, 1.0):
        params = [SamplingParams(temperature=temperature, min_tokens=2, seed=6)] * 3
        rows = rows_for(params, [5, 6, 7], prompt_lengths=[5] * 3, stop_ids=[[4, 9]] * 3)
        tokens = sample(logits, rows, SamplingVariant.covering(params)).token_B
        assert not set(tokens[:2].tolist()) & {4, 9}
        assert tokens[2] == 4
        verdict = stop_check(tokens, rows, torch.ones(3, dtype=torch.bool))
        assert verdict.finish_B.tolist() == [FinishReason.NONE, FinishReason.NONE, FinishReason.STOP]


def test_the_fused_forms_are_the_two_steps() -> None:
    logits, params, positions = _mixture(33, 12, 90)
    rows = rows_for(params, positions, stop_ids=[[i] for i in range(12)], finished=[i % 4 == 0 for i in range(12)])
    features = SamplingVariant.covering(params)
    draw = sample(logits, rows, features)
    verdict = stop_check(draw.token_B, rows, draw.ok_B)
    keys = local_share(logits, 0, rows, SamplingVariant(random=True))
    merged = merge_best(keys)
    for got, wanted in (
        (sample_and_check(logits, rows, features), (draw, verdict)),
        (merge_and_check(keys, rows=rows), (merged, stop_check(merged.token_B, rows, merged.ok_B))),
    ):
        for ours, theirs in zip((*got[0], *got[1]), (*wanted[0], *wanted[1]), strict=True):
            assert torch.equal(ours, theirs)


# ---- nothing reaches the host ----


class _NoReadBack(DispatchMode):
    """Fails on every operator whose result, or result's shape, the host would have to wait for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        dynamic = torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
        masks = func is torch.ops.aten.index.Tensor and any(t is not None and t.dtype == torch.bool for t in args[1])
        assert not dynamic, f"{func} reads the device"
        assert not masks, f"{func} selects by a boolean mask"
        return func(*args, **(kwargs or {}))


def test_the_guard_sees_read_backs() -> None:
    for offence in (torch.Tensor.item, torch.Tensor.nonzero, lambda t: t[t > 0]):
        with _NoReadBack(), pytest.raises(AssertionError, match=r"reads the device|boolean mask"):
            offence(torch.ones(1))


def test_sampling_reads_nothing_back() -> None:
    logits, params, positions = _mixture(40, 5, 64)
    rows = rows_for(params, positions, stop_ids=[[1, 2]] * 5, finished=[False] * 4 + [True])
    seen = seen_for(64, [[1]] * 5, [[2]] * 5)
    slots, live = torch.arange(5), torch.ones(5, dtype=torch.bool)
    bounded = SamplingVariant(random=True, filters=True)
    with _NoReadBack():
        merge_shares(local_share(logits, 0, rows, bounded), rows, bounded)
        selected = processed(rows.select(slots), EVERYTHING, seen.select(slots))
        draw, verdict = sample_and_check(logits, selected, EVERYTHING)
        merge_and_check(local_share(logits, 0, rows, SamplingVariant(random=True)), rows=rows)
        token_logprobs(logits, draw.token_B, 3)
        count_tokens_(seen, slots, draw.token_B, verdict.count_B > 0)
        reset_slots_(seen, slots[:2])
        load_tokens_(seen, slots, draw.token_B, live)


# ---- variants ----


def test_features_cover_what_requests_ask_for() -> None:
    covering = SamplingVariant.covering
    assert covering([]) == covering([SamplingParams(temperature=0.0, top_k=5, top_p=0.5)]) == SamplingVariant()
    assert covering([SamplingParams(), SamplingParams(temperature=0.0)]) == SamplingVariant(random=True)
    assert covering([SamplingParams(min_p=0.1)]) == SamplingVariant(random=True, filters=True, unbounded=True)
    assert covering([SamplingParams(top_k=20, top_p=0.8)]) == SamplingVariant(random=True, filters=True)
    mixed = covering([SamplingParams(logprobs=0), SamplingParams(logprobs=7), SamplingParams(min_tokens=1)])
    assert mixed == SamplingVariant(random=True, min_tokens=True, logprobs=True, top_logprobs=20)
    assert not mixed.vocabulary_parallel
    assert covering([SamplingParams(presence_penalty=1.0)]).penalties
    with pytest.raises(ValueError, match="top_logprobs is 21"):
        covering([SamplingParams(logprobs=21)])


def test_numbers_of_likely_tokens_share_few_variants() -> None:
    """Each variant is captured for itself; a row is shown as many as it asked for, whatever the variant computes."""
    room = [SamplingVariant.covering([SamplingParams(logprobs=n)]).top_logprobs for n in range(21)]
    assert room == [0, 1, *[5] * 4, *[20] * 15]
    assert str(SamplingVariant.covering([SamplingParams(logprobs=2)])) == "random, logprobs, up to 5 likely tokens"

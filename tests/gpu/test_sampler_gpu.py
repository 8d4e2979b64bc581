"""Sampling on the GPU against the same sampling on the CPU: the same tokens, bit for bit, and no sync.

Without a GPU, on fewer rows, as CI does it: ``make interpreted``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from runtime.execute.sampling import counter_rng, exact_math, logprobs, sampler
from runtime.execute.sampling.filters import survival_threshold
from runtime.execute.sampling.inputs import SamplingInputs, SamplingVariant
from runtime.execute.sampling.kernels import triton_kernels
from runtime.execute.sampling.penalties import SeenTokens, count_tokens_
from runtime.execute.sampling.sampler import Draw, Verdict, local_best, merge_and_check, sample, sample_and_check
from runtime.schedule.request import SamplingParams
from tests.gpu.test_device_gpu import no_synchronisation
from tests.gpu.untyped import Stream
from tests.runtime.execute.sampling.sampling_cases import random_params, rows_for, seen_for

triton = pytest.importorskip("triton")
from runtime.execute.sampling import draw_triton as sampling_triton  # noqa: E402
from runtime.execute.sampling import filters_triton as sampling_filters_triton  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    importlib.import_module("tests.models.kernels.interpreted_kernels")  # mends Triton's interpreter for today's numpy
DEVICE = "cpu" if INTERPRETED else "cuda"
VOCABS = (1, 97, 2049, 5000) if INTERPRETED else (1, 97, 2049, 32_000, 151_936)
ROWS = 6 if INTERPRETED else 64

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, with which the interpreter computes
]
needs_cuda = pytest.mark.skipif(INTERPRETED, reason="about the device, not the arithmetic")


@pytest.fixture(autouse=True)
def use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels take CPU tensors, which the sampler would otherwise give to torch."""
    if INTERPRETED:
        for module in (sampler, logprobs):
            monkeypatch.setattr(module, "kernels_for", lambda tensor: triton_kernels())


def _moved(rows: SamplingInputs, device: str) -> SamplingInputs:
    """The rows on the device, as strided columns of one table like the slot records."""

    def strided(t: torch.Tensor) -> torch.Tensor:
        return torch.stack((t, t), -1).to(device)[..., 0]

    return SamplingInputs(**{f.name: strided(getattr(rows, f.name)) for f in fields(rows)})


def _mixture(seed: int, vocab: int, rows: int = ROWS) -> tuple[torch.Tensor, SamplingInputs, SeenTokens]:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 3, (rows, vocab)).astype(np.float32))
    params = [random_params(rng, min_tokens=2, max_tokens=9, repetition_penalty=1.25) for _ in range(rows)]
    stop_ids = [rng.integers(0, vocab, 3).tolist() for _ in range(rows)]
    prompts = [rng.integers(0, vocab, 5).tolist() for _ in range(rows)]
    outputs = [rng.integers(0, vocab, 5).tolist() for _ in range(rows)]
    cases = rows_for(
        params,
        rng.integers(5, 15, rows).tolist(),
        stop_ids=stop_ids,
        prompt_lengths=[5] * rows,
        finished=[bool(i % 5 == 4) for i in range(rows)],
    )
    return logits, cases, seen_for(vocab, prompts, outputs)


def _on_cpu(
    logits: torch.Tensor, rows: SamplingInputs, features: SamplingVariant, seen: SeenTokens | None = None
) -> tuple[Draw, Verdict]:
    """The torch path, whatever ``use_triton`` patched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "kernels_for", lambda tensor: None)
        return sample_and_check(logits, rows, features, seen)


VARIANTS = [
    SamplingVariant(),
    SamplingVariant(random=True),
    SamplingVariant(random=True, filters=True),
    SamplingVariant(random=True, filters=True, penalties=True, min_tokens=True),
]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("features", VARIANTS, ids=["greedy", "random", "filters", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_and_verdicts_are_those_of_the_cpu(vocab: int, features: SamplingVariant, dtype: torch.dtype) -> None:
    logits, rows, seen = _mixture(vocab, vocab)
    if not features.random:
        rows = replace(rows, temperature=torch.zeros_like(rows.temperature))
    logits = logits.to(dtype)  # bfloat16 makes plenty of ties
    if vocab > 1:
        logits[1, vocab // 2], logits[2, 0] = float("nan"), float("inf")
    logits[3] = float("-inf")
    wanted, wanted_verdict = _on_cpu(logits, rows, features, seen)
    device_seen = SeenTokens(seen.counts.to(DEVICE), seen.prompt.to(DEVICE))
    draw, verdict = sample_and_check(logits.to(DEVICE), _moved(rows, DEVICE), features, device_seen)
    assert draw.token_B.tolist() == wanted.token_B.tolist()
    assert draw.ok_B.tolist() == wanted.ok_B.tolist()
    assert verdict.count_B.tolist() == wanted_verdict.count_B.tolist()
    assert verdict.finish_B.tolist() == wanted_verdict.finish_B.tolist()
    assert draw.token_B.dtype == torch.int64
    assert verdict.count_B.dtype == verdict.finish_B.dtype == torch.int32


@pytest.mark.parametrize("tp", [2, 8])
def test_shares_of_the_vocabulary(tp: int) -> None:
    vocab = VOCABS[-1] - 1
    logits, rows, _ = _mixture(3, vocab)
    features = SamplingVariant(random=True)
    wanted, _ = _on_cpu(logits, rows, features)
    share = -(-vocab // tp)
    padded = torch.nn.functional.pad(logits, (0, share * tp - vocab), value=1e9).to(DEVICE)
    moved = _moved(rows, DEVICE)
    keys = [
        local_best(padded[:, r * share : (r + 1) * share], r * share, moved, features, vocab_size=vocab)
        for r in range(tp)
    ]
    draw, _ = merge_and_check(torch.stack(keys, 1), rows=moved)
    assert draw.token_B.tolist() == wanted.token_B.tolist()


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("tied", [False, True])
def test_survivors_are_those_of_the_sort(vocab: int, tied: bool) -> None:
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.normal(0, 3, (ROWS, vocab)).astype(np.float32))
    if tied:
        logits = (logits * 4).round() / 4
    params = [random_params(rng, temperature=1.0) for _ in range(ROWS - 4)]
    params += [SamplingParams(top_k=2**31 - 1), SamplingParams(top_p=1e-30), SamplingParams(min_p=1.0)]
    params += [SamplingParams(top_k=max(1, vocab - 1), top_p=0.999999, min_p=1e-30)]
    rows = rows_for(params, [0] * ROWS)
    threshold, largest = survival_threshold(logits, rows)
    moved, device_logits = _moved(rows, DEVICE), logits.to(DEVICE)
    got, got_largest = sampling_filters_triton.survival_threshold(
        device_logits, moved.temperature, moved.top_k, moved.top_p, moved.min_p
    )
    assert torch.equal(got_largest.cpu(), largest)
    assert torch.equal((device_logits >= got[:, None]).cpu(), logits >= threshold[:, None])


def test_constants_are_those_of_the_reference() -> None:
    with open(sampling_triton.__file__, encoding="utf-8") as file:
        source = file.read()
    constants = [*exact_math.LOG_COEFFICIENTS, *exact_math.EXP_COEFFICIENTS, exact_math.LOG2_E, exact_math.LN2_HIGH]
    for constant in constants:
        assert any(float(np.float32(constant)) == float(np.float32(number)) for number in _numbers(source)), constant


def _numbers(source: str) -> Iterator[float]:
    for word in source.replace("(", " ").replace(")", " ").replace(",", " ").split():
        try:
            yield float(word)
        except ValueError:
            continue


@needs_cuda
def test_torch_noise_has_the_same_bits_on_both() -> None:
    keys = counter_rng.row_keys(torch.arange(-8, 8), torch.arange(16) * 1000003)
    ids = torch.arange(30_001, dtype=torch.int32)
    on_cpu = counter_rng.gumbel_noise(keys, ids)
    on_gpu = counter_rng.gumbel_noise(keys.cuda(), ids.cuda())
    assert torch.equal(on_gpu.cpu().view(torch.int32), on_cpu.view(torch.int32))


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize(("top_n", "dtype"), [(0, torch.float32), (1, torch.bfloat16), (20, torch.bfloat16)])
def test_log_probabilities_have_the_same_bits_on_both(vocab: int, top_n: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.normal(0, 4, (ROWS, vocab)).astype(np.float32)).to(dtype)
    logits[1], logits[2, vocab - 1] = float("-inf"), float("nan")
    logits[3, : vocab // 2] = float("-inf")
    tokens = torch.from_numpy(rng.integers(0, vocab, ROWS))
    got = logprobs.token_logprobs(logits.to(DEVICE), tokens.to(DEVICE), top_n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "kernels_for", lambda tensor: None)
        wanted = logprobs.token_logprobs(logits, tokens, top_n)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)


@needs_cuda
@pytest.mark.parametrize("features", VARIANTS, ids=["greedy", "random", "filters", "all"])
def test_a_captured_graph_draws_anew_at_each_position_and_never_syncs(features: SamplingVariant) -> None:
    vocab = 151_936
    logits, rows, seen = _mixture(5, vocab, 32)
    rows = replace(rows, finished=torch.zeros(32, dtype=torch.bool))
    if not features.random:
        rows = replace(rows, temperature=torch.zeros(32))
    device_logits, moved = logits.cuda(), _moved(rows, "cuda")
    device_seen = SeenTokens(seen.counts.cuda(), seen.prompt.cuda())
    slots = torch.arange(32, device="cuda")

    def step() -> torch.Tensor:
        draw, verdict = sample_and_check(device_logits, moved, features, device_seen)
        if features.penalties:
            count_tokens_(device_seen, slots, draw.token_B, verdict.count_B > 0)
        moved.position.add_(1)
        return draw.token_B

    stream = Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with no_synchronisation(), torch.cuda.stream(stream):
        step()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            tokens = step()
    torch.cuda.synchronize()
    moved.position.copy_(rows.position)
    device_seen.counts.copy_(seen.counts)
    counts = SeenTokens(seen.counts.clone(), seen.prompt)
    for step_number in range(4):
        graph.replay()
        now = replace(rows, position=rows.position + step_number)
        wanted, verdict = _on_cpu(logits, now, features, counts)
        assert tokens.tolist() == wanted.token_B.tolist()
        if features.penalties:
            count_tokens_(counts, torch.arange(32), wanted.token_B, verdict.count_B > 0)


def test_a_row_is_the_same_in_any_batch() -> None:
    logits, rows, _ = _mixture(8, VOCABS[-1])
    features = SamplingVariant(random=True, filters=True)
    moved, device_logits = _moved(rows, DEVICE), logits.to(DEVICE)
    together = sample(device_logits, moved, features).token_B
    for row in range(0, ROWS, 5):
        index = torch.tensor([row], device=DEVICE)
        assert sample(device_logits[index], moved.select(index), features).token_B[0] == together[row]

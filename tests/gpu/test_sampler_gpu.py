"""Sampling on the GPU against the same sampling on the CPU: the same tokens, bit for bit, and no sync.

Without a GPU, on fewer rows, as CI does it: ``make interpreted``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from runtime.execute.sampling import (
    counter_rng,
    exact_math,
    logit_edits,
    logprobs,
    penalties,
    rejection,
    sampler,
)
from runtime.execute.sampling.filters import survival_threshold
from runtime.execute.sampling.inputs import SamplingInputs, SamplingVariant
from runtime.execute.sampling.kernels import triton_kernels
from runtime.execute.sampling.penalties import SeenTokens, count_tokens_
from runtime.execute.sampling.sampler import (
    Draw,
    Verdict,
    local_share,
    merge_best,
    merge_shares,
    sample,
    sample_and_check,
)
from runtime.schedule.request import SamplingParams
from tests.dispatch_mode import DispatchMode
from tests.gpu.test_device_gpu import no_synchronisation
from tests.gpu.untyped import Stream
from tests.runtime.execute.sampling.edit_cases import edits_for, random_edits
from tests.runtime.execute.sampling.sampling_cases import processed, random_params, rows_for, seen_for
from tests.selection import covering

triton = pytest.importorskip("triton")
from runtime.execute.sampling import draw_triton as sampling_triton  # noqa: E402
from runtime.execute.sampling import listing_triton, rejection_triton, shares_triton, threshold_triton  # noqa: E402

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
        for module in (sampler, logprobs, rejection, logit_edits, penalties):
            monkeypatch.setattr(module, "kernels_for", lambda tensor: triton_kernels())


def _moved(rows: SamplingInputs, device: str) -> SamplingInputs:
    """The rows on the device, as strided columns of one table like the slot records."""

    def strided(t: torch.Tensor) -> torch.Tensor:
        return torch.stack((t, t), -1).to(device)[..., 0]

    names = [f.name for f in fields(rows) if f.name != "processors"]
    moved: dict[str, Any] = {name: strided(getattr(rows, name)) for name in names}
    return SamplingInputs(**moved)


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
    logits: torch.Tensor,
    rows: SamplingInputs,
    features: SamplingVariant,
    seen: SeenTokens | None = None,
    edits: logit_edits.RowEdits | None = None,
) -> tuple[Draw, Verdict]:
    """The torch path, whatever ``use_triton`` patched."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (sampler, logit_edits, penalties):
            patch.setattr(module, "kernels_for", lambda tensor: None)
        return sample_and_check(logits, processed(rows, features, seen, edits), features)


VARIANTS = [
    SamplingVariant(),
    SamplingVariant(random=True),
    SamplingVariant(random=True, filters=True),
    SamplingVariant(random=True, filters=True, penalties=True, min_tokens=True),
]


def grid(*axes: Sequence[Any], at_once: int) -> list[Any]:
    """All combinations; in the interpreter a few that cover (tests/selection.py)."""
    return [case.values for case in covering(*axes, at_once=at_once) if not (INTERPRETED and case.marks)]


GUESSES = grid((True, False), (VARIANTS[1], VARIANTS[-1]), (7, 1300) if INTERPRETED else (7, *VOCABS[2:]), at_once=2)
BLOCKS = grid(VARIANTS[1:3], (torch.float32, torch.bfloat16), at_once=1)


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
    moved = processed(_moved(rows, DEVICE), features, device_seen)
    draw, verdict = sample_and_check(logits.to(DEVICE), moved, features)
    assert draw.token_B.tolist() == wanted.token_B.tolist()
    assert draw.ok_B.tolist() == wanted.ok_B.tolist()
    assert verdict.count_B.tolist() == wanted_verdict.count_B.tolist()
    assert verdict.finish_B.tolist() == wanted_verdict.finish_B.tolist()
    assert draw.token_B.dtype == torch.int64
    assert verdict.count_B.dtype == verdict.finish_B.dtype == torch.int32


def _edited(seed: int, vocab: int, device: str) -> logit_edits.RowEdits:
    """Of ROWS rows that name tokens; the same on any device."""
    rng = np.random.default_rng(seed)
    outputs = [rng.integers(0, min(vocab, 5), rng.integers(0, 25)).tolist() for _ in range(ROWS)]
    params = [SamplingParams(**random_edits(rng, vocab, output)) for output in outputs]
    params[4] = SamplingParams()
    return edits_for(params, outputs, vocab, device)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edited_logits_have_the_same_bits_on_both(vocab: int, dtype: torch.dtype) -> None:
    """Whole rows, and a share that begins in the middle of a mask's word."""
    logits, _, _ = _mixture(vocab, vocab)
    logits = logits.to(dtype)
    logits[1, vocab // 2], logits[2, 0] = float("nan"), float("inf")
    on_cpu, on_device = _edited(vocab, vocab, "cpu"), _edited(vocab, vocab, DEVICE)
    kernels = triton_kernels()
    assert kernels is not None
    for start in {0, vocab // 3}:
        wanted = logit_edits.edit_logits_in_torch(logits[:, start:], on_cpu, start)
        got = kernels.edit_logits(logits[:, start:].to(DEVICE), on_device, start).cpu()
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    assert vocab == 1 or not torch.equal(wanted, logits[:, start:].float())


@pytest.mark.parametrize("vocab", [97, 5000] if INTERPRETED else VOCABS[1:])
def test_tokens_and_verdicts_of_edited_rows_are_those_of_the_cpu(vocab: int) -> None:
    logits, rows, seen = _mixture(vocab, vocab)
    features = replace(VARIANTS[-1], edits=True, biases=True)
    wanted, wanted_verdict = _on_cpu(logits, rows, features, seen, _edited(5, vocab, "cpu"))
    device_seen = SeenTokens(seen.counts.to(DEVICE), seen.prompt.to(DEVICE))
    moved = processed(_moved(rows, DEVICE), features, device_seen, _edited(5, vocab, DEVICE))
    draw, verdict = sample_and_check(logits.to(DEVICE), moved, features)
    assert draw.token_B.tolist() == wanted.token_B.tolist()
    assert draw.ok_B.tolist() == wanted.ok_B.tolist()
    assert verdict.finish_B.tolist() == wanted_verdict.finish_B.tolist()


def _drawn(
    device: str, logits: torch.Tensor, rows: SamplingInputs, seen: SeenTokens, features: SamplingVariant,
    ids: torch.Tensor | None, *, guesses: int, at_once: int, q: float | None = None,
) -> list[object]:  # fmt: skip
    """Guesses of a drafter whose logits are those of the next row, taken ``at_once``, and what comes of their windows:
    everything that is found, whole. ``q``: a probability to say that all were drawn with, which is none."""
    there, whole, width = _moved(rows, device), logits.to(device), guesses + 1
    batch = len(logits) // width
    ids_D = None if ids is None else ids.to(device)
    of_rows = there.select(torch.arange(0, batch * width, width, device=device))
    windows = of_rows.select(torch.arange(batch, device=device).repeat_interleave(width))
    windows = replace(windows, position=windows.position + torch.arange(width, device=device).repeat(batch))
    draft_BWV = whole.roll(-1, 0)[: batch * width].view(batch, width, -1)
    draft_BWD = draft_BWV if ids_D is None else draft_BWV[:, :, ids_D]
    taken = []
    for first in range(0, guesses, at_once):
        logits_RD = draft_BWD[:, first : first + at_once].flatten(0, 1)
        index_R, probs_RD = rejection.draw_guesses(logits_RD, ids_D, of_rows, features, first)
        taken.append((index_R.view(batch, at_once), probs_RD.view(batch, at_once, -1)))
    index_BQ, probs_BQD = (torch.cat(parts, 1) for parts in zip(*taken, strict=True))
    proposals_BW = torch.zeros(batch, width, dtype=torch.int64, device=device)
    proposals_BW[:, 1:] = index_BQ if ids_D is None else ids_D[index_BQ]
    some = torch.arange(batch, device=device) % 3 != 1
    told_BQD = probs_BQD if q is None else torch.full_like(probs_BQD, q)
    drafted = rejection.Drafted(told_BQD, index_BQ, ids_D, some)
    counts = SeenTokens(seen.counts.to(device), seen.prompt.to(device))
    counts = SeenTokens(counts.counts[: batch * width], counts.prompt[: batch * width])
    windows = processed(windows, features, counts)
    draw, verdict = rejection.draw_window(whole[: batch * width], windows, features, proposals_BW[:, 1:], drafted)
    return [part.tolist() for part in (index_BQ, probs_BQD.view(torch.int32), *draw, *verdict)]


def _same_drawn(*given: Any, **of_it: Any) -> list[object]:
    """``_drawn`` on the device, which is that of the CPU."""
    found = _drawn(DEVICE, *given, **of_it)
    with pytest.MonkeyPatch.context() as patch:
        for module in (sampler, rejection, penalties):
            patch.setattr(module, "kernels_for", lambda tensor: None)
        assert found == _drawn("cpu", *given, **of_it)
    return found


def _flat_mixture(seed: int, vocab: int) -> tuple[torch.Tensor, SamplingInputs, SeenTokens]:
    """``_mixture`` of more rows, whose scores are so near to each other that every number of a draw tells."""
    logits, rows, seen = _mixture(seed, vocab, rows=24 if INTERPRETED else 240)
    return logits * 0.3, rows, seen


@pytest.fixture(params=[True, False], ids=["many programs a row", "one"])
def split_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether blocks of a row are looked at side by side, or each knows what those before it reached."""
    if not request.param:
        monkeypatch.setattr(rejection_triton, "split_rows", lambda rows, vocab, block: (1, vocab))
    if INTERPRETED:
        monkeypatch.setattr(rejection_triton, "_BLOCK", 512)
        if request.param:
            monkeypatch.setattr(rejection_triton, "split_rows", lambda rows, vocab, block: (-(-vocab // 1024), 1024))


@pytest.mark.usefixtures("split_rows")
@pytest.mark.parametrize(("some_ids", "features", "vocab"), GUESSES)
def test_drawn_guesses_and_their_windows_are_those_of_the_cpu(
    vocab: int, features: SamplingVariant, some_ids: bool
) -> None:
    """Windows of three tokens, their guesses drawn one by one, as an MTP layer's are."""
    logits, rows, seen = _flat_mixture(vocab, vocab)
    logits[2], logits[4, 1] = logits[3], float("nan")  # where the drafter is the target, nothing is left of a residual
    ids = torch.arange(0, vocab, 2) if some_ids else None
    _same_drawn(logits, rows, seen, features, ids, guesses=2, at_once=1)


@pytest.mark.parametrize(("features", "dtype"), BLOCKS)
def test_a_block_of_drawn_guesses_and_what_no_drafter_may_say(features: SamplingVariant, dtype: torch.dtype) -> None:
    """All guesses of a window at once, as a block drafter's are. Rows that cannot be used give the same, too: guess 0
    and no probability. Where every q is larger than p nothing is left of a residual, and the token comes from p."""
    vocab = 600 if INTERPRETED else VOCABS[-2]
    logits, rows, seen = _flat_mixture(11, vocab)
    logits[1], logits[4, 5], logits[5, 7] = float("-inf"), float("inf"), float("nan")
    given = logits.to(dtype), rows, seen, features, None
    index_BQ, _, _, ok_T, *_ = _same_drawn(*given, guesses=2, at_once=2)
    assert isinstance(index_BQ, list)
    assert isinstance(ok_T, list)
    assert index_BQ[0][0] == index_BQ[1][0] == 0
    assert ok_T[:6] == [True, False, True, True, False, False]
    _same_drawn(*given, guesses=2, at_once=2, q=1.0)


def _split(logits: torch.Tensor, rows: SamplingInputs, features: SamplingVariant, tp: int) -> Draw:
    """The draw of ``tp`` ranks, each with a share of the vocabulary."""
    vocab = logits.shape[1]
    share = -(-vocab // tp)
    padded = torch.nn.functional.pad(logits, (0, share * tp - vocab), value=1e9).to(DEVICE)
    parts = [
        local_share(padded[:, r * share : (r + 1) * share], r * share, rows, features, vocab_size=vocab)
        for r in range(tp)
    ]
    draw, _ = merge_shares(torch.cat(parts, 1), rows, features)
    return draw


@pytest.mark.parametrize("tp", [2, 8])
def test_shares_of_the_vocabulary(tp: int) -> None:
    logits, rows, _ = _mixture(3, VOCABS[-1] - 1)
    features = SamplingVariant(random=True)
    wanted, _ = _on_cpu(logits, rows, features)
    assert _split(logits, _moved(rows, DEVICE), features, tp).token_B.tolist() == wanted.token_B.tolist()


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("kind", ["normal", "tied", "equal"])
def test_shares_of_the_vocabulary_with_filters(tp: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each filtered row has a small top_k. So many ties are not listed, they are searched for."""
    if INTERPRETED:
        for name, size in {"FEWER": 256, "_SPARE": 40, "_BLOCK": 512}.items():
            monkeypatch.setattr(listing_triton, name, size)
    rng = np.random.default_rng(tp)
    vocab = 1201 if INTERPRETED else VOCABS[-1] - 1
    logits = torch.from_numpy(_distribution(rng, kind, ROWS, vocab))
    params = [random_params(rng, top_k=int(k)) for k in rng.choice([1, 3, 20, 63, 64], ROWS)]
    params[:2] = [SamplingParams(seed=5), SamplingParams(temperature=0.0, top_k=70)]
    rows = rows_for(params, [7] * ROWS)
    logits[2, vocab // 3], logits[3, : vocab // 2] = float("nan"), float("-inf")
    features = SamplingVariant(random=True, filters=True)
    wanted, _ = _on_cpu(logits, rows, features)
    got = _split(logits, _moved(rows, DEVICE), features, tp)
    assert got.token_B.tolist() == wanted.token_B.tolist()
    assert got.ok_B.tolist() == wanted.ok_B.tolist()


def _distribution(rng: np.random.Generator, kind: str, rows: int, vocab: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits of one kind."""
    logits = rng.normal(0, 3, (rows, vocab))
    if kind == "tied":
        logits = np.round(logits)
    elif kind == "equal":
        logits = np.full((rows, vocab), -1.25)
    elif kind == "flat":
        logits = logits / 10
    elif kind == "bimodal":
        logits = logits / 6 + 5 * (rng.random((rows, vocab)) < 0.1)
    elif kind == "peaked":
        logits[:, rng.integers(0, vocab, 5)] += 15
    elif kind == "masked":  # all but a few, some of them by a number
        logits[rng.random((rows, vocab)) < 0.99] = -np.inf
        logits[rng.random((rows, vocab)) < 0.05] = -1e9
    elif kind == "descending":
        logits = -np.sort(-logits)
    return logits.astype(np.float32)


KINDS = ["normal", "tied", "equal", "flat", "bimodal", "peaked", "masked", "descending"]


def _survivors(logits: torch.Tensor, params: list[SamplingParams]) -> None:
    """Thresholds and draws of the kernels against the sort's."""
    rows, features = rows_for(params, range(len(params))), SamplingVariant(random=True, filters=True)
    scaled = sampler.scaled(logits, rows, features)
    threshold, largest = survival_threshold(scaled, rows)
    moved = _moved(rows, DEVICE)
    columns = (moved.temperature, moved.top_k, moved.top_p, moved.min_p, moved.seed, moved.position)
    found = shares_triton.filtered_candidates(logits.to(DEVICE), 0, *columns)
    assert torch.equal(found.largest.cpu(), largest)
    survive = scaled >= found.threshold.cpu()[:, None]
    for row, one in enumerate(params):
        assert one.greedy or torch.equal(survive[row], scaled[row] >= threshold[row]), one
    wanted, _ = _on_cpu(logits, rows, features)
    assert merge_best(found.keys, found.largest).token_B.tolist() == wanted.token_B.tolist()


def small_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {
        "LISTED": 512,
        "_FEW": 300,
        "_AIMED": 120,
        "_SHALLOW": 150,
        "_NEARBY": 100,
        "_GUESSED": 60,
        "_SPARE": 40,
        "FEWER": 128,
        "_BLOCK": 1024,
    }.items():
        monkeypatch.setattr(listing_triton, name, size)


@pytest.mark.parametrize("kind", KINDS)
def test_survivors_are_those_of_the_sort(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits are so small, interpreted, that rows go every way: few listed, many, none held, all drawn."""
    if INTERPRETED:
        small_lists(monkeypatch)
    rng = np.random.default_rng(KINDS.index(kind))
    vocab = 4001 if INTERPRETED else VOCABS[-1]
    params = [random_params(rng) for _ in range(ROWS - 4)]
    params += [SamplingParams(top_p=0.9), SamplingParams(top_k=vocab // 3), SamplingParams(top_k=vocab // 2, top_p=0.9)]
    params += [SamplingParams(min_p=0.001, temperature=2.0)]
    _survivors(torch.from_numpy(_distribution(rng, kind, ROWS, vocab)), params)


@pytest.mark.parametrize("kind", ["normal", "flat", "peaked"])
def test_few_tokens_are_listed_and_the_threshold_is_among_them(kind: str) -> None:
    """What is missed is searched for, and takes longer: ordinary rows of a large vocabulary are never missed."""
    rng = np.random.default_rng(7)
    params = [SamplingParams(top_k=50, top_p=0.95), *(SamplingParams(top_p=p) for p in (0.5, 0.9, 0.99))]
    rows = rows_for(params, [3] * len(params))
    logits = torch.from_numpy(_distribution(rng, kind, len(params), 151_936))
    threshold, _ = survival_threshold(logits, rows)
    moved = _moved(rows, DEVICE)
    columns = (moved.temperature, moved.top_k, moved.top_p, moved.min_p, moved.seed, moved.position)
    space = listing_triton.list_tokens(logits.to(DEVICE), 0, 151_936, *columns, purpose=0, share=False)
    floor, ceiling = space.bounds.cpu()[:, :2].T
    assert (floor <= threshold).all()
    assert (threshold < ceiling).all()
    assert space.listed.tolist() == [int(n) for n in ((logits >= floor[:, None]) & (logits < ceiling[:, None])).sum(1)]
    assert (space.listed <= listing_triton.LISTED).all()
    if kind == "peaked":
        assert space.listed[:3].max() < listing_triton.FEWER


class Reads:
    """How often each logit is read, by kernel, while it is installed: int64 [B, V] each, in the order of launches."""

    def __init__(self, logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        interpreter = importlib.import_module("triton.runtime.interpreter")
        self.by_kernel: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}
        self._logits = logits
        self._load = interpreter.InterpreterBuilder.create_masked_load
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", self._noted())
        for module, name in (
            *((listing_triton, f"_{name}_kernel") for name in ("survey", "bound", "collect")),
            (threshold_triton, "_threshold_kernel"),
        ):
            monkeypatch.setattr(module, name, self._named(name, getattr(module, name)))

    def _named(self, name: str, kernel: Any) -> Any:
        def launch(grid: Any, *arguments: Any, **keywords: Any) -> None:
            self.by_kernel[name.split("_")[1]] = np.zeros(self._logits.shape, np.int64)
            kernel[grid](*arguments, **keywords)

        class Launched:
            def __getitem__(self, grid: Any) -> Any:
                return partial(launch, grid)

        return Launched()

    def _noted(self) -> Any:
        def load(builder: Any, pointers: Any, mask: Any, *others: Any) -> Any:
            offsets = pointers.data[mask.data].astype(np.int64) - self._logits.data_ptr()
            there = (offsets >= 0) & (offsets < self._logits.nbytes)
            if there.any():
                counted = self.by_kernel[[*self.by_kernel][-1]].reshape(-1)
                np.add.at(counted, offsets[there] // self._logits.itemsize, 1)
            return self._load(builder, pointers, mask, *others)

        return load


class Operations(DispatchMode):
    """Names of those that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


# How often collect and threshold read a logit, after survey has read it once. Collect looks again at a part in which
# it lists something, and once more to draw among tokens above a list, where a threshold lies thousands of tokens deep,
# each time at what it has just brought into the caches. Threshold reads lists; logits, a quarter of a range a pass,
# where two thresholds lie deep in one row, or where equal tokens overflow a list.
PASSES = [
    (SamplingParams(), 2, 0),
    (SamplingParams(temperature=0.0), 2, 0),
    (SamplingParams(top_k=20), 2, 0),
    (SamplingParams(top_p=0.3), 2, 0),
    (SamplingParams(min_p=0.1), 2, 0),
    (SamplingParams(min_p=1e-4), 2, 0),  # of thousands of tokens, none is listed
    (SamplingParams(top_k=50, top_p=0.9, min_p=0.01), 2, 0),
    (SamplingParams(top_k=400), 3, 0),
    (SamplingParams(top_p=0.95), 3, 0),
    (SamplingParams(top_k=2000, top_p=0.95), 0, None),
]


@pytest.mark.skipif(not INTERPRETED, reason="counts what Triton's interpreter loads")
def test_a_threshold_takes_two_passes_over_the_logits_and_no_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches read the rows: see PASSES. What they miss is searched for, which takes more."""
    small_lists(monkeypatch)
    monkeypatch.setattr(listing_triton, "MOST_PARTS", 2)  # of two blocks each
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(0, 3, (len(PASSES) + 1, 4091)).astype(np.float32))
    logits[-1] = -1.25
    rows = rows_for([*(params for params, _, _ in PASSES), SamplingParams(top_k=20)], [3] * len(logits))
    reads = Reads(logits, monkeypatch)
    with Operations() as run:
        columns = rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.position
        shares_triton.filtered_candidates(logits, 0, *columns)
    assert not [name for name in run.names if "sort" in name or "topk" in name or "kthvalue" in name]
    assert [*reads.by_kernel] == ["survey", "bound", "collect", "threshold"]
    survey, bound, collect, threshold = reads.by_kernel.values()
    assert not bound.any()
    once_more = survey.sum(1) - survey.shape[1]  # a column of each group
    assert (survey.min(), survey.max(), {*once_more}) == (1, 2, {2 * 128})
    for row, (params, collected, searched) in enumerate(PASSES):
        assert collect[row].max() == collected, params
        if searched is not None:
            assert threshold[row].max() == searched, params
    assert threshold[len(PASSES) - 1].min() > 3
    assert (collect[-1].max(), threshold[-1].min() > 0) == (2, True), "all are equal"


@pytest.mark.parametrize("vocab", [1, 97, 2049] if INTERPRETED else VOCABS)
def test_extreme_filters(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    extremes = [
        *(SamplingParams(top_k=2**31 - 1), SamplingParams(top_p=1e-30), SamplingParams(min_p=1.0)),
        *(SamplingParams(top_k=max(1, vocab - 1), top_p=0.999999, min_p=1e-30), SamplingParams(top_k=1)),
        *(SamplingParams(temperature=1e-5, top_k=5, top_p=0.5), SamplingParams(temperature=1e5, min_p=0.999)),
        *(SamplingParams(top_p=0.0, top_k=3), SamplingParams()),
    ]
    _survivors(torch.from_numpy(_distribution(rng, "normal", len(extremes), vocab)), extremes)


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
    moved = processed(moved, features, device_seen)
    slots = torch.arange(32, device="cuda")

    def step() -> torch.Tensor:
        draw, verdict = sample_and_check(device_logits, moved, features)
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

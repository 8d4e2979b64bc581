"""SamplingParams as the sampler's rows: what the slot tables do in the engine, for tests.

Knows: how a list of requests becomes SamplingInputs. Does not know: slots, expected results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from runtime.execute.sampling.inputs import SamplingInputs, SamplingVariant
from runtime.execute.sampling.logit_edits import RowEdits
from runtime.execute.sampling.penalties import SeenTokens
from runtime.schedule.request import SamplingParams
from tests.runtime.execute.sampling.sampling_fields import SamplingFields


def rows_for(
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    stop_ids: Sequence[Sequence[int]] | None = None,
    prompt_lengths: Sequence[int] | None = None,
    finished: Sequence[bool] | None = None,
    device: str = "cpu",
) -> SamplingInputs:
    """Row i draws for ``params[i]`` (its seed set) at ``positions[i]``; min and max lengths count from its prompt."""

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=device)

    stops = stop_ids if stop_ids is not None else [()] * len(params)
    prompts = prompt_lengths if prompt_lengths is not None else [0] * len(params)
    width = max((len(ids) for ids in stops), default=0) + 1
    seeds = [(0 if p.seed is None else p.seed) for p in params]
    return SamplingInputs(
        temperature=column([p.temperature for p in params], torch.float32),
        top_k=column([p.top_k for p in params], torch.int32),
        top_p=column([p.top_p for p in params], torch.float32),
        min_p=column([p.min_p for p in params], torch.float32),
        repetition_penalty=column([p.repetition_penalty for p in params], torch.float32),
        presence_penalty=column([p.presence_penalty for p in params], torch.float32),
        frequency_penalty=column([p.frequency_penalty for p in params], torch.float32),
        seed=column(seeds, torch.int64),
        position=column(positions, torch.int64),
        min_length=column([n + p.min_tokens for n, p in zip(prompts, params, strict=True)], torch.int32),
        max_length=column([n + p.max_tokens for n, p in zip(prompts, params, strict=True)], torch.int32),
        stop_ids=torch.tensor([[*ids, *(-1,) * (width - len(ids))] for ids in stops], dtype=torch.int32, device=device),
        finished=column(finished if finished is not None else [False] * len(params), torch.bool),
    )


def processed(
    rows: SamplingInputs, features: SamplingVariant, seen: SeenTokens | None = None, edits: RowEdits | None = None
) -> SamplingInputs:
    """With the logits processors that ``features`` asks for, as a step has them."""
    wanted = edits if features.edits else None, seen if features.penalties else None
    return replace(rows, processors=tuple(one for one in wanted if one is not None))


def seen_for(vocab: int, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> SeenTokens:
    """The count rows of sequences, made without the code under test."""
    counts = np.array([np.bincount(list(o), minlength=vocab) for o in outputs], dtype=np.int16)
    prompt = np.array([np.bincount(list(p), minlength=vocab) > 0 for p in prompts])
    return SeenTokens(torch.from_numpy(counts), torch.from_numpy(prompt))


def random_params(rng: np.random.Generator, **fixed: Unpack[SamplingFields]) -> SamplingParams:
    """A request with some of everything; a quarter of them greedy. Two-byte fractions: float32 holds them exactly."""
    fields: SamplingFields = {
        "temperature": 0.0 if rng.random() < 0.25 else float(rng.integers(16, 512)) / 256,
        "top_k": int(rng.integers(1, 60)) if rng.random() < 0.5 else 0,
        "top_p": float(rng.integers(1, 256)) / 256 if rng.random() < 0.5 else 1.0,
        "min_p": float(rng.integers(1, 128)) / 256 if rng.random() < 0.5 else 0.0,
        "seed": int(rng.integers(-(2**63), 2**63)),
        **fixed,
    }
    return SamplingParams(**fields)

"""Outputs of several groups as one: the rows of the first, then those of the second, and so on.

Knows: the columns of StepOutput. Pure. Does not know: how outputs come together (request_router.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.execute.result_reader import StepLogprobs
from runtime.schedule.plan import StepOutput


def merge_outputs(outputs: Sequence[StepOutput]) -> StepOutput:
    """Of one step, or of none: ``step`` and ``width`` are the first's. Requests are different in all of them."""
    rows = [output for output in outputs if output.request_ids]
    finished = tuple(chain.from_iterable(output.finished for output in outputs))
    if not rows:
        return StepOutput(outputs[0].step, width=outputs[0].width, finished=finished)
    return StepOutput(
        step=outputs[0].step,
        request_ids=_joined(output.request_ids for output in rows),
        tokens=_joined(output.tokens for output in rows),
        counts=_joined(output.counts for output in rows),
        width=rows[0].width,
        finished=finished,
        logprobs=_merged_logprobs(rows),
        prompt_logprobs=_merged_scores(rows),
    )


def _joined(columns: Any) -> list[int]:
    return list(chain.from_iterable(columns))


def _merged_logprobs(outputs: Sequence[StepOutput]) -> StepLogprobs | None:
    """Rows of a group that reported none mean nothing, and so do likely tokens beyond those that a group reported."""
    present = [output.logprobs for output in outputs if output.logprobs is not None]
    if not present:
        return None
    top = max(columns.top_ids_BWN.shape[-1] for columns in present)
    parts = [_widened(output, top) for output in outputs]
    return StepLogprobs(
        chosen_BW=np.concatenate([part.chosen_BW for part in parts]),
        rank_BW=np.concatenate([part.rank_BW for part in parts]),
        top_ids_BWN=np.concatenate([part.top_ids_BWN for part in parts]),
        top_BWN=np.concatenate([part.top_BWN for part in parts]),
    )


def _widened(output: StepOutput, top: int) -> StepLogprobs:
    shape = (len(output.request_ids), output.width)
    if output.logprobs is None:
        return StepLogprobs(
            chosen_BW=np.full(shape, np.nan, np.float32),
            rank_BW=np.zeros(shape, np.int32),
            top_ids_BWN=np.full((*shape, top), -1, np.int32),
            top_BWN=np.full((*shape, top), np.nan, np.float32),
        )
    columns: StepLogprobs = output.logprobs
    more = top - columns.top_ids_BWN.shape[-1]
    if not more:
        return columns
    ids_BWN, top_BWN = (
        _padded(columns.top_ids_BWN, more, -1),
        _padded(columns.top_BWN, more, np.nan),
    )
    return StepLogprobs(columns.chosen_BW, columns.rank_BW, ids_BWN, top_BWN)


def _padded(values: npt.NDArray[Any], more: int, fill: float) -> npt.NDArray[Any]:
    return np.pad(values, ((0, 0), (0, 0), (0, more)), constant_values=fill)


def _merged_scores(outputs: Sequence[StepOutput]) -> tuple[Any, ...] | None:
    if all(output.prompt_logprobs is None for output in outputs):
        return None
    scores = (output.prompt_logprobs or (None,) * len(output.request_ids) for output in outputs)
    return tuple(chain.from_iterable(scores))

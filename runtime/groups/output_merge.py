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
    """Of one step, or of none: ``step`` is the first's, ``width`` the largest (one group may prefill while another
    decodes more tokens a row). Requests are different in all of them."""
    rows = [output for output in outputs if output.request_ids]
    width = max(output.width for output in rows or outputs)
    finished = tuple(chain.from_iterable(output.finished for output in outputs))
    if not rows:
        return StepOutput(outputs[0].step, width=width, finished=finished)
    return StepOutput(
        step=outputs[0].step,
        request_ids=_joined(output.request_ids for output in rows),
        tokens=_joined(_widened_tokens(output, width) for output in rows),
        counts=_joined(output.counts for output in rows),
        width=width,
        finished=finished,
        logprobs=_merged_logprobs(rows, width),
        prompt_logprobs=_merged_scores(rows),
    )


def _joined(columns: Any) -> list[int]:
    return list(chain.from_iterable(columns))


def _widened_tokens(output: StepOutput, width: int) -> Sequence[int]:
    """Its tokens, row-major, with ``width`` columns; those past a row's count mean nothing."""
    if output.width == width:
        return output.tokens
    missing, own = [0] * (width - output.width), output.width
    rows = (output.tokens[at : at + own] for at in range(0, len(output.tokens), own))
    return _joined((*row, *missing) for row in rows)


def _merged_logprobs(outputs: Sequence[StepOutput], width: int) -> StepLogprobs | None:
    """Rows of a group that reported none mean nothing, and so do likely tokens beyond those that a group reported."""
    present = [output.logprobs for output in outputs if output.logprobs is not None]
    if not present:
        return None
    top = max(columns.top_ids_BWN.shape[-1] for columns in present)
    parts = [_widened(output, width, top) for output in outputs]
    return StepLogprobs(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _widened(output: StepOutput, width: int, top: int) -> StepLogprobs:
    columns, rows = output.logprobs, len(output.request_ids)
    if columns is None:  # of no tokens, to be filled up
        floats, ids = np.zeros((rows, 0, 0), np.float32), np.zeros((rows, 0, 0), np.int32)
        columns = StepLogprobs(floats.reshape(rows, 0), ids.reshape(rows, 0), ids, floats)
    fills = np.nan, 0, -1, np.nan
    return StepLogprobs(*(_padded(values, (width, top), fill) for values, fill in zip(columns, fills, strict=True)))


def _padded(values: npt.NDArray[Any], sizes: tuple[int, ...], fill: float) -> npt.NDArray[Any]:
    """``values`` with ``fill`` up to such sizes of the dimensions after the first."""
    more = [(0, size - own) for size, own in zip(sizes, values.shape[1:], strict=False)]
    return np.pad(values, ((0, 0), *more), constant_values=fill)


def _merged_scores(outputs: Sequence[StepOutput]) -> tuple[Any, ...] | None:
    if all(output.prompt_logprobs is None for output in outputs):
        return None
    scores = (output.prompt_logprobs or (None,) * len(output.request_ids) for output in outputs)
    return tuple(chain.from_iterable(scores))

"""From the engine's columns of log-probabilities to the entries of an answer.

Knows: what each column means. Does not know: requests, or how an answer is written down
(launch/api/response_logprobs.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from runtime.frontend.outputs import TokenLogprob
from runtime.frontend.serve_messages import ScoredPrompt

if TYPE_CHECKING:
    from runtime.execute.result_reader import StepLogprobs
    from runtime.execute.sampling.logprobs import PromptLogprobs


def row_logprobs(columns: StepLogprobs, row: int, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """The row's entries; a step carries as many likely tokens as its most curious row asked for."""
    return _entries(
        tokens,
        columns.chosen_BW[row].tolist(),
        columns.rank_BW[row].tolist(),
        columns.top_ids_BWN[row, :, :top].tolist(),
        columns.top_BWN[row, :, :top].tolist(),
    )


def prompt_logprobs(
    prompt_token_ids: Sequence[int], parts: Iterable[PromptLogprobs | ScoredPrompt]
) -> tuple[TokenLogprob | None, ...]:
    """One entry a prompt token; None for the first, which nothing predicts, and for what was never computed."""
    entries: list[TokenLogprob | None] = [None] * len(prompt_token_ids)
    for part in parts:
        if isinstance(part, ScoredPrompt):
            columns = part.columns()
        else:
            ids, top = part.top_ids_SN.tolist(), part.top_SN.tolist()
            columns = part.chosen_S.tolist(), part.rank_S.tolist(), ids, top
        here = slice(part.start, part.start + len(columns[0]))
        entries[here] = _entries(prompt_token_ids[here], *columns)
    return tuple(entries)


def _entries(
    tokens: Sequence[int],
    chosen: Sequence[float],
    ranks: Sequence[int],
    top_ids: Sequence[Sequence[int]],
    top_values: Sequence[Sequence[float]],
) -> list[TokenLogprob]:
    """Ids of -1 stand where the vocabulary has fewer tokens than were asked for. Columns may go past ``tokens``."""
    return [
        TokenLogprob(
            token,
            chosen[i],
            ranks[i],
            tuple((j, value) for j, value in zip(top_ids[i], top_values[i], strict=True) if j >= 0),
        )
        for i, token in enumerate(tokens)
    ]

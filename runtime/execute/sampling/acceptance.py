"""Which tokens of a window a row gains: the target's own draws, as far as the proposals foresaw them.

Knows: the rule. Row j of a window saw proposals 1..j, so its draw counts if all of them are what the rows before it
drew. Because a draw is a function of (seed, position, logits), the tokens are those of one-token steps (lossless
speculative decoding with a point-mass proposer; Leviathan et al. 2023 with exact matches). Draws by rejection sampling
(rejection.py) are those proposals where these are kept, and others where not, so the same rule serves them.
Does not know: who proposed, slots, the model. Graph-safe: fixed shapes, nothing is read by the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.execute.sampling.draft_tree import NO_GUESS, DraftTree, walk
from runtime.execute.sampling.sampler import Draw, Verdict
from runtime.schedule.request import FinishReason


class Acceptance(NamedTuple):
    """``tokens_BW`` int64: the draws; a row gains its first ``count_B`` (int32, 0..W). ``finish_B`` int32: a
    FinishReason value, of the last token gained or of the error that came instead of one. ``nodes_BW`` int64: where
    tokens are the nodes of a tree after which they were sampled."""

    tokens_BW: Tensor
    count_B: Tensor
    finish_B: Tensor
    nodes_BW: Tensor | None = None


def accept(
    draw: Draw, verdict: Verdict, proposals_BQ: Tensor, limit_B: Tensor | None = None, scripted_B: Tensor | None = None
) -> Acceptance:
    """From the draws and verdicts of B * W rows, row-major, and the Q = W - 1 proposals of each row (int64).

    A stop id, the last allowed length or an unusable row of logits cuts the rest. ``limit_B`` (integers): at most so
    many tokens are kept; a row that is cut by it does not end. ``scripted_B`` (integers, 0..Q): so many proposals are
    gained in place of the draws, which then end a row by length only, and no more: not what the target would say.
    """
    rows, width = proposals_BQ.shape[0], proposals_BQ.shape[1] + 1
    tokens_BW, count_BW, finish_BW = (x.view(rows, width) for x in (draw.token_B, *verdict))
    drawn_BQ = tokens_BW[:, :-1] == proposals_BQ
    if scripted_B is not None:
        drawn_BQ = torch.arange(width - 1, device=tokens_BW.device) < scripted_B[:, None]
        kept_BQ = drawn_BQ & (finish_BW[:, :-1] != int(FinishReason.ERROR))
        tokens_BW = torch.cat((torch.where(kept_BQ, proposals_BQ, tokens_BW[:, :-1]), tokens_BW[:, -1:]), 1)
        stopped_BQ = kept_BQ & (finish_BW[:, :-1] == int(FinishReason.STOP))
        finish_BQ = torch.where(stopped_BQ, int(FinishReason.NONE), finish_BW[:, :-1])
        finish_BW = torch.cat((finish_BQ, finish_BW[:, -1:]), 1)
    goes_on_BQ = drawn_BQ & (finish_BW[:, :-1] == int(FinishReason.NONE))
    reached_BW = torch.cat((torch.ones_like(finish_BW[:, :1]), goes_on_BQ.to(torch.int32).cumprod(1)), 1)
    if limit_B is not None:
        reached_BW = reached_BW * (torch.arange(width, device=tokens_BW.device) < limit_B[:, None])
    # Of the rows that are reached only the last one can have a reason to finish.
    return Acceptance(
        tokens_BW, (count_BW * reached_BW).sum(1, dtype=torch.int32), (finish_BW * reached_BW).sum(1, dtype=torch.int32)
    )


def accept_path(
    draw: Draw, verdict: Verdict, reported: Sequence[Tensor], tokens_BN: Tensor, tree: DraftTree, width: int,
    limit_B: Tensor | None = None, scripted_B: Tensor | None = None,
) -> tuple[Acceptance, Sequence[Tensor]]:  # fmt: skip
    """``accept`` of B * N rows whose tokens are trees, along the path that was drawn, and what is ``reported`` of it.

    A node saw its ancestors, so its draw counts if they are what was drawn after theirs. ``width``: most tokens of a
    path. ``scripted_B``: the first child of each node in place of the one that was drawn, as far down as there are any.
    """
    rows, nodes = tokens_BN.shape
    way = walk(tokens_BN, tree, draw.token_B.view(rows, nodes), width - 1, scripted=scripted_B is not None)
    first_B1 = torch.arange(rows, device=tokens_BN.device)[:, None] * nodes
    chosen_T = (first_B1 + way.nodes_BW).reshape(-1)
    if scripted_B is not None:
        there_B = (way.guesses_BQ != NO_GUESS).sum(1, dtype=scripted_B.dtype)
        scripted_B = torch.minimum(scripted_B, there_B)
    draw, verdict = Draw(*_picked(draw, chosen_T)), Verdict(*_picked(verdict, chosen_T))
    accepted = accept(draw, verdict, way.guesses_BQ, limit_B, scripted_B)
    return accepted._replace(nodes_BW=way.nodes_BW), _picked(reported, chosen_T)


def _picked(parts: Sequence[Tensor], index_T: Tensor) -> list[Tensor]:
    return [part.index_select(0, index_T) for part in parts]

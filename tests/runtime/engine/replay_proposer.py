"""A proposer that knows the answers, and proposes them wrongly now and then: windows of every outcome, without a draft.

Knows: which tokens each request will have, by its seed. Does not know: the engine, or what is made of a proposal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from runtime.execute.proposer import Observed, Proposed
from runtime.execute.slot_state import SlotColumns
from runtime.execute.step.memory import MakeRole, Role, StepParts
from runtime.schedule.request import Request
from tests.plant import make_window_step


class ReplayProposer:
    """``right`` of ten proposals are right; with ``limited``, a row may gain at most 0..W tokens, drawn every step."""

    name = "replay"
    layers = ()
    reads_hidden = False

    def __init__(self, parts: StepParts, script: Mapping[int, Sequence[int]], right: int, limited: bool) -> None:
        seeds, longest = max(script) + 1, max(map(len, script.values()))
        table = torch.zeros(seeds, longest, dtype=torch.int64)
        for seed, tokens in script.items():
            table[seed, : len(tokens)] = torch.tensor(tokens)
        self._script_SL = table.to(parts.device.torch_device)
        self._vocab = parts.model.config.vocab_size
        self._ring = parts.ring
        self._right = right
        self._limited = limited

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        seeds, longest = self._script_SL.shape
        seed_B1 = columns.seed.clamp(0, seeds - 1)[:, None]
        position_BQ = columns.length.to(torch.int64)[:, None] + torch.arange(count, device=columns.length.device)
        tokens_BQ = self._script_SL[seed_B1, position_BQ.clamp(max=longest - 1)]
        wrong_BQ = mixed(seed_B1 * 1009 + position_BQ) % 10 >= self._right
        tokens_BQ = torch.where(wrong_BQ, (tokens_BQ + 1) % self._vocab, tokens_BQ)
        if not self._limited:
            return Proposed(tokens_BQ)
        step_B = seed_B1[:, 0] + 977 * self._ring.appended_1  # another number each step, or a row could stay at 0
        return Proposed(tokens_BQ, mixed(step_B) % (count + 2))

    def observe(self, observed: Observed) -> None:
        raise AssertionError("it reads nothing of the target")


def mixed(number: Tensor) -> Tensor:
    """A hash of non-negative int64, in [0, 2**31)."""
    return ((number * 0x9E3779B1 + 0x7F4A7C15) >> 7) & 0x7FFFFFFF


def script_of(requests: Iterable[Request], answers: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """Prompt and answer of each request, by its seed."""
    script = {}
    for one in requests:
        assert one.sampling.seed is not None
        script[one.sampling.seed] = (*one.prompt_token_ids, *answers[one.request_id])
    return script


def window_roles(
    widths: Iterable[int], script: Mapping[int, Sequence[int]], *, right: int = 8, limited: bool = False
) -> list[MakeRole]:
    """A role for each width but 1, which decode serves."""

    def maker(width: int) -> MakeRole:
        def make(parts: StepParts) -> Role:
            return make_window_step(parts, width, ReplayProposer(parts, script, right, limited))

        return make

    return [maker(width) for width in sorted({*widths} - {1})]

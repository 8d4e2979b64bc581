"""How a drafter's hidden states become drafts: the most probable of each, one drawn from its distribution, or, for
trees, some of the most probable.

Knows: these, and what a round hands on of them. Does not know: which drafter there is, how it computes, what is kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from models.drafters.draft_head import DraftHead
from runtime.execute.device.protocol import Device
from runtime.execute.proposer import Candidates, MakeProposer, Observed, Proposed, ProposerParts
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.kernels import kernels_for as sampling_kernels
from runtime.execute.sampling.packed_argmax import NO_CANDIDATE, pack, unpack
from runtime.execute.sampling.rejection import Drafted, draw_guesses
from runtime.execute.sampling.token_tables import TokenTables, bar
from runtime.execute.slot_state import SlotColumns, SlotTables
from runtime.speculate.draft_kernels import kernels_for


def likeliest(head: DraftHead, hidden_RN: Tensor) -> Tensor:
    """int64 [R], ids of the target; of equally likely ones on several ranks that with the lowest draft id. Graph-safe.

    With several ranks one all-gather of 8 bytes a row and rank.
    """
    keys_RP = best_keys(head.logits(hidden_RN), head.vocab.start)
    if head.collectives.size > 1:
        keys_RP = head.collectives.all_gather_keys(keys_RP, largest=True)
    return chosen(keys_RP, head.ids_V, head.size)


def best_keys(logits_RV: Tensor, vocab_start: int) -> Tensor:
    """Keys int64 [R, P] (packed_argmax.py), the largest of a row is that of its best id, from ``vocab_start``
    on: as candidates of a greedy draw."""
    if (kernels := sampling_kernels(logits_RV)) is None:
        score_R, id_R = logits_RV.max(-1)
        return pack(score_R.float(), id_R + vocab_start)[:, None]
    rows, device = len(logits_RV), logits_RV.device
    unread = torch.empty(rows, device=device), *(torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    return kernels.best_candidates(logits_RV, vocab_start, *unread, random=False)


def chosen(keys_RP: Tensor, ids_V: Tensor | None, size: int) -> Tensor:
    """The id, int64 [R], of each row's largest key, by ``ids_V`` where given. Where every logit is NaN or -inf that may
    be one of padding, for which no table of ``size`` ids has a row: then it is the last."""
    if (kernels := kernels_for(keys_RP)) is None:
        return chosen_in_torch(keys_RP, ids_V, size)
    return kernels.choose(keys_RP, ids_V, size)


def chosen_in_torch(keys_RP: Tensor, ids_V: Tensor | None, size: int) -> Tensor:
    """The reference of ``chosen``."""
    ids_R: Tensor = torch.clamp(unpack(keys_RP.amax(-1))[1], max=size - 1)
    return ids_R if ids_V is None else ids_V[ids_R]


def likeliest_few(head: DraftHead, hidden_RN: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` best, at most ``head.size``: int64 [R, count], ids of the target, and their log-probabilities
    among the draft ids, float32 [R, count], descending; of equal ones that with the lowest draft id first. Graph-safe.

    With several ranks one all-gather of 8 * (count + 1) bytes a row and rank.
    """
    logits_RV, collectives = head.logits(hidden_RN), head.collectives
    kernels = kernels_for(logits_RV)
    if kernels is None:
        records_RX = shortlist_in_torch(logits_RV, head.vocab.start, count)
    else:
        records_RX = kernels.shortlist(logits_RV, head.vocab.start, count, merged=collectives.size > 1)
    if collectives.size > 1:
        records_RX = collectives.all_gather_keys(records_RX)
    return (ranked_in_torch if kernels is None else kernels.ranked)(records_RX, count, head.ids_V, head.size)


def shortlist_in_torch(logits_RV: Tensor, vocab_start: int, count: int) -> Tensor:
    """int64 [R, count + 1]: keys of the ``count`` most probable ids, from ``vocab_start`` on, best first, then that of
    (the logarithm of what all ids' weights sum up to, id 0). Where there are fewer ids, NO_CANDIDATE."""
    rows, vocab = logits_RV.shape
    scores_RV = logits_RV.float()
    ids_V = torch.arange(vocab_start, vocab_start + vocab, device=logits_RV.device)
    keys_RC = pack(scores_RV, ids_V).topk(min(count, vocab)).values
    missing_RX = keys_RC.new_full((rows, count - keys_RC.shape[1]), NO_CANDIDATE)
    total_R1 = scores_RV.logsumexp(1, keepdim=True)
    return torch.cat((keys_RC, missing_RX, pack(total_R1, torch.zeros_like(keys_RC[:, :1]))), 1)


def ranked_in_torch(records_RX: Tensor, count: int, ids_V: Tensor | None, size: int) -> tuple[Tensor, Tensor]:
    """(ids, log-probabilities) of the ``count`` best of all ids, from records of parts of them, side by side."""
    records_RPX = records_RX.view(len(records_RX), -1, count + 1)
    total_R1 = unpack(records_RPX[:, :, -1])[0].logsumexp(1, keepdim=True)
    scores_RC, ids_RC = unpack(records_RPX[:, :, :-1].flatten(1).topk(count).values)
    ids_RC = torch.clamp(ids_RC, max=size - 1)
    return ids_RC if ids_V is None else ids_V[ids_RC], scores_RC - total_R1


class Guesses(Protocol):
    """Those of one round, in order. Graph-safe."""

    def take(self, hidden_BQN: Tensor) -> Tensor:
        """The next Q draft tokens of each row, int64 [B, Q], from the drafter's final hidden states for them."""
        ...

    def proposed(self) -> Proposed:
        """All that were taken."""
        ...


class LikeliestGuesses:
    """``draft_sample_method`` greedy. Ranks exchange 8 bytes a draft."""

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        self._taken: list[Tensor] = []

    def take(self, hidden_BQN: Tensor) -> Tensor:
        tokens_BQ = likeliest(self._head, hidden_BQN.flatten(0, 1)).view(hidden_BQN.shape[:2])
        self._taken.append(tokens_BQ)
        return tokens_BQ

    def proposed(self) -> Proposed:
        return Proposed(_side_by_side(self._taken))


class BranchingGuesses:
    """Those of trees: the ``top_k`` most probable of each; the first continues. Ranks exchange 8 * (top_k + 1) bytes
    a draft."""

    def __init__(self, head: DraftHead, top_k: int) -> None:
        self._head, self._top_k = head, top_k
        self._taken: list[Candidates] = []

    def take(self, hidden_BQN: Tensor) -> Tensor:
        shape = *hidden_BQN.shape[:2], self._top_k
        found = likeliest_few(self._head, hidden_BQN.flatten(0, 1), self._top_k)
        self._taken.append(Candidates(*(part.view(shape) for part in found)))
        return self._taken[-1].ids_BQC[:, :, 0]

    def candidates(self) -> Candidates:
        """All that were taken."""
        return Candidates(*(_side_by_side(parts) for parts in zip(*self._taken, strict=True)))

    def proposed(self) -> Proposed:
        return Proposed(self.candidates().ids_BQC[:, :, 0])


def _side_by_side(parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """Along the drafts; of a block there is one part, which is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class DrawnGuesses:
    """``draft_sample_method`` probabilistic, for rows with such records. Ranks exchange all logits of a draft."""

    def __init__(self, head: DraftHead, columns: SlotColumns, variant: SamplingVariant) -> None:
        self._head, self._variant = head, variant
        self._sampling = columns.sampling()
        self._taken: list[tuple[Tensor, Tensor]] = []

    def take(self, hidden_BQN: Tensor) -> Tensor:
        batch, count = hidden_BQN.shape[:2]
        before = sum(index_BQ.shape[1] for index_BQ, _ in self._taken)
        logits_RD = self._head.all_logits(hidden_BQN.flatten(0, 1))
        index_R, probs_RD = draw_guesses(logits_RD, self._head.ids_V, self._sampling, self._variant, before)
        index_BQ = index_R.view(batch, count)
        self._taken.append((index_BQ, probs_RD.view(batch, count, -1)))
        return self._head.target_ids(index_BQ)

    def proposed(self) -> Proposed:
        index_BQ, probs_BQD = (_side_by_side(parts) for parts in zip(*self._taken, strict=True))
        drafted = Drafted(probs_BQD, index_BQ, self._head.ids_V)
        return Proposed(self._head.target_ids(index_BQ), drafted=drafted)


G = TypeVar("G", bound=Guesses)


class AllowedGuesses(Generic[G]):
    """Draft tokens of ``kind`` that may follow by the tables of their rows' grammars, whose states go along with the
    tokens that are taken. ``make(head)``: guesses by a head, which is asked for one place at a time."""

    def __init__(self, make: Callable[[DraftHead], G], head: DraftHead, grammars: TokenTables, rows_B: Tensor) -> None:
        self._head, self._grammars, self._rows_B = head, grammars, rows_B
        self._before: tuple[Tensor, Tensor] | None = None  # state and token of the newest place
        self._logits_RV: list[Tensor] = []  # of the place that is asked for
        self.kind = make(DraftHead(lambda hidden_RN: self._logits_RV[-1], head.vocab, head.collectives, head.ids_V))

    def take(self, hidden_BQN: Tensor) -> Tensor:
        (batch, count), head = hidden_BQN.shape[:2], self._head
        logits_BQV = head.logits(hidden_BQN.flatten(0, 1)).view(batch, count, -1)
        taken = []
        for place in range(count):
            self._logits_RV = [logits_BQV[:, place].contiguous()]
            where = self._rows_B, self._before, head.vocab.start, head.size, head.ids_V
            states_B = bar(self._logits_RV[0], self._grammars, *where)
            taken.append(self.kind.take(hidden_BQN[:, place : place + 1]))
            self._before = states_B, taken[-1][:, 0]
        return _side_by_side(taken)

    def proposed(self) -> Proposed:
        return self.kind.proposed()


class Drafter(ABC):
    """A proposer with weights: which kinds of drafts it gives is said here, how each comes about by a subclass.
    ``head``: its LM head. ``tables``: of the slots."""

    name: str
    layers: tuple[int, ...] = ()
    reads_hidden: bool
    head: DraftHead
    tables: SlotTables

    @abstractmethod
    def guess(self, rows_B: Tensor, columns: SlotColumns, count: int, guesses: Guesses) -> Proposed:
        """As ``propose``, with drafts of that kind: takes ``count`` a row."""

    @abstractmethod
    def observe(self, observed: Observed) -> None:
        """As every proposer."""

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        """The most probable of each place."""
        return self.guess(rows_B, columns, count, LikeliestGuesses(self.head))

    def candidates(self, rows_B: Tensor, columns: SlotColumns, count: int, top_k: int) -> Candidates:
        """As a BranchingProposer. A drafter that reads its drafts continues with the best, whichever of them a path
        takes."""
        guesses = BranchingGuesses(self.head, top_k)
        self.guess(rows_B, columns, count, guesses)
        return guesses.candidates()

    def allowed(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        return self.guess(rows_B, columns, count, self.masked(LikeliestGuesses, rows_B))

    def allowed_candidates(self, rows_B: Tensor, columns: SlotColumns, count: int, top_k: int) -> Candidates:
        """As ``candidates``, by the states along the best."""
        guesses = self.masked(lambda head: BranchingGuesses(head, top_k), rows_B)
        self.guess(rows_B, columns, count, guesses)
        return guesses.kind.candidates()

    def masked(self, make: Callable[[DraftHead], G], rows_B: Tensor) -> AllowedGuesses[G]:
        return AllowedGuesses(make, self.head, self.tables.grammar_tables, rows_B)


class ProbabilisticProposer:
    """``drafter``, whose drafts are sampled in steps in which some row draws at random."""

    def __init__(self, device: Device, drafter: Drafter) -> None:
        self._device, self._drafter = device, drafter
        self.name, self.layers, self.reads_hidden = drafter.name, drafter.layers, drafter.reads_hidden

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        return self._drafter.propose(rows_B, columns, count)

    def allowed(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        return self._drafter.allowed(rows_B, columns, count)

    def draw(self, rows_B: Tensor, columns: SlotColumns, count: int, variant: SamplingVariant) -> Proposed:
        def drawn(head: DraftHead) -> Guesses:
            return DrawnGuesses(head, columns, variant)

        drafter = self._drafter
        guesses = drafter.masked(drawn, rows_B) if variant.grammars else drawn(drafter.head)
        return drafter.guess(rows_B, columns, count, guesses)

    def room(self, rows: int, count: int) -> Drafted:
        head = self._drafter.head
        probs_BQD = self._device.zeros(rows, count, head.size, dtype=torch.float32)
        return Drafted(probs_BQD, self._device.zeros(rows, count, dtype=torch.int64), head.ids_V)

    def observe(self, observed: Observed) -> None:
        self._drafter.observe(observed)


def drawing(make: Callable[[ProposerParts], Drafter]) -> MakeProposer:
    """What ``make`` makes, with sampled drafts."""
    return lambda parts: ProbabilisticProposer(parts.device, make(parts))

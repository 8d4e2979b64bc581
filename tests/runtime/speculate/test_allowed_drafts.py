"""Draft tokens under tables of grammars: none that may not follow is proposed, the text is that of the host's masks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from models.drafters.draft_head import DraftHead
from parallel.comm.collectives import SingleRank
from parallel.layers.shard import VocabShard
from runtime.execute.device.cpu_twin import TwinDevice
from runtime.execute.proposer import Observed, Proposed, ProposerParts, guesses_for
from runtime.execute.sampling import token_tables
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.rejection import Drafted
from runtime.execute.sampling.token_tables import CLASSES, TokenTables, barred_in_torch, table_states
from runtime.execute.slot_state import SlotColumns, SlotTables
from runtime.execute.slots.feature import RowView
from runtime.schedule.request import SamplingParams
from runtime.speculate.guesses import AllowedGuesses, BranchingGuesses, LikeliestGuesses, ProbabilisticProposer
from runtime.speculate.synthetic import scripted
from tests.gpu.test_token_tables_gpu import tables_of
from tests.runtime.engine import rig as rigs
from tests.runtime.engine.lives import Life, live, oracle, same
from tests.runtime.engine.table_rigs import small_grammars, with_tables
from tests.runtime.engine.test_grammar import EOS, GRAMMARS, VOCABULARY, check, mixture
from tests.runtime.speculate.recorded import SHAPE, Drafter
from tests.runtime.speculate.test_synthetic import columns_of

pytest.importorskip("llguidance")

pytestmark = pytest.mark.slow


def states_of(tables: TokenTables, slots_B: Tensor, tokens_BQ: Tensor) -> Tensor:
    """Before each of the draft tokens, [B, Q]."""
    after_last_BW = torch.cat((torch.zeros_like(tokens_BQ[:, :1]), tokens_BQ), 1)
    return table_states(tables, RowView(slots_B, after_last_BW, width=after_last_BW.shape[1]))[:, :-1]


def forbidden(tables: TokenTables, slots_B: Tensor, tokens_BQ: Tensor, vocabulary: int) -> Tensor:
    """bool [B, Q]: draft tokens that may not follow those before them."""
    ids_V = torch.arange(vocabulary)
    states_BQ = states_of(tables, slots_B, tokens_BQ)
    each = [barred_in_torch(tables, slots_B, states_B, ids_V) for states_B in states_BQ.unbind(1)]
    return torch.stack(
        [barred_BV.gather(1, one[:, None])[:, 0] for barred_BV, one in zip(each, tokens_BQ.t(), strict=True)], 1
    )


@pytest.mark.parametrize("ids", [None, 60])
def test_guesses_are_the_likeliest_of_those_that_may_follow(ids: int | None) -> None:
    """With a draft vocabulary and without, in one block and one after the other."""
    vocabulary, count = 97, 5
    tables, draw = tables_of(vocabulary)
    ids_V = None if ids is None else torch.randperm(vocabulary, generator=draw)[:ids]
    size = vocabulary if ids_V is None else len(ids_V)
    weight = torch.randn(size + 3, 24, generator=draw)
    weight[size:] = 0  # padding
    head = DraftHead(lambda hidden: hidden @ weight.t(), VocabShard(size, 0, size + 3), SingleRank(), ids_V)
    slots = torch.arange(9)
    hidden = torch.randn(len(slots), count, 24, generator=draw)
    taken = AllowedGuesses(LikeliestGuesses, head, tables, slots).take(hidden)
    one_by_one = AllowedGuesses(LikeliestGuesses, head, tables, slots)
    assert torch.equal(torch.cat([one_by_one.take(hidden[:, q : q + 1]) for q in range(count)], 1), taken)
    assert torch.equal(one_by_one.proposed().tokens_BQ, taken)
    branching = AllowedGuesses(lambda head: BranchingGuesses(head, 3), head, tables, slots)
    assert torch.equal(branching.take(hidden), taken)
    assert torch.equal(branching.kind.candidates().ids_BQC[:, :, 0], taken)

    plain = LikeliestGuesses(head).take(hidden)
    tabled = tables.rows_S4[slots, CLASSES] > 0
    assert torch.equal(taken[~tabled], plain[~tabled])
    assert forbidden(tables, slots, plain, vocabulary)[tabled].any()
    draft_ids = torch.arange(vocabulary) if ids_V is None else ids_V
    logits = head.logits(hidden.flatten(0, 1)).view(len(slots), count, -1)[..., :size]
    states = states_of(tables, slots, taken)
    for place in range(count):
        barred = barred_in_torch(tables, slots, states[:, place], draft_ids)
        left = logits[:, place].masked_fill(barred, float("-inf"))
        some = ~barred.all(1)
        assert torch.equal(taken[some, place], draft_ids[left.argmax(1)][some])


def test_a_place_takes_one_step_of_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask a place; the states after the drafts before it are not computed again."""
    vocabulary, places = 97, 6
    tables, draw = tables_of(vocabulary)
    head = DraftHead(lambda hidden: hidden.clone(), VocabShard(vocabulary, 0, vocabulary), SingleRank(), None)
    taken = list[str]()

    def count(name: str) -> None:
        inner = getattr(token_tables, name)

        def counted(*given: Any) -> Any:
            taken.append(name)
            return inner(*given)

        monkeypatch.setattr(token_tables, name, counted)

    count("_next_states")
    count("bar_in_torch")
    guesses = AllowedGuesses(LikeliestGuesses, head, tables, torch.arange(9))
    guesses.take(torch.randn(9, places, vocabulary, generator=draw))
    assert taken == ["bar_in_torch", *["bar_in_torch", "_next_states"] * (places - 1)]


GRAMMAR = SamplingParams(temperature=0.0, grammar="start: /a/")
PLAIN = SamplingParams(logit_bias=((3, 1.0),), bad_words_token_ids=((4,),), temperature=1.0)


class Named:
    """A proposer whose draft tokens say who was asked."""

    name, layers, reads_hidden = "named", (), False

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        return Proposed(torch.full((len(rows_B), count), 1))

    def observe(self, observed: Observed) -> None:
        pass


class NamedMasks(Named):
    def allowed(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        return Proposed(torch.full((len(rows_B), count), 2))


@pytest.mark.parametrize("script", [False, True])
@pytest.mark.parametrize("proposer", [Named(), NamedMasks()], ids=["none", "masks"])
def test_steps_with_a_grammar_mask_drafts_and_no_others(proposer: Named, script: bool) -> None:
    """Also where a script accepts them. Edits without a grammar cost a drafter nothing."""
    tables = SlotTables(TwinDevice(), max_requests=3, max_blocks=1, vocab_size=9)
    columns, parts = columns_of(4), SimpleNamespace(device=SimpleNamespace(torch_device=torch.device("cpu")))
    asked = scripted(lambda _: proposer, (0.5, 0.5))(cast(ProposerParts, parts)) if script else proposer
    for params, masked in (([PLAIN], False), ([PLAIN, GRAMMAR], isinstance(proposer, NamedMasks))):
        proposed = guesses_for(asked, tables, torch.arange(4), columns, 2, SamplingVariant.covering(params))
        assert set(proposed.tokens_BQ.flatten().tolist()) == {2 if masked else 1}
        assert (proposed.scripted_B is not None) == script


def test_without_drafts_a_grammar_is_an_edit_like_others() -> None:
    """No graph of its own is captured for it."""
    assert SamplingVariant.covering([GRAMMAR]).on_ranks(1, drafts=False) == SamplingVariant(edits=True)
    assert SamplingVariant.covering([GRAMMAR]).on_ranks(1) == SamplingVariant(edits=True, grammars=True)


class Checked:
    """``inner``, of whose draft tokens it counts those that may not follow, and all of rows with a table."""

    def __init__(self, inner: Any, parts: ProposerParts, told: dict[str, int], masks: bool) -> None:
        self._inner, self._tables, self._told, self._masks = inner, parts.tables, told, masks
        self.name, self.layers, self.reads_hidden = inner.name, inner.layers, inner.reads_hidden

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        return self._inner.propose(rows_B, columns, count)  # type: ignore[no-any-return]

    def allowed(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        how = self._inner.allowed if self._masks else self._inner.propose
        return self._counted(how(rows_B, columns, count), rows_B, columns)

    def observe(self, observed: Observed) -> None:
        self._inner.observe(observed)

    def _counted(self, proposed: Proposed, rows_B: Tensor, columns: SlotColumns) -> Proposed:
        tables, tokens_BQ = self._tables.grammar_tables, proposed.tokens_BQ
        if proposed.parents_BQ is not None:
            tokens_BQ = tokens_BQ[:, :3]  # the likeliest path
        tabled_B = (tables.rows_S4[rows_B, CLASSES] > 0) & (columns.finished == 0)
        self._told["drafts"] += int(tabled_B.sum()) * tokens_BQ.shape[1]
        self._told["forbidden"] += int(forbidden(tables, rows_B, tokens_BQ, VOCABULARY)[tabled_B].sum())
        return proposed


class Drawing(Checked):
    """It draws."""

    def draw(self, rows_B: Tensor, columns: SlotColumns, count: int, variant: SamplingVariant) -> Proposed:
        return self._counted(self._inner.draw(rows_B, columns, count, variant), rows_B, columns)

    def room(self, rows: int, count: int) -> Drafted:
        return self._inner.room(rows, count)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["mtp", pytest.param("dflash", marks=pytest.mark.long), "tree", "drawn"])
def test_no_draft_token_is_proposed_that_may_not_follow(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPE | {"vocab_size": VOCABULARY, "eos_token_id": EOS}
    monkeypatch.setattr(rigs, "TINY", rigs.TINY | shape)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "top_k": 2 if kind == "tree" else 0}
    drafter = Drafter("mtp" if kind in ("mtp", "drawn") else "dflash", tmp_path, **sizes)
    requests = mixture(9)

    def lived(masks: bool) -> tuple[Life, dict[str, int]]:
        told = {"drafts": 0, "forbidden": 0}

        def make(parts: ProposerParts) -> Checked:
            inner: Any = drafter(parts).inner
            if kind == "drawn":
                return Drawing(ProbabilisticProposer(parts.device, inner), parts, told, masks)
            return Checked(inner, parts, told, masks)

        how: dict[str, Any] = {"tree": 6} if kind == "tree" else {}
        grammars = with_tables(small_grammars(VOCABULARY, EOS), (EOS,))  # an engine's own
        try:
            return live(requests, depth=2, widths=(4,), proposer=make, grammars=grammars, **how), told
        finally:
            grammars.close()

    life, told = lived(masks=True)
    check(requests, life.finished)
    assert told["drafts"] > 100
    assert told["forbidden"] == 0
    if kind != "drawn":
        same(life, oracle(requests, grammars=GRAMMARS))
        plain, told = lived(masks=False)
        assert told["forbidden"] > told["drafts"] // 4
        assert life.counters["spec_num_accepted_tokens"] > plain.counters["spec_num_accepted_tokens"]

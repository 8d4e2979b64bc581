"""Drafters with weights over the life of sessions: what they keep is neither lost nor mixed up while one is parked.

Drafts never change tokens, so tokens say nothing of a drafter's state. A round's gain does: one more than the guesses
that were right. Each session's gains, from its first round to its last, and every guess, are compared with those of an
oracle that has neither slots nor pages, and knows only where quanta end and which tokens were computed as a prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.engine import Engine
from runtime.execute.proposer import Observed, Proposed, Proposer, ProposerParts
from runtime.execute.slot_state import SlotColumns
from runtime.schedule.plan import TRASH_BLOCK, Evicted, Refused
from runtime.schedule.request import Request
from tests.models.tiny_delta import FAMILIES
from tests.models.tiny_nemotron import NEMOTRON
from tests.runtime.engine.conftest import long
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.lives import check_all_is_back
from tests.runtime.engine.rig import request, rig
from tests.runtime.engine.test_hybrid import on_banks
from tests.runtime.engine.test_poison import fill_with_nan, idle_blocks
from tests.runtime.speculate.recorded import SHAPE, Drafter, OwnLayer, target_states
from tests.runtime.speculate.test_drafted import prompt
from tests.runtime.speculate.test_eagle3 import Head

WIDTH = 4
BLOCK = 4
BUDGET = 70
GREEDY, DRAWN, SHORT, FORK, SECOND, RESTORED, GUEST = 0, 1, 2, 7, 8, 9, 90
HYBRIDS = {"qwen3.5": (FAMILIES["qwen3.5"], 3), "nemotron-h": (NEMOTRON, 6)}  # and how many layers they have
MODELS = [
    ("dense", "mtp"),
    ("dense", "dflash"),
    ("dense", "eagle3"),
    ("qwen3.5", "own mtp"),
    ("nemotron-h", "own mtp"),
    ("qwen3.5", "dflash"),
]
ALWAYS = {
    ("dense", "dflash", 2),
    ("qwen3.5", "own mtp", 2),
}


def drafter_of(target: str, kind: str, folder: Path) -> Drafter:
    if kind == "own mtp":
        return OwnLayer(HYBRIDS[target][0], folder)
    if kind == "eagle3":
        return Head(folder)
    return Drafter(kind, folder, target_layers=2 if target == "dense" else HYBRIDS[target][1])


@dataclass
class Stretch:
    """Tokens of a session from ``known`` on, without a stop, to ``end``. ``computed``: how many tokens before are a
    prompt's, so that its first token comes of that prompt's last; 0: every token comes of a round."""

    known: int
    end: int
    computed: int


@dataclass
class Session:
    """``text``: prompt, answers and what was said. ``gains``: of its rounds and, 1 each, of its prompts."""

    seed: int
    text: list[int]
    stretches: list[Stretch] = field(default_factory=list)
    gains: list[int] = field(default_factory=list)
    evicted: bool = False


class Watched:
    """Another proposer, whose guesses are counted. ``hidden``: (slot, position) of a token that is not shown to it."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.name, self.layers, self.reads_hidden = inner.name, inner.layers, inner.reads_hidden
        self.guesses: Counter[tuple[int, int, tuple[int, ...]]] = Counter()  # (seed, tokens known, guesses)
        self.hidden: set[tuple[int, int]] = set()

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        proposed = self.inner.propose(rows_B, columns, count)
        for row, live in enumerate((columns.finished == 0).tolist()):
            if live and int(columns.seed[row]) < GUEST:
                guesses = tuple(proposed.tokens_BQ[row].tolist())
                self.guesses[int(columns.seed[row]), int(columns.length[row]), guesses] += 1
        return proposed

    def observe(self, observed: Observed) -> None:
        for slot, position in self.hidden:
            shown_T = (observed.slots_T != slot) | (observed.inputs.positions_T != position)
            kept_kv_slots_T = torch.where(shown_T, observed.kept_kv_slots_T, TRASH_BLOCK)
            observed = replace(observed, kept_T=observed.kept_T & shown_T, kept_kv_slots_T=kept_kv_slots_T)
        self.inner.observe(observed)


class Story:
    """An engine, and what is told to its sessions. ``watched``: its proposer, None without."""

    mutant: Callable[[str, int], None] | None = None  # called before a session goes on: (verb, session)

    def __init__(self, engine: Engine, watched: Watched | None) -> None:
        self.engine, self.watched = engine, watched
        self.sessions: dict[int, Session] = {}
        self.guest_prompts = 0  # tokens of guests' prompts since the last rest

    def slot(self, id_: int) -> int:
        return self.engine.scheduler.ledger.sequences[id_].slot

    def start(self, first: Request, quantum: int) -> None:
        id_, known = first.request_id, len(first.prompt_token_ids)
        assert first.sampling.seed is not None
        first_stretch = Stretch(known, known + quantum, known)
        self.sessions[id_] = Session(first.sampling.seed, list(first.prompt_token_ids), [first_stretch])
        self.engine.start(first, quantum, keep=True)

    def go_on(self, id_: int, quantum: int) -> None:
        self._mutate("continue", id_)
        session = self.sessions[id_]
        known = len(session.text)
        session.stretches.append(Stretch(known, known + quantum, known if session.evicted else 0))
        session.evicted = False
        self.engine.proceed(id_, self._epoch(id_), quantum)

    def go_on_early(self, id_: int, quantum: int) -> None:
        """In the turn of what was told before: no stop between both."""
        self.sessions[id_].stretches[-1].end += quantum
        self.engine.proceed(id_, 1, quantum)

    def say(self, id_: int, tokens: tuple[int, ...], quantum: int) -> None:
        self._mutate("extend", id_)
        session = self.sessions[id_]
        session.text += tokens
        known, new = len(session.text), len(tokens) + 1
        session.stretches.append(Stretch(known, known + quantum, known if session.evicted else new))
        session.evicted = False
        self.engine.extend(id_, self._epoch(id_), tokens, BUDGET, quantum)

    def fork(self, id_: int, parent: int) -> None:
        told = self.sessions[parent]
        self.sessions[id_] = Session(told.seed, list(told.text), evicted=told.evicted)
        self.engine.fork(id_, parent)

    def rest(self) -> None:
        """Turns until there is nothing to do, with NaN before each wherever nobody has anything; then everybody has
        what was asked for, and so many tokens were computed as the daemon promises."""
        before, engine = dict(self.engine.counters), self.engine
        asked = sum(s.stretches[-1].computed for s in self.sessions.values() if s.stretches and self._runs(s))
        while engine.has_work:
            on_banks(engine, [0, *engine.scheduler.slots._free], float("nan"))
            fill_with_nan(engine, idle_blocks(engine))
            output = engine.step()
            for row, (id_, count) in enumerate(zip(output.request_ids, output.counts, strict=True)):
                if count and id_ in self.sessions:
                    self.sessions[id_].text += output.tokens[row * output.width : row * output.width + count]
                    self.sessions[id_].gains.append(count)
            for notice in output.notices:
                assert not isinstance(notice, Refused), notice
                if isinstance(notice, Evicted):
                    self.sessions[notice.request_id].evicted = True
        engine.executor.device.compute.synchronize()
        assert not any(self._runs(session) for session in self.sessions.values())
        hits = engine.counters["prefix_hit_tokens"] - before["prefix_hit_tokens"]
        computed = engine.counters["prefill_tokens"] - before["prefill_tokens"] - self.guest_prompts
        assert computed == asked - hits
        self.guest_prompts = 0

    def guest(self, length: int, seed: int) -> None:
        """A request beside the sessions."""
        self.guest_prompts += length
        self.engine.add(request(GUEST + seed, prompt(length, GUEST + seed), temperature=1.0, max_tokens=6, stops=()))

    @property
    def kept(self) -> list[Tensor]:
        """What the drafter keeps by slot."""
        drafter = self._drafter
        return [drafter._hidden_SN] if hasattr(drafter, "_hidden_SN") else []

    @property
    def pages(self) -> list[Tensor]:
        """Its own caches."""
        drafter = self._drafter
        return [drafter._kv_layer] if hasattr(drafter, "_kv_layer") else list(drafter._caches)

    @property
    def _drafter(self) -> Any:
        assert self.watched is not None
        recorder: Any = self.watched.inner
        return recorder.inner

    def submit(self, work: Callable[[], object]) -> None:
        """Behind every step launched so far."""
        self.engine.executor.device.compute.submit(work)

    def _runs(self, session: Session) -> bool:
        return bool(session.stretches) and len(session.text) < session.stretches[-1].end

    def _epoch(self, id_: int) -> int:
        session = self.engine.scheduler.ledger.sequences[id_].session
        assert session is not None
        return session.epoch

    def _mutate(self, verb: str, id_: int) -> None:
        if self.mutant is not None:
            self.mutant(verb, id_)


def tell(story: Story, texts: int) -> None:
    """Quanta of 1, 3 and 8 tokens; others run while one is parked; sessions are extended, forked, evicted, restored.

    ``texts``: which prompts they begin with, and which random draws.
    """
    for id_, (length, quantum) in enumerate([(10, 1), (17, 3), (5, 8)]):
        seed = 10 * texts + id_
        how: dict[str, Any] = {"temperature": 1.0 * (id_ != GREEDY), "max_tokens": BUDGET, "seed": seed, "stops": ()}
        story.start(request(id_, prompt(length, seed), **how), quantum)
    story.go_on_early(SHORT, 3)
    story.rest()
    for quanta in [(3, 1, 0), (1, 0, 8), (0, 3, 0), (3, 3, 1)]:
        for id_, quantum in enumerate(quanta):
            if quantum:
                story.go_on(id_, quantum)
        story.rest()
    story.guest(30, 0)
    story.rest()
    story.say(GREEDY, (3, 1, 4), 3)
    story.go_on(DRAWN, 8)
    story.rest()
    story.say(DRAWN, (5,), 1)
    story.rest()
    story.fork(FORK, GREEDY)
    story.fork(SECOND, DRAWN)
    story.rest()
    story.go_on(GREEDY, 8)
    story.say(FORK, (6, 2), 8)  # another text, of the same seed
    story.go_on(SECOND, 1)
    story.rest()
    story.go_on(DRAWN, 8)
    story.go_on(FORK, 3)
    story.go_on(SECOND, 3)  # as DRAWN says, to within a block: see runtime/speculate/mtp.py of entries at a block's end
    story.rest()
    counters = story.engine.counters
    assert not counters["session_evictions"], "until here nothing is computed again"
    assert not counters["session_forks_without_copy"] + counters["prefix_hit_tokens"]
    for number in range(1, 3):
        story.guest(110, number)
        story.guest(100, 10 + number)
    story.rest()
    assert story.engine.counters["session_evictions"] > 1
    story.go_on(SHORT, 3)
    story.go_on(GREEDY, 3)
    story.go_on(DRAWN, 3)
    story.rest()
    story.say(SECOND, (1,), 3)
    story.rest()
    story.engine.cancel(FORK)
    story.fork(RESTORED, GREEDY)
    story.rest()
    story.go_on(RESTORED, 8)
    story.rest()
    story.go_on(GREEDY, 3)
    story.go_on(SHORT, 8)
    story.rest()


Mutant = Callable[[Story], Callable[[str, int], None] | None]


def told(drafter: Drafter | None, mutant: Mutant | None = None, *, texts: int = 0, **limits: Any) -> Story:
    """The story, over an engine with windows or without."""
    found: list[Watched] = []

    def make(parts: ProposerParts) -> Watched:
        assert drafter is not None
        found.append(Watched(drafter(parts)))
        return found[-1]

    how: dict[str, Any] = {"kernels": exact_kernels(), "dtype": torch.float64, "max_sessions": 6, "rows": 3}
    how |= {"block_size": BLOCK, "blocks": 92, "max_prefill_tokens": 16, "max_model_len": 128}
    if drafter is not None:
        how |= {"widths": (WIDTH,), "proposer": make}
    with rig(**(how | limits)) as engine:
        story = Story(engine, found[-1] if found else None)
        if mutant is not None:
            story.mutant = mutant(story)
        tell(story, texts)
        for id_ in story.sessions:
            engine.cancel(id_)
        story.rest()
        engine.stop()
        check_all_is_back(engine)
    return story


@cache
def plain(target: str, folder: Path | None, texts: int = 0) -> dict[int, list[int]]:
    """What everybody says without speculation."""
    story = told(None, depth=0, texts=texts, **model_of(target, folder))
    return {id_: session.text for id_, session in story.sessions.items()}


def model_of(target: str, folder: Path | None) -> dict[str, Any]:
    if folder is not None:
        return {"folder": folder}
    return {"shape": SHAPE | (dict(HYBRIDS[target][0]) if target != "dense" else {}) | SHAPE}


@torch.inference_mode()
def expected(drafter: Drafter, sessions: Iterable[Session]) -> tuple[list[list[int]], Counter[Any]]:
    """The gains of each session, and all guesses."""
    assert drafter.recorder is not None
    gains: list[list[int]] = []
    guesses: Counter[Any] = Counter()
    for session in sessions:
        states = target_states(drafter.recorder.model, session.text)
        gains.append([])
        for stretch in session.stretches:
            known = stretch.known
            if stretch.computed:
                gains[-1].append(1)
                known += 1
            while known < stretch.end:
                before = [states_L[: known - 1] for states_L in states]
                guessed = drafter.expected(session.text[:known], WIDTH - 1, *before)
                guesses[session.seed, known, guessed] += 1
                right = 0
                for guess, token in zip(guessed, session.text[known : stretch.end], strict=False):
                    if guess != token:
                        break
                    right += 1
                gains[-1].append(min(right + 1, stretch.end - known))
                known += gains[-1][-1]
    return gains, guesses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "kind", "depth"),
    [
        pytest.param(*model, depth, marks=() if (*model, depth) in ALWAYS else pytest.mark.long)
        for model in MODELS
        for depth in range(5)
    ],
)
def test_a_drafter_keeps_its_state_over_the_life_of_sessions(
    target: str, kind: str, depth: int, tmp_path: Path
) -> None:
    drafter = drafter_of(target, kind, tmp_path)
    folder = tmp_path if kind == "own mtp" else None
    story = told(drafter, depth=depth, **model_of(target, folder))
    assert {id_: session.text for id_, session in story.sessions.items()} == plain(target, folder)
    gains, guesses = expected(drafter, story.sessions.values())
    assert [session.gains for session in story.sessions.values()] == gains
    assert story.watched is not None
    assert (story.watched.guesses - guesses, guesses - story.watched.guesses) == (Counter(), Counter())
    assert sum(map(len, gains)) + 5 < sum(map(sum, gains)), "windows of which more than a token was kept"


# ---- mutants: each leaves every text right, and other guesses are kept ----


def zeroed(story: Story) -> Callable[[str, int], None]:
    """What the slot keeps is gone at CONTINUE; of a drafter without, its entries of the newest block with KV."""

    def mutate(verb: str, id_: int) -> None:
        sequence = story.engine.scheduler.ledger.sequences[id_]
        if verb == "continue" and sequence.slot:
            block = sequence.blocks[(sequence.landed_tokens - 2) // BLOCK]
            kept = [rows[sequence.slot] for rows in story.kept] or [
                keys_values[:, block] for keys_values in story.pages
            ]
            story.submit(lambda: [tensor.zero_() for tensor in kept])

    return mutate


def stale(story: Story) -> Callable[[str, int], None]:
    """At CONTINUE what the slot keeps is that of the time when its session was told the last time."""
    before: dict[int, list[Tensor]] = {}

    def mutate(verb: str, id_: int) -> None:
        slot = story.slot(id_)
        if not slot:
            return
        now = [rows[slot].clone() for rows in story.kept]
        if verb == "continue" and id_ in before:
            for rows, row in zip(story.kept, before[id_], strict=True):
                rows[slot] = row
        before[id_] = now

    return mutate


def not_copied(story: Story) -> None:
    """A fork's slot and last block keep what was there."""
    staging = story.engine.executor.staging
    fork = staging.on_forked
    assert fork is not None

    def on_forked(rows_2C: Tensor, blocks_2C: Tensor | None) -> None:
        before = [tensor.clone() for tensor in (*story.kept, *story.pages)]
        fork(rows_2C, blocks_2C)
        for tensor, was in zip((*story.kept, *story.pages), before, strict=True):
            tensor.copy_(was)

    staging.on_forked = on_forked


def not_shown(story: Story) -> Callable[[str, int], None]:
    """The newest token, whose successor comes with EXTEND."""

    def mutate(verb: str, id_: int) -> None:
        if verb == "extend" and story.watched is not None:
            story.watched.hidden.add((story.slot(id_), len(story.sessions[id_].text) - 1))

    return mutate


@pytest.mark.parametrize(
    ("target", "kind", "mutant", "texts"),
    [
        long("dense", "mtp", zeroed, 0),
        ("dense", "mtp", stale, 0),
        ("dense", "mtp", not_copied, 0),
        long("dense", "mtp", not_shown, 1),
        ("dense", "dflash", zeroed, 0),
        long("dense", "dflash", not_copied, 4),
        ("dense", "dflash", not_shown, 0),
        pytest.param("qwen3.5", "own mtp", stale, 0, marks=pytest.mark.long),
        pytest.param("qwen3.5", "own mtp", not_copied, 0, marks=pytest.mark.long),
    ],
)
def test_mutants_are_seen_in_gains_and_guesses_only(
    target: str, kind: str, mutant: Mutant, texts: int, tmp_path: Path
) -> None:
    """A random guess of nine is right: a guess that is another one changes a gain in some texts only, and in these."""
    drafter = drafter_of(target, kind, tmp_path)
    folder = tmp_path if kind == "own mtp" else None
    story = told(drafter, mutant, depth=0, texts=texts, **model_of(target, folder))
    assert {id_: session.text for id_, session in story.sessions.items()} == plain(target, folder, texts)
    gains, guesses = expected(drafter, story.sessions.values())
    assert [session.gains for session in story.sessions.values()] != gains
    assert story.watched is not None
    assert story.watched.guesses != guesses

"""The settings in which lives are lived, each by one value of every axis: model, draft tokens, depth, and so on.

Knows: the axes, which values may meet, and the limits, requests and proposers that a setting means. Does not know: what
happens in a life (test_lives.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import permutations
from math import ceil
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from models.kv_group import FP8
from models.registry import ARCHITECTURES
from runtime.engine import Engine
from runtime.execute.proposer import MakeProposer
from runtime.schedule.plan import Admit
from runtime.schedule.request import FinishReason, Request
from runtime.schedule.speculation import Speculation
from runtime.schedule.states import State
from runtime.speculate.methods import proposer_for
from runtime.speculate.tree import branching
from runtime.speculative_config import speculative_config
from tests.models.tiny_delta import FAMILIES
from tests.models.tiny_nemotron import NEMOTRON
from tests.models.toy_hybrid import ARCHITECTURE, HYBRID, ToyHybrid
from tests.runtime.engine import rig
from tests.runtime.engine.group_rigs import accompanied_rig
from tests.runtime.engine.lives import Act, Life, live, oracle, prompt, same, unbroken
from tests.runtime.engine.replay_proposer import script_of, window_roles
from tests.runtime.engine.rig import TINY, request
from tests.runtime.engine.test_experts import EXPERTS
from tests.runtime.engine.test_hybrid import on_banks
from tests.runtime.engine.test_poison import fill_with_nan, idle_blocks
from tests.runtime.engine.test_trees import RANKS, KnownAnswers
from tests.runtime.speculate.recorded import SHAPE, VOCABULARY, Drafter, OwnLayer
from tests.runtime.speculate.test_eagle3 import Head
from tests.selection import Row

FEW: dict[str, object] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
HYBRIDS: dict[str, dict[str, object]] = {
    **{name: shape | FEW for name, shape in FAMILIES.items()},
    "nemotron-h": NEMOTRON | {"num_hidden_layers": 3, "hybrid_override_pattern": "M*E"},
}
MODELS: dict[str, dict[str, object]] = {"attention": {}, "experts": EXPERTS, "toy hybrid": HYBRID, **HYBRIDS}
ROWS = 4
WIDTHS = (5, 1, 2)  # in turn
DRAFTS = {  # tokens that a request gains a step at most
    "none": 1, "windows": max(WIDTHS), "ngram": 4, "mtp": 4, "dflash": 4, "eagle3": 4, "known tree": 3, "dflash tree": 4
}  # fmt: skip
TREES = {"known tree": 8, "dflash tree": 10}  # tokens of a tree
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 1.0},
    "filtered": {"temperature": 1.1, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
}
AXES: dict[str, tuple[Any, ...]] = {
    "drafts": tuple(DRAFTS),
    "model": tuple(MODELS),
    "depth": (0, 1, 2, 3, 4),
    "chunks": ("mixed", "mixed graphs", "in turns", "in turns, graphs"),
    "sampling": tuple(SAMPLING),
    "groups": ("alone", "two groups"),
    "weights": ("float", "fp8"),
    "cache": ("float", "fp8"),
}
SPARING = ("two groups", *HYBRIDS)  # which take twice as long as others do
ALIKE: tuple[tuple[Any, ...], ...] = (
    ("attention", "experts"),
    tuple(HYBRIDS),
    ("ngram", "mtp", "dflash", "eagle3"),
    ("windows", "known tree", "dflash tree"),
    (2, 3, 4),
    ("mixed", "mixed graphs"),
    ("in turns", "in turns, graphs"),
    ("alone", "two groups"),
)
OF_OTHERS = {
    turn: [Admit(request(9000 + turn, [(turn + i) % 7 for i in range(9)], max_tokens=1 + turn % 5, stops=()))]
    for turn in (*range(4, 18, 5), *range(25, 90, 9))
}  # the second group's requests: it is idle at first, then has one after the other, then is idle again


def allowed(row: Row) -> bool:
    """Whether values of some axes may meet."""
    event, drafts, model = row.get("event"), row.get("drafts", "none"), row.get("model")
    if drafts != "none" and (model == "toy hybrid" or event == "room for two"):
        return False  # a state that cannot be verified; how many blocks a window reserves differs from step to step
    if drafts == "windows" and not row.get("chunks", "in turns").startswith("in turns"):
        return False  # roles without a rule, which serve decode steps alone
    if event == "together" and model == "toy hybrid" and row.get("sampling") == "greedy":
        return False  # its answers are one token throughout: no stop id ends several of them in one step
    if row.get("groups") == "two groups":  # which share experts; random lives of both are test_hybrid_groups.py's
        return model not in ("attention", "qwen3.5") and drafts != "windows" and event != "random"
    return True


def shared_out(row: Row) -> bool:
    """The same, but two groups meet one sparse model: they agree on steps, whatever a layer keeps."""
    return allowed(row) and (row.get("groups") != "two groups" or row.get("model", "experts") == "experts")


def asked(row: Row) -> bool:
    """Of values that are alike, an event meets one, and so does any value where there are three and more of them; which
    one differs from value to value."""

    def meets(one: Any, other: Any, least: int) -> bool:
        mine = {alike: alike[crc32(str(one).encode()) % len(alike)] for alike in ALIKE if len(alike) >= least}
        return all(other == chosen for alike, chosen in mine.items() if other in alike)

    if event := row.get("event"):
        return all(meets(event, value, 2) for value in row.values())
    return all(meets(one, other, 3) for one, other in permutations(row.values(), 2))


@dataclass(frozen=True)
class Setting:
    """A value of every axis. ``folder``: where drafters are written."""

    drafts: str
    model: str
    depth: int
    chunks: str
    sampling: str
    groups: str
    weights: str
    cache: str
    folder: Path

    @property
    def plain(self) -> bool:
        """A request gains one token a step, and the host knows when it ends by length."""
        return self.drafts == "none"

    @property
    def in_step(self) -> bool:
        """Requests gain as many tokens as each other in every step, if ``right`` is 10."""
        return self.drafts in ("none", "windows")

    @property
    def in_turns(self) -> bool:
        """No step has both decode requests and prefill chunks."""
        return self.chunks.startswith("in turns")

    @property
    def hybrid(self) -> bool:
        return self.model not in ("attention", "experts")

    @property
    def most(self) -> int:
        """Tokens that a request gains a step."""
        return DRAFTS[self.drafts]

    @property
    def reserved(self) -> int:
        """Tokens that a request may hold blocks for beyond what it ends with."""
        return 0 if self.plain else self.most * (self.depth + 1) + TREES.get(self.drafts, 0)

    def tokens(self, steps: int) -> int:
        """As many as a request is expected to gain in so many steps, or a few more."""
        pace = {"none": 1, "windows": sum(WIDTHS) / len(WIDTHS), "known tree": 2.6, "ngram": 2}
        return ceil(steps * pace.get(self.drafts, 2 if self.sampling == "greedy" else 1.5))

    def requests(self, count: int, length: int = 12, *, first: int = 0, **sampling: Any) -> list[Request]:
        """Different prompts. Each reports log-probabilities: no wrong number hides in a right token."""
        return [self.request(i, length, **sampling) for i in range(first, first + count)]

    def request(self, request_id: int, length: int | tuple[int, ...] = 12, **sampling: Any) -> Request:
        """With a prompt of this length, or this one."""
        ids = self.prompt(length, request_id) if isinstance(length, int) else length
        fields: dict[str, Any] = {"max_tokens": 16, "logprobs": 2, "stops": (), **SAMPLING[self.sampling], **sampling}
        return request(request_id, ids, **fields)

    def prompt(self, length: int, seed: int) -> tuple[int, ...]:
        return tuple(token % VOCABULARY for token in prompt(length, seed))

    def oracle(self, requests: Iterable[Request], **limits: Any) -> Life:
        every = [*requests]
        return oracle(every, rows=ROWS if len(every) <= ROWS else 2 * ROWS, **self._target, **limits)

    def live(
        self,
        requests: list[Request],
        act: Act | None = None,
        *,
        later: Mapping[int, list[Request]] | None = None,
        added: Iterable[Request] = (),
        but: Iterable[int] = (),
        right: int = 8,
        limited: bool = False,
        serial: dict[str, Any] | None = None,
        **limits: Any,
    ) -> Life:
        """A life whose answers, log-probabilities and states are the serial engine's.

        ``added``: requests that ``act`` adds. ``but``: those that are cut short. ``serial``: limits of the serial
        engine. NaN is in all state and blocks that no request has. Of ten replayed tokens ``right`` are right, and with
        ``limited`` a step accepts fewer now and then.
        """
        later = later or {}
        every = [*requests, *(one for arriving in later.values() for one in arriving), *added]
        alone = self.oracle(every, **(serial or {}))

        def poisoned(engine: Engine, turn: int) -> None:
            if act is not None:
                act(engine, turn)
            on_banks(engine, [0, *engine.scheduler.slots._free], float("nan"))
            fill_with_nan(engine, idle_blocks(engine))

        how = (
            {"rows": ROWS, "blocks": 90}
            | self._target
            | self._chunks(**limits)
            | self._speculation(every, alone, right, limited)
            | limits
        )
        life = live(requests, poisoned, depth=self.depth, later=later, added=added, over=self._over, **how)
        cut = {i for i in but if life.answers[i][1] is not FinishReason.LENGTH}
        same(life, alone, but=cut)
        for request_id in alone.states.keys() - cut:
            mine, expected = life.states[request_id], alone.states[request_id]
            for bank, serial_bank in zip(mine[: len(expected)], expected, strict=True):  # a drafter's own come last
                torch.testing.assert_close(bank, serial_bank, atol=1e-9, rtol=1e-9)
        assert bool(life.counters["spec_num_drafts"]) is (not self.plain)
        if self.drafts in ("windows", "known tree"):
            longest = max(len(tokens) for tokens, _ in life.answers.values())
            assert max(map(max, life.rounds.values())) > 1 or longest < 4, "several tokens in a step"
        return life

    def unbroken(self, life: Life) -> None:
        if self.depth:
            unbroken(life)

    # ---- what the values mean ----

    @property
    def _over(self) -> Callable[..., AbstractContextManager[Engine]] | None:
        return None if self.groups == "alone" else partial(accompanied_rig, arrivals=OF_OTHERS)

    @cached_property
    def _target(self) -> dict[str, Any]:
        """Of the target itself: where its weights are, if they are not made up, and how it keeps its numbers."""
        how: dict[str, Any] = {"folder": _own_layer(self.model, self.folder).folder} if self._own_layer else {}
        if self.weights == "fp8":
            how["quantization"] = "fp8"
        if self.cache == "fp8":
            how["kv_dtype"] = FP8
        return how

    @property
    def _own_layer(self) -> bool:
        return self.drafts == "mtp" and self.model in HYBRIDS

    @property
    def _single_in_mixed(self) -> bool:
        """Decode requests have one token in steps with chunks."""
        return self.hybrid and self.drafts in TREES

    def _chunks(self, *, rows: int = ROWS, max_prefill_tokens: int = 64, **_: Any) -> dict[str, Any]:
        how: dict[str, Any] = {"mixed": None} if self.in_turns else {}
        if "graphs" in self.chunks:
            decoding = rows * (1 if self._single_in_mixed else TREES.get(self.drafts, self.most))
            most = max_prefill_tokens + (0 if self.in_turns else decoding)
            how["prefill_buckets"] = tuple(sorted({min(24, max_prefill_tokens), most}))
        return how

    def _speculation(self, every: list[Request], alone: Life, right: int, limited: bool) -> dict[str, Any]:
        if self.plain:
            return {}
        script = script_of(every, {i: tokens for i, (tokens, _) in alone.answers.items()})
        if self.drafts == "windows":
            roles = window_roles(WIDTHS, script, right=right, limited=limited)
            return {"widths": WIDTHS, "further_roles": roles}
        rule = Speculation(self.most, mixed_percent=0 if self.in_turns or self._single_in_mixed else 100)
        known = branching(lambda parts: KnownAnswers(parts, script), RANKS)
        proposer = known if self.drafts == "known tree" else self._proposer()
        return {"proposer": proposer, "speculation": rule, "tree": TREES.get(self.drafts, 0)}

    def _proposer(self) -> MakeProposer:
        if self.drafts == "ngram":
            keys = {"num_speculative_tokens": self.most - 1, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
            return proposer_for(speculative_config({"method": "ngram", **keys}))
        if self._own_layer:
            return _own_layer(self.model, self.folder)
        layers = int(str((TINY | MODELS[self.model])["num_hidden_layers"]))
        return _drafter(self.drafts, layers, self.folder)


@cache
def _own_layer(family: str, folder: Path) -> OwnLayer:
    """A target with an MTP layer in its own checkpoint."""
    return OwnLayer(HYBRIDS[family], folder / family)


@cache
def _drafter(kind: str, layers: int, folder: Path) -> Drafter:
    own = folder / f"{kind} {layers}"
    if kind == "eagle3":
        return Head(own)
    if kind == "dflash tree":
        return Drafter("dflash", own, top_k=3, target_layers=layers)
    return Drafter(kind, own, target_layers=layers)


def of_model(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rig's model is this one, small, over few token ids: a random draft token is right now and then."""
    monkeypatch.setitem(ARCHITECTURES, ARCHITECTURE, ToyHybrid)
    monkeypatch.setattr(rig, "TINY", TINY | SHAPE | MODELS[model])


def state_of(engine: Engine, request_id: int) -> State:
    sequence = engine.scheduler.ledger.sequences.get(request_id)
    return State.ENDED if sequence is None else sequence.state


def with_tokens(one: Request, max_tokens: int) -> Request:
    return replace(one, sampling=replace(one.sampling, max_tokens=max_tokens))

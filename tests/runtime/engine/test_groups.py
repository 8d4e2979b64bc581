"""Groups with requests of their own share the experts of every layer: nobody waits in vain, and every token is right.

Each group is an engine in a thread; exchanges and agreement meet at barriers, so a collective that one group skips
breaks the barrier. The model is computed exactly (exact_kernels.py): tokens must equal those of one engine alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, Unpack

import pytest
import torch

from parallel.layers.experts import ExpertSplit
from runtime.execute.device.cpu_twin import TwinDevice, TwinGraph
from runtime.execute.device.protocol import Work
from runtime.execute.launch_spec import GREEDY, BucketSizes, LaunchNeeds, LaunchResolver, LaunchSpec, exchange_buckets
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.groups.step_sync import DpStepSync
from runtime.schedule.budget import NO_BOUND
from runtime.schedule.config import SnapshotPolicy
from runtime.schedule.plan import Chunk, Finished, Scored, StepKind, StepPlan
from runtime.schedule.request import Request
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculate.tree import branching
from runtime.speculative_config import speculative_config
from tests.plant import name_of, plant
from tests.runtime.engine.conftest import HYBRIDS, long
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.group_rigs import Meeting, MetAgreement, MetExchange
from tests.runtime.engine.lives import Act, check_all_is_back
from tests.runtime.engine.replay_proposer import script_of
from tests.runtime.engine.rig import MIXED, RigLimits, RigPlace, request, rig, run
from tests.runtime.engine.serial_answers import Answers, serial_answers
from tests.runtime.engine.test_depths import mixture, outcome
from tests.runtime.engine.test_experts import EXPERTS
from tests.runtime.engine.test_trees import RANKS, KnownAnswers, some

LIMITS: RigLimits = {"shape": EXPERTS | {"decoder_sparse_step": 1}, "dtype": torch.float64}
BUCKETS = (1, 2, 4, 8)
CAPTURED = (16, 40, 72)  # tokens; the last holds a whole prefill and every row that decodes


CHUNKS: dict[str, RigLimits] = {
    "launched": {},
    "captured": {"prefill_buckets": CAPTURED},
    "in turns": {"prefill_buckets": (16, 40, 64), "mixed": None},
}


@pytest.fixture(params=CHUNKS)
def chunks(request: pytest.FixtureRequest) -> RigLimits:
    """How steps with chunks are launched: one by one, as graphs, or as graphs without rows that decode."""
    return CHUNKS[request.param]


def within(limits: RigLimits, **more: Unpack[RigLimits]) -> RigLimits:
    """Both."""
    return {**limits, **more}


class Lives:
    """Every group's engine from its first request to everybody's last. ``arrivals[g][turn]`` are group g's requests;
    ``acts[g]`` is called before each of its turns. In the end no group holds anything any more."""

    def __init__(
        self, arrivals: Sequence[dict[int, list[Request]]], acts: Sequence[Act] = (), **limits: Unpack[RigLimits]
    ) -> None:
        self.finished: dict[int, Finished] = {}
        self.rows: list[list[int]] = []
        self.counters: list[dict[str, int | float]] = []
        self.idle_steps: list[int] = []
        self._limits = limits
        count = len(arrivals)
        device, host = Meeting(count), Meeting(count)
        self._meetings = (device, host)
        self._acts = acts
        with ThreadPoolExecutor(count) as threads:
            lives = [threads.submit(self._live, g, arrivals[g], device, host) for g in range(count)]
        for life in lives:
            finished, rows, counters, idle = life.result()
            self.finished |= finished
            self.rows.append(rows)
            self.counters.append(counters)
            self.idle_steps.append(idle)

    def _live(self, index: int, arrivals: dict[int, list[Request]], device: Meeting, host: Meeting) -> Any:
        agreement, exchange = MetAgreement(host, index), MetExchange(device, index)
        split = ExpertSplit(whole=True, exchange=exchange)
        limits: RigLimits = {"kernels": exact_kernels(tables=True), "buckets": BUCKETS, **LIMITS, **self._limits}
        place: RigPlace = {"experts": split, "groups": agreement}
        finished: dict[int, Finished] = {}
        try:
            with rig(**limits, **place) as engine:
                turn, working = 0, True
                while working:
                    for one in arrivals.get(turn, ()):
                        engine.add(one)
                    if self._acts:
                        self._acts[index](engine, turn)
                    finished |= {ended.request_id: ended for ended in engine.step().finished}
                    turn += 1
                    mine = engine.has_work or any(at >= turn for at in arrivals)
                    working = bool(agreement.agree_max(turn, (int(mine),))[0])
                engine.stop()
                check_all_is_back(engine)
                assert engine._groups is not None
                return finished, exchange.rows, dict(engine.counters), engine._groups.idle_steps
        except BaseException:
            for meeting in self._meetings:  # the others shall not wait for this group
                meeting.abort()
            raise


def alone(requests: Sequence[Request]) -> Answers:
    return serial_answers(requests, shape=LIMITS["shape"], exact=True)


def ids_from(first: int, requests: Sequence[Request]) -> list[Request]:
    """The same requests under other ids; their seeds stay."""
    return [Request(first + n, *(getattr(r, name) for name in _REST)) for n, r in enumerate(requests)]


_REST = ("prompt_token_ids", "sampling", "stop_token_ids", "priority")


@pytest.mark.parametrize(("captured", "wider"), [(CAPTURED, False), ((4, 7), True)])
def test_groups_start_in_one_order(captured: tuple[int, ...], wider: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks agree on kernels before any packed step; packed steps are captured before decode, and the widest
    all-to-all of each bucket first. ``wider``: some group decodes more rows than a captured packed step holds."""
    events: list[tuple[object, Any]] = []  # by a group's kernels, device or exchange
    group_of: dict[int, int] = {}
    capture, gather = TwinDevice.capture, MetExchange.all_gather

    def agreed(usual: Any, *given: Any) -> Any:
        events.append((usual.__self__, "agreement"))
        return usual(*given)

    def rehearsed(usual: Any) -> None:
        parts = usual.__self__._parts
        exchange = parts.model.expert_split.exchange
        for one in (parts.model.kernels, parts.device, exchange):
            group_of[id(one)] = exchange.index
        events.append((exchange, f"rehearsal of {name_of(usual)}"))
        usual()

    def captures(device: TwinDevice, work: Work, *, name: str, **how: Any) -> TwinGraph:
        device.compute.synchronize()  # its worker may be busy with earlier work
        events.append((device, name))
        return capture(device, work, name=name, **how)

    def gathers(exchange: MetExchange, x_XN: torch.Tensor) -> torch.Tensor:
        events.append((exchange, len(x_XN)))
        return gather(exchange, x_XN)

    plant(monkeypatch, agreed, op="agree_on_kernels")
    plant(monkeypatch, rehearsed, part="prefill.rehearse")
    monkeypatch.setattr(TwinDevice, "capture", captures)
    monkeypatch.setattr(MetExchange, "all_gather", gathers)
    Lives([{}, {}], prefill_buckets=captured)
    first, second = ([what for one, what in events if group_of[id(one)] == group] for group in range(2))
    assert first == second
    assert first.index("agreement") < first.index("rehearsal of prefill")
    at = [i for i, name in enumerate(first) if isinstance(name, str) and name.startswith(("prefill of", "decode of"))]
    of_tokens = [first[i] for i in at if first[i].startswith("prefill")]
    assert [first[i] for i in at[: len(of_tokens)]] == of_tokens
    assert of_tokens[: len(captured)] == [f"prefill of {tokens} tokens" for tokens in captured[::-1]]
    decode = [(int(first[i].split()[2]), first[i + 1]) for i in at[len(of_tokens) :]]
    assert decode == sorted(decode, reverse=True)
    assert any(rows > bucket for bucket, rows in decode) is wider
    assert {bucket for bucket, rows in decode if rows == bucket} == set(BUCKETS)


@pytest.mark.parametrize(
    ("chunks", "depth"), [long("launched", 0), ("captured", 2), long("in turns", 0)], indirect=["chunks"]
)
def test_groups_are_idle_join_and_drain_at_different_times(depth: int, chunks: RigLimits) -> None:
    first, second = mixture(31, count=5), ids_from(100, mixture(32, count=4))
    late = ids_from(200, mixture(33, count=2))
    lives = Lives([{0: first, 60: late}, {9: second}], **within(chunks, depth=depth))
    assert outcome(lives.finished) == alone([*first, *second, *late])
    assert lives.rows[0] == lives.rows[1], "the same exchanges on every group"
    assert all(idle > 0 for idle in lives.idle_steps)
    mixes = chunks.get("mixed", MIXED) is not None
    assert [counters["mixed_steps"] > 0 for counters in lives.counters] == [mixes] * 2
    if "prefill_buckets" not in chunks:  # of captured steps each group draws its own rows, in graphs of its own
        captured = [counters["graph_captures_after_warmup"] for counters in lives.counters]
        assert captured[0] == captured[1]


def test_groups_that_never_have_windows_replay_their_prompts() -> None:
    """disable_by_batch_size 0, the baseline that a speculating engine is compared with: a proposer, and no window."""
    keys = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    arrivals = [{0: mixture(35, count=3)}, {3: [replace(one, request_id=50) for one in mixture(36, count=1)]}]
    proposer = proposer_for(speculative_config(keys))
    lives = Lives(arrivals, proposer=proposer, speculation=Speculation(4, most_rows=0), prefill_buckets=CAPTURED)
    assert lives.rows[0] == lives.rows[1]
    for counters in lives.counters:
        assert counters["spec_num_drafts"] == 0
        assert not any(name.startswith("fallbacks") for name in counters)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunks", "percent", "depth"),
    [long("launched", 50, 0), ("captured", 0, 2), long("in turns", 50, 0)],
    indirect=["chunks"],
)
def test_one_group_verifies_while_another_decodes_prefills_or_idles(
    chunks: RigLimits, percent: int, depth: int
) -> None:
    """Windows only with at most two rows: so widths differ between groups, and change while others prefill."""
    few: dict[str, Any] = {"temperature": 0.5, "allowed_token_ids": (5, 6, 7), "max_tokens": 30}
    first = [request(i, (30 + i, 5, 6, 7, 5, 6, 7, 5), stops=(), **few) for i in range(2)]
    many = [request(10 + i, range(2 + i, 40 + i), max_tokens=12 + 6 * i, stops=()) for i in range(4)]
    late = mixture(35, count=3)
    late = [replace(one, request_id=50 + i) for i, one in enumerate(late)]
    keys = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    proposer = proposer_for(speculative_config(keys))
    policy = Speculation(4, most_rows=2, mixed_percent=percent)
    arrivals = [{0: first, 40: late}, {3: many}]
    lives = Lives(arrivals, **within(chunks, depth=depth, proposer=proposer, speculation=policy))
    assert outcome(lives.finished) == alone([*first, *many, *late])
    assert lives.rows[0] == lives.rows[1], "the same exchanges on every group"
    assert all(counters["spec_num_drafts"] > 0 for counters in lives.counters)
    assert lives.counters[1]["speculation_off{batch}"] > 0
    assert all(idle > 0 for idle in lives.idle_steps)
    if chunks.get("mixed", MIXED) is not None and "prefill_buckets" in chunks:  # every step is a graph's
        assert not any(name.startswith("fallbacks") for counters in lives.counters for name in counters)
        assert set(CAPTURED) & set(lives.rows[0])
    elif "prefill_buckets" in chunks:  # prompts and windows in turns: no step with chunks is captured
        assert [counters["fallbacks{eager_prefill_groups}"] for counters in lives.counters] == [1, 1]


@pytest.mark.parametrize(("depth", "launched"), [long(0, "launched"), (2, "captured")])
def test_one_group_has_trees_while_another_decodes_prefills_or_idles(depth: int, launched: str) -> None:
    """Trees of 12 tokens, of which a row gains four at most, only with at most two rows; also beside chunks, which of
    captured steps those are that another group has.
    """
    requests = [replace(one, sampling=replace(one.sampling, logprobs=None)) for one in some(9)]
    first, many, late = requests[:2], requests[2:6], requests[6:]
    expected = alone(requests)
    script = script_of(requests, {i: tokens for i, (tokens, _) in expected.items()})
    limits: RigLimits = {
        "depth": depth, "proposer": branching(lambda parts: KnownAnswers(parts, script), RANKS), "tree": 12,
        "speculation": Speculation(4, most_rows=2, mixed_percent=100), "blocks": 400,
    }  # fmt: skip
    captured: RigLimits = {"prefill_buckets": CAPTURED} if launched == "captured" else {}
    lives = Lives([{0: first, 60: late}, {3: many}], **within(limits, **captured))
    assert outcome(lives.finished) == expected
    assert lives.rows[0] == lives.rows[1], "the same exchanges on every group"
    assert 2 * 12 in lives.rows[0], "a tree is brought whole"
    if captured:
        assert set(CAPTURED) & set(lives.rows[0])
    for counters in lives.counters:
        assert counters["spec_num_accepted_tokens"] > counters["spec_num_drafts"] > 0, "more than a guess a round"
    assert lives.counters[1]["speculation_off{batch}"] > 0
    assert all(idle > 0 for idle in lives.idle_steps)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "windows"), [long("qwen3.5-moe", False), ("nemotron-h", True)])
def test_each_group_has_snapshots_of_its_own(family: str, windows: bool) -> None:
    """Models with recurrent layers and experts, their shared one on each group: prefix hits in both groups, while the
    other one goes on; with windows, too."""
    shape = HYBRIDS[family]
    stems = [tuple(range(seed, seed + 34)) for seed in (3, 90)]
    arrivals = [
        {turn: [request(10 * turn + i, (*stem, 150 + turn), max_tokens=9, stops=(), seed=turn)] for turn in (0, 9, 18)}
        for i, stem in enumerate(stems)
    ]
    keys = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    drafting: RigLimits = {"proposer": proposer_for(speculative_config(keys)), "speculation": Speculation(4)}
    limits: RigLimits = {"depth": 2, "max_prefill_tokens": 16, "snapshots": SnapshotPolicy(6, 2, 1), "shape": shape}
    with rig(depth=0, kernels=exact_kernels(), dtype=torch.float64, prefix_caching=False, shape=shape) as engine:
        expected = outcome(run(engine, [one for group in arrivals for due in group.values() for one in due]))
    lives = Lives(arrivals, **within(limits, **(drafting if windows else {})))
    assert outcome(lives.finished) == expected
    assert lives.rows[0] == lives.rows[1], "the same exchanges on every group"
    assert all(counters["snapshot_restores"] >= 2 for counters in lives.counters)


@pytest.mark.parametrize("chunks", ["captured", long("launched"), long("in turns")], indirect=True)
def test_a_group_that_never_has_a_request_takes_part_in_everything(chunks: RigLimits) -> None:
    requests = [request(i, range(3 + i, 20 + i), max_tokens=6, stops=()) for i in range(3)]
    lives = Lives([{0: requests}, {}], **within(chunks, depth=2))
    assert outcome(lives.finished) == alone(requests)
    assert lives.rows[0] == lives.rows[1]
    assert lives.counters[1]["steps"] == 0
    assert lives.idle_steps[1] == lives.counters[0]["steps"]
    assert lives.counters[0]["graph_captures_after_warmup"] == 0


@pytest.mark.parametrize("chunks", ["captured", long("launched"), long("in turns")], indirect=True)
def test_a_prefill_leaves_the_others_in_their_graphs(chunks: RigLimits) -> None:
    """One group decodes without a break while long prompts come in at the other; nothing is captured for it."""
    steady = [request(0, range(5, 12), max_tokens=40, stops=())]
    long = [request(10 + i, range(60), max_tokens=2, stops=(), seed=i) for i in range(3)]
    lives = Lives([{0: steady}, {4: long[:1], 12: long[1:2], 20: long[2:]}], **within(chunks, depth=2))
    assert outcome(lives.finished) == alone([*steady, *long])
    assert [counters["graph_captures_after_warmup"] for counters in lives.counters] == [0, 0]
    assert lives.counters[0]["chain_breaks{start}"] == 1
    assert lives.counters[0]["chained_steps"] == lives.counters[0]["steps"] - 1
    ladder = chunks.get("prefill_buckets") or exchange_buckets(BUCKETS, 64, 8)
    assert {rows for rows in lives.rows[0] if rows > BUCKETS[-1]} <= set(ladder)


@pytest.mark.parametrize("percent", [long(0), 50])
def test_a_prefill_leaves_windows_of_others_in_captured_steps(percent: int) -> None:
    """One group verifies in every step while prompts come in at the other, whose rows have windows, too."""
    steady = [request(0, (5, 6, 7, 5, 6, 7, 5), max_tokens=40, stops=())]
    long = [request(10 + i, range(60), max_tokens=6, stops=(), seed=i) for i in range(3)]
    arrivals = [{0: steady}, {4: long[:1], 12: long[1:2], 20: long[2:]}]
    proposer = proposer_for(speculative_config({"method": "ngram", "num_speculative_tokens": 3}))
    lives = Lives(
        arrivals,
        depth=2,
        prefill_buckets=CAPTURED,
        proposer=proposer,
        speculation=Speculation(4, mixed_percent=percent),
    )
    assert outcome(lives.finished) == alone([*steady, *long])
    assert lives.rows[0] == lives.rows[1]
    assert set(lives.rows[0]) & set(CAPTURED)
    first = lives.counters[0]
    assert (first["chained_steps"], first["chain_breaks{start}"]) == (first["steps"] - 1, 1)
    assert first["spec_num_drafts"] > 0
    assert not [name for name in first if name.startswith("speculation_off")], "every step of its only row is a window"
    for counters in lives.counters:
        assert counters["graph_captures_after_warmup"] == 0
        assert not [name for name in counters if name.startswith("fallbacks")]


@pytest.mark.parametrize("tokens", [long(3), 20])
def test_more_rows_than_a_captured_step_holds_decode_while_another_group_prefills(tokens: int) -> None:
    """Prompts are launched kernel by kernel then, and nothing is captured late for the decode graphs beside them."""
    steady = [request(i, range(5 + i, 9 + i), max_tokens=30, stops=()) for i in range(8)]
    brief = [request(20 + i, range(i, i + tokens), max_tokens=3, stops=()) for i in range(3)]
    captured: dict[str, Any] = {"prefill_buckets": (2, 4), "max_prefill_tokens": 8, "mixed": None}
    lives = Lives([{0: steady}, {14: brief}], depth=2, **captured)
    assert outcome(lives.finished) == alone([*steady, *brief])
    assert lives.rows[0] == lives.rows[1]
    assert [counters["graph_captures_after_warmup"] for counters in lives.counters] == [0, 0]
    assert lives.counters[1]["fallbacks{eager_prefill_beyond_buckets}"] > 0


def test_windows_beside_as_many_tokens_of_a_chunk_as_there_may_be_fit_in_an_exchange() -> None:
    """Launched kernel by kernel: four rows of four tokens beside 64, while the other group has no work."""
    steady = [request(i, (5 + i, 6, 7, 5, 6, 7, 5), max_tokens=24, stops=()) for i in range(4)]
    long = [request(10, range(100), max_tokens=3, stops=())]
    proposer = proposer_for(speculative_config({"method": "ngram", "num_speculative_tokens": 3}))
    policy = Speculation(4, mixed_percent=100)
    lives = Lives([{0: steady, 3: long}, {}], depth=2, proposer=proposer, speculation=policy)
    assert outcome(lives.finished) == alone([*steady, *long])
    assert max(lives.rows[0]) == 64 + 8 * 4


def test_chunks_of_all_groups_come_in_the_same_steps() -> None:
    """While few prompt tokens wait. Nobody's tokens change, and fewer exchanges are as wide as a step with chunks."""
    steady = [request(i, range(5 + i, 9 + i), max_tokens=60, stops=()) for i in range(4)]
    brief = [request(20 + i, range(i, i + 9), max_tokens=3, stops=(), seed=i) for i in range(12)]
    arrivals = [{0: steady[:2]} | {6 + 5 * i: [brief[i]] for i in range(6)}]
    arrivals += [{0: steady[2:]} | {7 + 5 * i: [brief[6 + i]] for i in range(6)}]
    wide = []
    for stride in (1, 4):
        lives = Lives(arrivals, depth=2, prefill_buckets=CAPTURED, mixed=replace(MIXED, stride=stride))
        assert outcome(lives.finished) == alone([*steady, *brief])
        assert lives.rows[0] == lives.rows[1]
        wide.append(sum(rows in CAPTURED for rows in lives.rows[0]))
    assert wide[0] - wide[1] >= 2 * 4, f"of each of two layers: {wide}"


@pytest.mark.parametrize(
    ("chunks", "seed"),
    [long("launched", 0), ("captured", 1), long("in turns", 2), long("in turns", 3)],
    indirect=["chunks"],
)
def test_random_arrivals(seed: int, chunks: RigLimits) -> None:
    draw = random.Random(seed)
    requests = mixture(40 + seed, count=9)
    arrivals: list[dict[int, list[Request]]] = [{}, {}]
    for one in requests:
        arrivals[draw.randrange(2)].setdefault(draw.randrange(40), []).append(one)
    depth, blocks, rows = draw.choice((0, 1, 3)), draw.choice((40, 200)), draw.choice((2, 4, 8))
    limits = within(chunks, depth=depth, blocks=blocks, rows=rows, buckets=tuple(n for n in BUCKETS if n <= rows))
    if limits.get("prefill_buckets") == CAPTURED:
        limits["prefill_buckets"] = (*CAPTURED[:-1], 64 + rows)
    lives = Lives(arrivals, **limits)
    assert outcome(lives.finished) == alone(requests)
    assert lives.rows[0] == lives.rows[1]


# -- what is agreed -------------------------------------------------------------------------------------------------


class Others:
    """An agreement with groups whose numbers are known ahead."""

    def __init__(self, *others: tuple[int, ...]) -> None:
        self.others = others

    def agree_max(self, step: int, numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(max, zip(numbers, *self.others, strict=True)))


IDLE = (0,) * (4 + len(fields(SamplingVariant)))


def joined(
    plan: StepPlan | None,
    *others: tuple[int, ...],
    variant: SamplingVariant = GREEDY,
    buckets: tuple[int, ...] = BUCKETS,
    captured: tuple[int, ...] = (),
) -> LaunchSpec | None:
    """How a group with ``plan`` launches step 7 beside groups with such numbers."""
    ladders = BucketSizes(buckets, captured, exchange=exchange_buckets(buckets, 64))
    resolver = LaunchResolver(ladders, 9, (Serves("decode"), Serves("prefill", "mixed")))
    agreed = DpStepSync(Others(IDLE, *others)).join(7, replace(resolver.needs(plan), variant=variant))
    if agreed is None:
        return None
    return resolver.resolve(plan or StepPlan(7, StepKind.DECODE, (), (), 1), agreed)


@dataclass(frozen=True)
class Serves:
    """A role that is asked nothing but what it serves."""

    name: str
    other: str = ""

    def serves(self, plan: StepPlan, kind: StepKind) -> bool:
        return kind.name.lower() in (self.name, self.other)


def decode(rows: int) -> StepPlan:
    return StepPlan(7, StepKind.DECODE, tuple(range(1, rows + 1)), (0,) * rows, 1)


def test_nobody_launches_where_nobody_has_work() -> None:
    assert joined(None) is None


@pytest.mark.parametrize(("rooms", "least"), [((512, 2048), 512), ((NO_BOUND, 300), 300), ((NO_BOUND,), NO_BOUND)])
def test_the_room_that_is_agreed_on_is_the_least_of_all(rooms: tuple[int, ...], least: int) -> None:
    ours, *others = rooms
    sync = DpStepSync(Others(*((*IDLE[:-2], NO_BOUND - room, 0) for room in (NO_BOUND, *others))))
    sync.join(7, LaunchNeeds(), ours)
    assert sync.room == least


def test_every_group_replays_the_widest_bucket_and_variant() -> None:
    curious = (4, 0, 1, 0, 1, 0, 1, 5, 1, 1, 1, 1, 0, 1)
    spec = joined(decode(2), curious, variant=SamplingVariant(filters=True))
    assert spec is not None
    assert (spec.shape.rows, spec.plan.slots, spec.shape.exchange) == (4, (1, 2), 4)
    assert spec.shape.variant == SamplingVariant(True, True, True, False, True, 5, True, True, True, True)
    idle = joined(None, curious)
    assert idle is not None
    assert (idle.kind, idle.role, idle.shape.rows, idle.plan.slots) == (StepKind.DECODE, "decode", 4, ())
    assert idle.shape.exchange == 4


def test_a_window_in_one_group_widens_every_exchange() -> None:
    """Four rows of three tokens there, two rows of one here, which a graph of the same rows and exchanges serves."""
    spec = joined(decode(2), (4, *IDLE[1:-1], 3))
    assert spec is not None
    assert (spec.shape.rows, spec.shape.width, spec.shape.exchange) == (4, 1, 12)
    assert (spec.shared_bucket, spec.shared_width) == (4, 3)
    beside_a_prefill = joined(decode(2), (4, 5, *IDLE[2:-1], 3))
    assert beside_a_prefill is not None
    assert beside_a_prefill.shape.exchange == 16


@pytest.mark.parametrize(("tokens", "rows"), [(1, 4), (4, 4), (5, 16), (17, 64), (64, 64)])
def test_a_prefill_widens_the_exchange_by_rungs(tokens: int, rows: int) -> None:
    """Of 4, 16 and 64: the ladder of 64 tokens."""
    spec = joined(decode(2), (0, tokens, *IDLE[2:]))
    assert spec is not None
    assert (spec.shape.rows, spec.shape.exchange, spec.shared_bucket) == (2, rows, 2)
    chunk = Chunk(3, 0, (1,) * tokens, True)
    mine = StepPlan(7, StepKind.PREFILL, (3,), (0,), 1, chunks=(chunk,))
    alone_in_it = joined(mine)
    assert alone_in_it is not None
    assert (alone_in_it.shape.rows, alone_in_it.shape.exchange, alone_in_it.shared_bucket) == (1, rows, 1)
    beside_a_wide_decode = joined(mine, (8, *IDLE[1:]))
    assert beside_a_wide_decode is not None
    assert beside_a_wide_decode.shape.exchange == max(rows, 16)


@pytest.mark.parametrize(("tokens", "padded"), [(1, 16), (16, 16), (17, 40), (72, 72)])
def test_every_group_replays_a_captured_step_with_chunks(tokens: int, padded: int) -> None:
    """Padded to the same tokens: one that decodes, one without work, and the one that asked for it."""
    others = (0, tokens, *IDLE[2:])
    beside, idle = joined(decode(3), others, captured=CAPTURED), joined(None, others, captured=CAPTURED)
    chunk = Chunk(3, 0, (1,) * tokens, True)
    mine = joined(StepPlan(7, StepKind.PREFILL, (3,), (0,), 1, chunks=(chunk,)), (4, *IDLE[1:]), captured=CAPTURED)
    for spec, slots, bucket in ((beside, (1, 2, 3), 4), (idle, (), 1), (mine, (3,), 1)):
        assert spec is not None
        assert (spec.role, spec.plan.slots, spec.shape.rows) == ("prefill", slots, bucket)
        assert (spec.captured, spec.shape.exchange, spec.shared_bucket) == (padded, padded, 0)


def test_a_plan_is_launched_as_it_was_digested() -> None:
    """What groups agree on says how it is launched, here as a step with chunks, and changes nothing in it."""
    plans = (decode(3), decode(3)._replace(width=3), StepPlan(7, StepKind.DECODE, (), (), 1))
    for plan in plans:
        spec = joined(plan, (0, 5, *IDLE[2:]), captured=CAPTURED)
        assert spec is not None
        assert spec.plan is plan
        assert (plan.kind, spec.kind, spec.role, spec.shape.label) == (
            StepKind.DECODE,
            StepKind.MIXED,
            "prefill",
            "mixed",
        )


def test_a_captured_step_holds_the_rows_of_groups_that_decode() -> None:
    """Five rows in a decode bucket of eight, beside a group with a chunk of fewer tokens."""
    spec = joined(decode(5), (0, 1, *IDLE[2:]), buckets=(8, 16), captured=(4, 8, 16))
    assert spec is not None
    assert spec.captured == 8


def test_a_tree_is_brought_whole() -> None:
    """Two rows of trees of seven tokens, of which three may be gained; the other group decodes three rows."""
    resolver = LaunchResolver(BucketSizes(BUCKETS, exchange=(64,)), 9, (Serves("decode"),))
    sync = DpStepSync(Others(IDLE, (3, *IDLE[1:-1], 1)))
    plan = decode(2)._replace(width=3, tree=7)
    agreed = sync.join(7, resolver.needs(plan))
    assert agreed is not None
    spec = resolver.resolve(plan, agreed)
    assert (spec.shape.rows, spec.shape.width, spec.shape.exchange, spec.shared_width) == (3, 3, 21, 7)


def test_a_captured_step_has_room_for_the_windows_of_groups_that_decode() -> None:
    """Ten tokens of a prompt here, rows of three tokens in both groups: as windows of a step with chunks."""
    for rows, others, padded in (
        (2, (0, 10, *IDLE[2:]), 16),
        (8, (0, 10, *IDLE[2:]), 40),
        (2, (8, 10, *IDLE[1:-2], 4), 40),
    ):
        spec = joined(decode(rows)._replace(width=3), others, captured=CAPTURED)
        assert spec is not None
        assert (spec.role, spec.kind, spec.shape.width, spec.captured) == ("prefill", StepKind.MIXED, 3, padded)
        assert (spec.shape.proposing, spec.shape.exchange, spec.shared_bucket) == (rows, padded, 0)


def test_a_step_that_is_not_captured_for_all_groups_is_for_none() -> None:
    """Three tokens of a prompt here and eight rows there, where the largest captured step has four tokens."""
    chunk = Chunk(3, 0, (1,) * 3, True)
    mine = joined(StepPlan(7, StepKind.PREFILL, (3,), (0,), 1, chunks=(chunk,)), (8, *IDLE[1:]), captured=(2, 4))
    theirs = joined(decode(8), (0, 3, *IDLE[2:]), captured=(2, 4))
    for spec, role in ((mine, "prefill"), (theirs, "decode")):
        assert spec is not None
        assert (spec.role, spec.captured, spec.shape.exchange, spec.shared_bucket) == (role, 0, 16, 8)


def test_a_scored_prompt_is_launched_with_the_exchange_that_the_others_replay() -> None:
    chunk = Chunk(3, 0, (1,) * 20, True, scored=Scored(1, (1,) * 19, 0))
    spec = joined(StepPlan(7, StepKind.PREFILL, (3,), (0,), 1, chunks=(chunk,)), (4, *IDLE[1:]), captured=CAPTURED)
    assert spec is not None
    assert (spec.shape.rows, spec.captured, spec.shape.exchange, spec.shared_bucket) == (1, 0, 40, 0)


def test_an_exchange_is_never_narrower_than_an_idle_group_s_graph() -> None:
    """Two tokens of prefill, nobody decodes, and the smallest graph has eight rows."""
    idle = joined(None, (0, 2, *IDLE[2:]), buckets=(8,))
    assert idle is not None
    assert (idle.shape.rows, idle.shape.exchange, idle.shared_bucket) == (8, 16, 8)

"""The scheduler fuzzer: random traces against depth 0, against width 1, and against every request completed alone.

python -m tests.runtime.schedule.fuzz --seeds 50000        the long form, on every core
python -m tests.runtime.schedule.fuzz --seed 4711          replay one seed and print its trace
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

from runtime.schedule.budget import NO_BOUND
from runtime.schedule.config import MixedSteps, SchedulerConfig, SnapshotPolicy
from runtime.schedule.plan import Admit, Cancel, Compile, Event, Finished, Pause, ResetPrefixCache, Resume, Tabled
from runtime.schedule.request import FinishReason, Request, SamplingParams
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.slots import AccountingError
from runtime.schedule.speculation import Speculation
from tests.runtime.schedule.configs import config_with
from tests.runtime.schedule.fake_device import VOCABULARY, FakeDevice, complete_alone, snapshots_of, spoil_free_pages
from tests.runtime.schedule.mixed_rules import MixedRules

MOST_STEPS = 4000  # a trace that runs longer hangs
MOST_ANSWERS = 6  # to one prompt
LEAST_VOID = 8  # steps without work behind the last one: more than may be in flight, so that every fence opens
WIDTHS = ((1,), (1,), (2,), (8,), (1, 4), (1, 8, 3), (32, 1))

Build = Callable[[SchedulerConfig], Scheduler]


class WrongTokens(AssertionError):
    """A request got, or was shown, other tokens than it gets alone; or ended for another reason."""


class TooManyRows(AssertionError):
    """A step is wider than memory was sized for."""


class StillFound(AssertionError):
    """Blocks over which a request's logits broke, or that are older than a reset, can be found by their contents."""


class Outdated:
    """Blocks that were written before the latest reset of the prefix cache, and not taken since: none may be found."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._pool = pool = scheduler.pool
        self._blocks: set[int] = set()
        self._entered = -1
        take = pool.take

        def taking(wanted: int) -> list[int]:
            taken = take(wanted)
            self._blocks.difference_update(taken)
            return taken

        pool.take = taking  # type: ignore[method-assign]

    def reset(self) -> None:
        """Called before the event is submitted."""
        self._blocks, self._entered = {*range(1, self._pool.count + 1)} - {*self._pool._free}, -1

    def check(self) -> None:
        if self._pool.entered == self._entered:
            return
        self._entered = self._pool.entered
        if found := [block for block in self._blocks if self._pool.findable(block)]:
            raise StillFound(f"blocks {found} are older than a reset of the prefix cache, and can be found")


class Hang(AssertionError):
    """A trace, or one of its requests, never came to an end."""


@dataclass(frozen=True)
class Trace:
    """A seed's whole story: the limits, and the events by the step they take effect in. ``breaks_at``: requests whose
    logits break, with the number of tokens after which they do. ``barren``: steps may give a live row no token.
    ``poisons``: requests that leave NaN in the cache, once, with the position: they, and nobody else, may break of it.
    ``rooms``: what other groups' rows leave of a step, in turn.
    """

    config: SchedulerConfig
    events: dict[int, tuple[Event, ...]]
    breaks_at: dict[int, int] = field(default_factory=dict)
    barren: bool = False
    poisons: dict[int, int] = field(default_factory=dict)
    rooms: tuple[int, ...] = (NO_BOUND,)

    @property
    def cancelled(self) -> set[int]:
        return {e.request_id for events in self.events.values() for e in events if isinstance(e, Cancel)}


def make_trace(seed: int) -> Trace:
    """Everything a trace holds is drawn here, from ``seed`` alone."""
    draw = random.Random(seed)
    rows = draw.choice((1, 2, 3, 4, 6))
    block_size = draw.choice((2, 3, 4))
    widths = draw.choice(WIDTHS)
    for_drafts = max(widths) // block_size * draw.choice((1, 1, 2, 4))  # else wide rows are refused, or never meet
    config = config_with(
        rows=rows,
        slots=rows + draw.choice((0, 1, rows)),
        blocks=draw.choice((8, 10, 14, 20, 40)) + for_drafts,
        block_size=block_size,
        max_model_len=draw.choice((16, 24, 48)),
        depth=draw.randrange(5),
        widths=widths,
        max_prefill_tokens=draw.choice((1, 3, 8, 64)),
        prefill_burst=draw.choice((1, 2, 4)),
        prefix_caching=draw.random() < 0.7,
        max_waiting=draw.choice((3, 1000)),
    )
    salts = ("", "a", "b") if seed % 10 == 7 else ("",)
    stems = [tuple(draw.randrange(VOCABULARY) for _ in range(draw.randrange(2, 14))) for _ in range(2)]
    events: dict[int, list[Event]] = {}
    for request_id in range(draw.randrange(3, 11)):
        prompt = draw.choice(stems)[: draw.randrange(1, 14)] if draw.random() < 0.6 else ()
        prompt += tuple(draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 5)))
        stops = tuple(draw.sample(range(VOCABULARY), draw.choice((0, 1, 3))))
        request = Request(
            request_id,
            prompt,
            SamplingParams(max_tokens=draw.choice((1, 2, 5, 9, 20)), cache_salt=salts[request_id % len(salts)]),
            stops,
            priority=draw.choice((0, 0, 0, 1)),
        )
        at = draw.choice((0, draw.randrange(60)))
        events.setdefault(at, []).append(Admit(request))
        if draw.random() < 0.25:
            events.setdefault(at + draw.randrange(25), []).append(Cancel(request_id))
        if draw.random() < 0.15:
            pause = at + draw.randrange(12)
            events.setdefault(pause, []).append(Pause(request_id))
            events.setdefault(pause + draw.randrange(1, 15), []).append(Resume(request_id))
    breaks_at = {}  # drawn last: what was drawn before them is what the same seed always gave
    for admit in [e for listed in events.values() for e in listed if isinstance(e, Admit)]:
        if draw.random() < 0.25:
            breaks_at[admit.request.request_id] = len(admit.request.prompt_token_ids) + draw.randrange(9)
    barren = draw.random() < 0.3
    if draw.random() < 0.4:
        most = draw.choice((config.limits.max_prefill_tokens, 5))  # so that prompts are in pieces
        config = config_with(config, mixed=_draw_mixed(draw, config), max_prefill_tokens=most)
        _add_prompts(draw, events)
        _score_some(draw, events)
    poisons = {}
    for admit in [e for listed in events.values() for e in listed if isinstance(e, Admit)]:
        if draw.random() < 0.3 and admit.request.request_id not in breaks_at:
            poisons[admit.request.request_id] = draw.randrange(len(admit.request.prompt_token_ids))
    if draw.random() < 0.4:
        events = _together(events, draw)
    if draw.random() < 0.15:
        config = config_with(config, block_size=draw.choice((8, 16)))  # large enough that rows look early for a block
    if draw.random() < 0.4:
        events, breaks_at, poisons = _with_answers(events, breaks_at, poisons, draw)
    if max(widths) > 1 and draw.random() < 0.5:
        policy = draw_policy(draw, max(widths))
        percent = (0, 100, 40)[seed % 3]  # other draws are what the same seed always gave
        config = replace(config, speculation=replace(policy, mixed_percent=percent))
        if seed % 4 == 1:  # windows are trees, of a few tokens more
            config = config_with(config, tree=min(max(widths) + 3, 33), blocks=config.blocks + 4)
    if seed % 3 == 1:  # a model with recurrent state; other seeds give what they always gave
        config = replace(config, snapshots=draw_snapshots(draw))
    if seed % 5 > 2 and config.mixed is not None and max(widths) > 3:  # windows of several widths beside chunks
        config = config_with(replace(config, speculation=draw_several(draw, max(widths))), tree=0)
    if seed % 7 == 3:
        events = {at: [_constrained(event, seed // 7) for event in listed] for at, listed in events.items()}
        asked = [event.request for listed in events.values() for event in listed if isinstance(event, Admit)]
        for request in draw.sample(asked, draw.randrange(len(asked) + 1) if seed // 7 % 2 else 0):
            events.setdefault(draw.randrange(60), []).append(Tabled(request.table_key, b""))
    for at in draw.sample(range(60), draw.choice((0, 0, 1, 4))):
        events.setdefault(at, []).append(ResetPrefixCache())
    rooms = tuple(draw.choice((NO_BOUND, NO_BOUND, 1, 3, 7, 20)) for _ in range(draw.choice((1, 5))))
    return Trace(config, {step: tuple(listed) for step, listed in events.items()}, breaks_at, barren, poisons, rooms)


def _constrained(event: Event, which: int) -> Event:
    """With a grammar: every request, or every second or third."""
    if not isinstance(event, Admit) or event.request.request_id % (1 + which % 3):
        return event
    sampling = replace(event.request.sampling, grammar="start: /.*/")
    return Admit(replace(event.request, sampling=sampling))


def with_windows(config: SchedulerConfig, seed: int) -> SchedulerConfig:
    """The same for a model with one or two groups of layers that see a window, in pools from just enough to plenty."""
    draw, limits = random.Random(seed), config.limits
    sizes = draw.sample((1, 2, 3, 5, 7, 12, 40), draw.choice((1, 1, 2)))
    counts = [limits.window_blocks(window) * draw.choice((1, 1, 2, 4)) + draw.randrange(4) for window in sizes]
    return replace(config, windows=tuple(zip(sizes, counts, strict=True)))


def draw_snapshots(draw: random.Random) -> SnapshotPolicy:
    """From one snapshot for everybody to one for each, wherever they are left."""
    return SnapshotPolicy(
        draw.choice((1, 2, 3, 8)), interval=draw.choice((0, 1, 2, 3)), worth=draw.choice((1, 1, 3, 6))
    )


def draw_policy(draw: random.Random, width: int) -> Speculation:
    """Windows in every step, up to some rows, or where they pay, of one width or two: of the fake device's rounds half
    the width is kept."""
    costs = tuple((rows, draw.randrange(500 * width, 700 * width)) for rows in (1, 2, 4))
    half = tuple((rows, cost // 2 + cost % 100) for rows, cost in costs)
    of_two = Speculation(width, None, costs, narrower=((width // 2, half),)) if width > 3 and costs[0][1] % 2 else None
    where_they_pay = of_two or Speculation(width, None, costs)
    return draw.choice((Speculation(width), Speculation(width, draw.randrange(5)), where_they_pay))


def draw_several(draw: random.Random, width: int) -> Speculation:
    """Windows of up to four widths where they pay, which they do as often as not, and of half of a step's tokens or all
    beside chunks."""
    widths = [width, *sorted(draw.sample(range(2, width), draw.choice((1, 2, min(3, width - 2)))), reverse=True)]
    tables = [tuple((rows, draw.randrange(300 * w, 600 * w)) for rows in (1, 3)) for w in widths]
    narrower = tuple(zip(widths[1:], tables[1:], strict=True))
    return Speculation(width, None, tables[0], draw.choice((50, 100)), narrower)


def _with_answers(
    events: dict[int, list[Event]], breaks_at: dict[int, int], poisons: dict[int, int], draw: random.Random
) -> tuple[dict[int, list[Event]], dict[int, int], dict[int, int]]:
    """The same with up to six answers to each prompt. What befalls a request befalls one; some are cancelled."""
    answers = {
        event.request.request_id: draw.choice((1, 2, 3, 6))
        for listed in events.values()
        for event in listed
        if isinstance(event, Admit)
    }

    chosen = {
        request_id: MOST_ANSWERS * request_id + draw.choice((0, draw.randrange(n))) for request_id, n in answers.items()
    }

    changed: dict[int, list[Event]] = {}
    for at, listed in sorted(events.items()):
        for event in listed:
            if isinstance(event, Admit):
                request = event.request
                sampling = replace(request.sampling, n=answers[request.request_id])
                request = replace(request, request_id=MOST_ANSWERS * request.request_id, sampling=sampling)
                changed.setdefault(at, []).append(Admit(request))
                for answer_id in request.answer_ids[draw.randrange(2) :] if draw.random() < 0.25 else ():
                    cancel = Cancel(answer_id)
                    changed.setdefault(at + draw.randrange(12), []).append(cancel)
            elif not isinstance(event, ResetPrefixCache | Tabled | Compile):
                changed.setdefault(at, []).append(replace(event, request_id=chosen[event.request_id]))
    broken = {chosen[request_id]: tokens for request_id, tokens in breaks_at.items()}
    return changed, broken, {chosen[request_id]: position for request_id, position in poisons.items()}


def _together(events: dict[int, list[Event]], draw: random.Random) -> dict[int, list[Event]]:
    """The same requests, with prompts of the same lengths, but all of them arrive at once and most begin alike."""
    stem = [draw.randrange(VOCABULARY) for _ in range(20)]
    moved: dict[int, list[Event]] = {0: []}
    for at, listed in sorted(events.items()):
        for event in listed:
            if isinstance(event, Admit):
                own = event.request.prompt_token_ids
                alike = draw.choice((0, len(own) - 1, len(own) - 1, draw.randrange(len(own))))
                prompt = (*stem[:alike], *own[alike:])
                moved[0].append(Admit(replace(event.request, prompt_token_ids=prompt)))
            else:
                moved.setdefault(at, []).append(event)
    return moved


def _draw_mixed(draw: random.Random, config: SchedulerConfig) -> MixedSteps:
    """Any table there is, good or bad: buckets for all totals, for a few, or none; budgets below the decode rows."""
    decoding = config.limits.rows * config.limits.width
    most = decoding + draw.choice((1, 4, 16))
    buckets: tuple[int, ...] = ()
    if draw.random() < 0.7:
        buckets = tuple(sorted({most, *draw.sample(range(1, most + 1), draw.randrange(most))}))
    limits = [(rows, kv_tokens) for rows in range(config.limits.rows + 1) for kv_tokens in (0, 5, 12, 30, 100)]
    some = sorted(draw.sample(limits, draw.choice((0, 1, 6, len(limits)))))
    budgets = tuple((rows, kv_tokens, draw.randrange(most + 8)) for rows, kv_tokens in some)
    calm = tuple((rows, draw.randrange(most)) for rows in sorted(draw.sample(range(8), draw.choice((0, 1, 4)))))
    steps = draw.choice((1, 3, 6))
    tile, wave = draw.choice(((0, 0), (1, 3), (2, 2)))
    return MixedSteps(
        buckets,
        budgets,
        calm,
        steps,
        long_prompt=draw.choice((3, 8, 100)),
        costly_prefix=draw.choice((0, 0, 6)),
        tile=tile,
        wave=wave,
        stride=(1, 2, 1, 3)[(most + steps) % 4],
    )


def _add_prompts(draw: random.Random, events: dict[int, list[Event]]) -> None:
    """More of them, which come while others decode."""
    for request_id in range(20, 20 + draw.randrange(7)):
        prompt = tuple(draw.randrange(VOCABULARY) for _ in range(draw.choice((2, 6, 20))))
        request = Request(request_id, prompt, SamplingParams(max_tokens=draw.choice((1, 4, 9))))
        events.setdefault(draw.randrange(50), []).append(Admit(request))


def _score_some(draw: random.Random, events: dict[int, list[Event]]) -> None:
    likely = draw.choice((0.0, 0.2, 0.6))
    for listed in events.values():
        for i, event in enumerate(listed):
            if isinstance(event, Admit) and draw.random() < likely:
                sampling = replace(event.request.sampling, prompt_logprobs=0)
                listed[i] = Admit(replace(event.request, sampling=sampling))


@dataclass
class Run:
    """What a trace came to: how each request ended, how many tokens each of its steps gave, how long it took.

    ``recomputed``: how often a request gave up its blocks, for want of memory or because they were not to be trusted.
    """

    finished: dict[int, Finished]
    accepted: dict[int, list[int]]
    steps: int
    digest: int
    recomputed: int


def run(trace: Trace, build: Build = Scheduler, *, check: bool = True) -> Run:
    """Drive one trace to its end and ``LEAST_VOID`` steps more; with ``check``, every block and slot is accounted for
    after whatever may have moved one. Raises AccountingError, WrongTokens, Hang, or whatever else the scheduler breaks.
    """
    config = trace.config
    scheduler = build(config)
    limits = config.limits
    device = FakeDevice(
        config.blocks,
        limits.block_size,
        limits.slots,
        limits.max_blocks,
        barren=trace.barren,
        snapshots=snapshots_of(config),
        windows=config.windows,
    )
    spoil_free_pages(scheduler, device)
    device.breaks_at, device.poisons = trace.breaks_at, dict(trace.poisons)
    in_flight: deque[int] = deque()
    finished: dict[int, Finished] = {}
    shown: dict[int, list[int]] = {}
    last_event = max(trace.events)
    outdated = Outdated(scheduler)
    rules = MixedRules(scheduler) if check and config.mixed is not None else None

    def end(ended: tuple[Finished, ...]) -> None:
        for item in ended:
            if item.request_id in finished:
                raise AssertionError(f"request {item.request_id} ended twice")
            finished[item.request_id] = item
            if list(item.token_ids) != shown.get(item.request_id, []):
                raise WrongTokens(f"request {item.request_id} was shown {shown.get(item.request_id)}, ended {item}")

    def land() -> None:
        output = scheduler.land(in_flight.popleft(), device.land(scheduler.slots.epochs))
        found = [b for b in device.broken_blocks.get(output.step, ()) if scheduler.pool.findable(b)]
        if found:
            raise StillFound(f"blocks {found} were under a row that broke in step {output.step}, and can be found")
        for row, (request_id, count) in enumerate(zip(output.request_ids, output.counts, strict=True)):
            if count and request_id >= 0:
                if request_id in finished:
                    raise WrongTokens(f"request {request_id} was shown tokens of step {output.step} after its end")
                begin = row * output.width
                shown.setdefault(request_id, []).extend(output.tokens[begin : begin + count])
        end(output.finished)

    while scheduler.unfinished or in_flight or scheduler.step <= last_event:
        for event in trace.events.get(scheduler.step, ()):
            if isinstance(event, ResetPrefixCache):
                outdated.reset()
            end(scheduler.submit(event))
            if check:
                scheduler.check()
        if rules is not None:
            rules.before()
        plan = scheduler.plan()
        if rules is not None:
            rules.after(plan)
        outdated.check()
        scheduler.agreed_room(trace.rooms[scheduler.step % len(trace.rooms)])
        if plan is not None and len(plan.slots) > config.limits.rows:
            raise TooManyRows(f"step {plan.step} has {len(plan.slots)} rows, there is room for {config.limits.rows}")
        device.launch(plan)
        in_flight.append(scheduler.step - 1)
        if check and plan is not None:
            scheduler.check()
        if len(in_flight) > config.limits.depth:
            land()
            outdated.check()
            if check:
                scheduler.check()
        if (
            scheduler.step > last_event + LEAST_VOID
            and plan is None
            and not scheduler.chain.real
            and not scheduler.unfinished
        ):
            break
        if scheduler.step > MOST_STEPS:
            raise Hang(f"no end after {MOST_STEPS} steps: {scheduler.unfinished} requests unfinished")
    while in_flight:
        land()
    if check:
        scheduler.check()
        counted = Counter({reason: n for reason, n in scheduler.counters.finished.items() if n})
        if counted != Counter(ended.reason.label for ended in finished.values()):
            raise AccountingError(f"finishes are counted as {counted}")
        if scheduler.pool.free_count != config.blocks or scheduler.slots.free_count != config.limits.slots:
            raise AccountingError("everything has ended, but not every block and slot is free")
        if any(pool.free_count != pool.count or pool.room != pool.count for pool in scheduler.ledger.windows):
            raise AccountingError("everything has ended, but not every page of a window is free")
    recomputed = scheduler.counters.evictions + scheduler.counters.distrusted
    return Run(finished, device.accepted, scheduler.step, scheduler.digest.value, recomputed)


def check_seed(seed: int, build: Build = Scheduler, *, check: bool = True) -> int:
    """Raise where the trace of ``seed`` breaks a promise; returns the steps it ran. One in four has windows."""
    trace = make_trace(seed)
    if seed % 4 == 3:
        trace = replace(trace, config=with_windows(trace.config, seed))
    return check_trace(trace, build, check=check)


def check_trace(trace: Trace, build: Build = Scheduler, *, check: bool = True) -> int:
    """The same of any trace. The oracles are depth 0 and, for other widths, width 1 at this depth."""
    config = trace.config
    deep = run(trace, build, check=check)
    serial = (
        run(replace(trace, config=config_with(config, depth=0)), build, check=False) if config.limits.depth else deep
    )
    oracles = {"depth 0": serial}
    if config.limits.width > 1:
        plain = replace(trace, config=config_with(replace(config, speculation=None), widths=(1,)))
        oracles["width 1"] = run(plain, build, check=False)
    requests = {
        answer.request_id: answer
        for events in trace.events.values()
        for e in events
        if isinstance(e, Admit)
        for answer in e.request.answers()
    }
    tabled = {e.key for events in trace.events.values() for e in events if isinstance(e, Tabled)}
    for request_id, request in requests.items():
        ends = {name: run.finished.get(request_id) for name, run in {"this": deep, **oracles}.items()}
        _compare(trace, request, ends)
        recomputed = deep.recomputed or oracles["depth 0"].recomputed
        # From its table on a row with a grammar has draft tokens, and more of its tokens come before that at depth 0.
        apart = request_id in trace.cancelled or request_id in trace.poisons or request.table_key in tabled
        undisturbed = not recomputed and not apart
        fixed = len(set(config.widths)) == 1 and config.speculation is None
        if undisturbed and fixed and _ran(ends["this"]) and _ran(ends["depth 0"]):
            gains, expected = (r.accepted.get(request_id, []) for r in (deep, oracles["depth 0"]))
            if gains != expected:
                raise AssertionError(f"request {request_id} gained {gains} tokens a step, at depth 0 {expected}")
    return sum({id(run): run.steps for run in (deep, *oracles.values())}.values())


def _ran(ended: Finished | None) -> bool:
    return ended is not None and ended.reason != FinishReason.REJECTED


def _compare(trace: Trace, request: Request, ends: dict[str, Finished | None]) -> None:
    """``ends``: how it ended in each run. Where it was neither refused nor cancelled it ended as it does alone."""
    max_length = min(len(request.prompt_token_ids) + request.sampling.max_tokens, trace.config.limits.max_model_len)
    alone, reason = complete_alone(
        request.request_id,
        tuple(request.prompt_token_ids),
        request.stop_token_ids,
        max_length,
        trace.breaks_at.get(request.request_id),
    )
    for name, ended in ends.items():
        if ended is None:
            raise Hang(f"request {request.request_id} never ended: {ends}")
        if ended.reason == FinishReason.REJECTED:
            if ended.token_ids:
                raise WrongTokens(f"request {request.request_id} was rejected and has tokens: {ended}")
        elif ended.reason == FinishReason.CANCELLED or (
            ended.reason == FinishReason.ERROR and request.request_id in trace.poisons
        ):
            if ended.token_ids != alone[: len(ended.token_ids)]:
                raise WrongTokens(f"request {request.request_id} in {name}: {ended.token_ids}, alone {alone}")
        elif (ended.token_ids, ended.reason) != (alone, reason):
            raise WrongTokens(f"request {request.request_id} in {name}: {ended}, alone {alone} {reason.name}")


def check_range(first: int, count: int) -> tuple[int, str]:
    """Steps run, and the first failing seed's message ('' where none failed)."""
    steps = 0
    for seed in range(first, first + count):
        try:
            steps += check_seed(seed)
        except Exception as error:
            return (
                steps,
                f"seed {seed}: {type(error).__name__}: {error} "
                f"(replay: python -m tests.runtime.schedule.fuzz --seed {seed})",
            )
    return steps, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="replay this one")
    options = parser.parse_args()
    if options.seed is not None:
        trace = make_trace(options.seed)
        print(
            trace.config,
            *sorted(trace.events.items()),
            f"breaks at: {trace.breaks_at}, barren: {trace.barren}, poisons: {trace.poisons}",
            sep="\n",
        )
        print(check_seed(options.seed), "steps, no difference")
        return
    chunk, started, steps = 500, time.monotonic(), 0
    with ProcessPoolExecutor() as pool:
        starts = range(options.first, options.first + options.seeds, chunk)
        sizes = [min(chunk, options.first + options.seeds - start) for start in starts]
        for done, (ran, failure) in enumerate(pool.map(check_range, starts, sizes), 1):
            steps += ran
            if failure:
                raise SystemExit(failure)
            if done % 20 == 0 or done == len(sizes):
                seconds = time.monotonic() - started
                print(f"{done * chunk} seeds, {steps} steps, {steps / seconds:.0f} steps/s", flush=True)


if __name__ == "__main__":
    main()

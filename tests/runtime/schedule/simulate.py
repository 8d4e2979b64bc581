"""What a schedule gives on a device whose step times are known: the real scheduler over a clock that is computed.

python -m tests.runtime.schedule.simulate                 the loads and step costs of Qwen3-8B on one H200
python -m tests.runtime.schedule.simulate --model 0.6b    those of Qwen3-0.6B
python -m tests.runtime.schedule.simulate --separate      prefill and decode in steps of their own
python -m tests.runtime.schedule.simulate --drain-steps 2 --calm 1.75      with other rules for how long a chunk is
python -m tests.runtime.schedule.simulate --rates 0.75 0.5 0.33 --mixed-percent 25     with windows of 4 tokens
    ... --fewer 1                                         and of 2, where they pay more

Knows: step times as a function of a plan's tokens, and how the engine's loop overlaps them at a chain depth. Does not
know: a device, or a clock. Policies are compared here before they are measured; the figures are no measurements.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise

from runtime.schedule.budget import CALM_SLOWDOWN, budget_table, calm_table
from runtime.schedule.config import MixedSteps, SchedulerConfig, StepLimits
from runtime.schedule.plan import Admit, StepKind, StepPlan, StepResult
from runtime.schedule.request import FinishReason, Request, SamplingParams
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.speculation import UNIT, Speculation
from tests.runtime.schedule.configs import config_with

# ---- what a step costs ----

BUCKETS = (*range(8, 128, 8), *range(128, 512, 16), *range(512, 1024, 32), *range(1024, 2049, 128))


@dataclass(frozen=True)
class StepCosts:
    """``step_ms``: (tokens, ms) of a forward pass and a draw that read no KV; beyond the last, the last slope goes on.

    ``kv_ms``: of reading one token's KV. ``attention_ms``: of one token of a prompt attending to one before it.
    ``draft_ms``: of the guesses of a window, whatever its rows. ``tile`` and ``wave``: attention of prompts takes whole
    waves of so many tiles of so many tokens (1: it takes what its tokens take).
    """

    step_ms: tuple[tuple[int, float], ...]
    kv_ms: float
    attention_ms: float
    draft_ms: float = 0.0
    tile: int = 1
    wave: int = 1

    def forward(self, tokens: int) -> float:
        for (low, low_ms), (high, high_ms) in pairwise(self.step_ms):
            if tokens <= high or (high, high_ms) == self.step_ms[-1]:
                return low_ms + (high_ms - low_ms) * (tokens - low) / (high - low)
        raise AssertionError("unreachable")

    def step(self, plan: StepPlan, kv_tokens: int, buckets: Sequence[int]) -> float:
        tokens = plan.packed_tokens
        guesses = self.draft_ms if plan.width > 1 else 0.0
        if plan.kind is StepKind.MIXED:
            tokens = next((bucket for bucket in buckets if bucket >= tokens), tokens)
        prompts = sum(len(c.token_ids) * (c.start + len(c.token_ids) / 2) for c in plan.chunks)
        tiles = sum(-(-len(c.token_ids) // self.tile) for c in plan.chunks)
        full = -(-tiles // self.wave) * self.wave * self.tile / max(1, plan.prefill_tokens)
        return self.forward(tokens) + guesses + kv_tokens * self.kv_ms + full * prompts * self.attention_ms


# Decode steps of 1 to 256 rows without their KV reads (147,456 bytes a token at 4.0 TB/s), prefill beyond; attention of
# 36 layers x 32 heads x 128 at 580 TFLOP/s where waves are full (FlashInfer's fa3: 512 tokens at once). Guesses: three
# of an MTP layer.
QWEN3_8B_H200 = StepCosts(
    step_ms=((1, 4.11), (8, 4.26), (32, 4.49), (128, 5.33), (256, 7.69), (2048, 48.0), (16384, 370.6)),
    kv_ms=147_456 / 4.0e9,
    attention_ms=4 * 36 * 32 * 128 / 580e9,
    draft_ms=0.6,
    tile=128,
    wave=4,
)

# The same of 0.6B (114,688 bytes a token, 28 layers of 16 heads): decode steps by docs/lab/measurements/latency.md,
# prefill by how much longer a batch's first tokens take with more of them (1.83 us a token).
QWEN3_06B_H200 = StepCosts(
    step_ms=((1, 0.653), (8, 0.793), (32, 1.005), (128, 1.117), (256, 1.138), (512, 1.5), (2048, 4.2), (8192, 15.4)),
    kv_ms=114_688 / 4.0e9,
    attention_ms=4 * 28 * 16 * 128 / 580e9,
)
MODELS = {"8b": QWEN3_8B_H200, "0.6b": QWEN3_06B_H200}


# ---- loads ----


@dataclass(frozen=True)
class Arrival:
    prompt: int
    output: int
    at_ms: float = 0.0


def mixed_lengths(count: int, seed: int) -> list[Arrival]:
    """Chat-like lengths: log-normal prompts (median 220, 2,000 at most) and outputs (median 180, 1,000 at most)."""
    draw = random.Random(seed)

    def clip(length: float, most: int) -> int:
        return max(8, min(most, int(length)))

    arrivals = []
    for _ in range(count):
        prompt = clip(draw.lognormvariate(math.log(220), 1.0), 2000)
        output = clip(draw.lognormvariate(math.log(180), 0.9), 1000)
        for _ in range(prompt):  # the tokens themselves, so that the same seed gives the same lengths
            draw.randrange(100, 150000)
        arrivals.append(Arrival(prompt, output))
    return arrivals


# ---- the run ----


@dataclass
class Figures:
    """Times in ms. ``itl_ms``: between the steps that give a request tokens, of all requests."""

    scheduler: Scheduler
    tokens: int = 0
    ms: float = 0.0
    itl_ms: list[float] = field(default_factory=list)
    ttft_ms: dict[int, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.tokens / self.ms

    def line(self) -> str:
        counters = self.scheduler.counters
        ttft = sorted(self.ttft_ms.values())
        itl = sorted(self.itl_ms)
        mixed = counters.mixed_steps or 1
        return (
            f"{self.tokens_per_s:>8.0f} {at(itl, 50):>7.2f} {at(itl, 99):>7.2f} {itl[-1]:>7.1f} "
            f"{at(ttft, 50):>8.1f} {at(ttft, 99):>8.1f} {counters.prefill_steps:>6} {counters.decode_steps:>6} "
            f"{counters.mixed_steps:>6} {counters.mixed_prompt_tokens / mixed:>7.0f} "
            f"{counters.mixed_padded_tokens / mixed:>5.1f}"
        )


HEADER = (
    f"{'load':<22} {'tok/s':>8} {'ITL p50':>7} {'p99':>7} {'max':>7} {'TTFT p50':>8} {'p99':>8} "
    f"{'prefil':>6} {'decode':>6} {'mixed':>6} {'chunk':>7} {'pad':>5}"
)


def at(ordered: Sequence[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0.0


class TimedDevice:
    """Runs plans one after the other: when each ends, and what it gives. Requests end by length only.

    ``rates``: the share of windows in which the first guess, the first two, ... are kept."""

    def __init__(self, costs: StepCosts, buckets: Sequence[int], rates: Sequence[float] = ()) -> None:
        self.free_at_ms = 0.0
        self._costs = costs
        self._buckets = buckets
        self._lengths: dict[int, int] = {}  # by slot: tokens known
        self._ends: dict[int, int] = {}  # by slot: tokens at which it ends
        self._rates = rates
        self._coins = random.Random(1)

    def launch(self, plan: StepPlan, now_ms: float) -> StepResult:
        for write in plan.slot_writes:
            self._lengths[write.slot], self._ends[write.slot] = write.length, write.max_length
        decoding = plan.slots[: plan.decode_rows]
        kv_tokens = sum(self._lengths[slot] for slot in decoding)
        self.free_at_ms = max(self.free_at_ms, now_ms) + self._costs.step(plan, kv_tokens, self._buckets)
        for chunk in plan.chunks:
            self._lengths[chunk.slot] = chunk.start + len(chunk.token_ids)
        counts = [int(plan.draws(row)) for row in range(len(plan.slots))]
        for row, slot in enumerate(decoding if plan.width > 1 else ()):
            coin = self._coins.random()
            gained = 1 + sum(coin < rate for rate in self._rates[: plan.width - 1])
            counts[row] = min(gained, self._ends[slot] - self._lengths[slot])
        finish = []
        for slot, count in zip(plan.slots, counts, strict=True):
            self._lengths[slot] += count
            ended = count and self._lengths[slot] >= self._ends[slot]
            finish.append(FinishReason.LENGTH if ended else FinishReason.NONE)
        return StepResult(plan.step, [7] * (len(counts) * plan.width), counts, finish)


def simulate(
    config: SchedulerConfig,
    costs: StepCosts,
    arrivals: Sequence[Arrival],
    concurrency: int | None,
    host_ms: float = 0.1,
    rates: Sequence[float] = (),
) -> Figures:
    """``concurrency``: so many requests at once, each end admits the next; None: each at its own time. ``rates``: of
    the guesses that windows keep.

    The engine's loop: submit what has come, plan, launch (``host_ms``), then wait for the step that is to land.
    """
    scheduler = Scheduler(config)
    device = TimedDevice(costs, () if config.mixed is None else config.mixed.buckets, rates)
    figures = Figures(scheduler)
    in_order = sorted(range(len(arrivals)), key=lambda i: arrivals[i].at_ms)
    coming = deque((arrivals[i].at_ms, i) for i in in_order)
    kept_back: deque[tuple[float, int]] = deque()
    if concurrency is not None:
        coming, kept_back = deque(islice(coming, concurrency)), deque(islice(coming, concurrency, None))
    came: dict[int, float] = {}
    latest: dict[int, float] = {}
    in_flight: deque[tuple[StepResult | None, float]] = deque()
    now = 0.0
    while scheduler.unfinished or coming:
        if not scheduler.unfinished and not scheduler.chain.real:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            came_at, i = coming.popleft()
            came[i] = came_at
            prompt = tuple((i * 31 + k) % 1009 for k in range(arrivals[i].prompt))
            scheduler.submit(Admit(Request(i, prompt, SamplingParams(max_tokens=arrivals[i].output))))
        plan = scheduler.plan()
        now += host_ms
        result = None if plan is None else device.launch(plan, now)
        in_flight.append((result, 0.0 if result is None else device.free_at_ms))
        if len(in_flight) <= config.limits.depth:
            continue
        result, ended_at = in_flight.popleft()
        now = max(now, ended_at)
        output = scheduler.land(scheduler.step - 1 - len(in_flight), result)
        for i, count in zip(output.request_ids, output.counts, strict=True):
            if not count or i < 0:
                continue
            if i in latest:
                figures.itl_ms.append(now - latest[i])
            else:
                figures.ttft_ms[i] = now - came[i]
            latest[i] = now
            figures.tokens += count
        for _ in output.finished:
            if kept_back:
                coming.append((now, kept_back.popleft()[1]))
    figures.ms = now
    return figures


# Arrivals, and how many requests are kept in flight (None: each comes at its own time).
Load = tuple[list[Arrival], int | None]

LOADS: dict[str, Callable[[], Load]] = {
    "all at once": lambda: (mixed_lengths(1024, seed=5), None),
    "closed 16": lambda: (mixed_lengths(384, seed=6), 16),
    "closed 64": lambda: (mixed_lengths(384, seed=6), 64),
    "closed 256": lambda: (mixed_lengths(384, seed=6), 256),
    "closed 16, 2048": lambda: (mixed_lengths(2048, seed=6), 16),
    "closed 64, 2048": lambda: (mixed_lengths(2048, seed=6), 64),
    "closed 256, 2048": lambda: (mixed_lengths(2048, seed=6), 256),
    "long prompts 64": lambda: (lengths(512, 1, prompt=1500, output=50, most=8000), 64),
    "long prompts at once": lambda: (lengths(512, 1, prompt=1500, output=50, most=8000), None),
    "32k prompts at once": lambda: ([Arrival(32_000, 512)] * 64, None),
    "32k prompts 8": lambda: ([Arrival(32_000, 200)] * 32, 8),
    "32k prompts in chat": lambda: (chat_with_long_prompts(), None),
    "bursts": lambda: (bursts(), None),
}


def lengths(count: int, seed: int, *, prompt: int, output: int, most: int) -> list[Arrival]:
    """Log-normal around the medians ``prompt`` and ``output``; prompts of ``most`` tokens, outputs of 300 at most."""
    draw = random.Random(seed)
    return [
        Arrival(
            max(8, min(most, int(prompt * draw.lognormvariate(0, 1)))),
            max(4, min(300, int(output * draw.lognormvariate(0, 0.9)))),
        )
        for _ in range(count)
    ]


def chat_with_long_prompts() -> list[Arrival]:
    """Twenty chat-like requests a second for 30 s; every 3 s a prompt of 32,000 tokens."""
    draw = random.Random(3)
    chat, now = [], 0.0
    for each in mixed_lengths(600, seed=7):
        now += draw.expovariate(20 / 1000)
        chat.append(replace(each, at_ms=now))
    return chat + [Arrival(32_000, 100, at_ms=3000.0 * i) for i in range(1, 10)]


def bursts() -> list[Arrival]:
    """Every two seconds 48 chat-like requests at the same moment."""
    return [replace(each, at_ms=2000.0 * (i // 48)) for i, each in enumerate(mixed_lengths(480, seed=8))]


DRAIN_STEPS = MixedSteps().drain_steps
ROW_LIMITS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
KV_LIMITS = tuple(1 << n for n in range(12, 21))
ROOMY = SchedulerConfig(
    StepLimits(rows=256, slots=512, block_size=16, max_model_len=40_960), blocks=46_000, prefix_caching=False
)


def with_table(
    costs: StepCosts,
    target_ms: float | None = None,
    waves: bool = True,
    calm: float = CALM_SLOWDOWN,
    drain_steps: int = DRAIN_STEPS,
) -> SchedulerConfig:
    """The configuration whose budgets are made of ``costs``, as a start-up makes them of what it measures. ``waves``:
    chunks fill those of attention. ``calm``: how much longer than a decode step a step with chunks is while few prompt
    tokens wait. ``drain_steps``: in so many steps those that wait are to be computed, as far as the budget allows.
    """
    step_ms = [(bucket, costs.forward(bucket)) for bucket in BUCKETS]
    budgets = budget_table(step_ms, costs.kv_ms, ROW_LIMITS, KV_LIMITS, target_ms)
    costly_prefix = int((costs.forward(2048) - costs.forward(1024)) / 1024 / costs.attention_ms)
    mixed = MixedSteps(
        BUCKETS,
        budgets,
        calm_table(step_ms, ROW_LIMITS, calm),
        drain_steps=drain_steps,
        costly_prefix=costly_prefix,
        tile=costs.tile if waves else 0,
        wave=costs.wave if waves else 0,
    )
    return replace(ROOMY, mixed=mixed)


def with_windows(
    config: SchedulerConfig, costs: StepCosts, width: int, mixed_percent: int, fewer: Sequence[int] = ()
) -> SchedulerConfig:
    """Of ``width`` tokens a row, or with ``fewer`` guesses, where these pay by ``costs``."""

    def table(of: int) -> tuple[tuple[int, int], ...]:
        windows = [(rows, costs.forward(rows * of) + costs.draft_ms) for rows in ROW_LIMITS]
        return tuple((rows, round(UNIT * ms / costs.forward(rows))) for rows, ms in windows)

    narrower = tuple((guesses + 1, table(guesses + 1)) for guesses in fewer)
    rule = Speculation(width, None, table(width), mixed_percent, narrower)
    return replace(config, limits=replace(config.limits, width=width), widths=(width,), speculation=rule)


def asked(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, of the command line by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="8b", help="whose step costs (default: %(default)s)")
    parser.add_argument("--separate", action="store_true", help="prefill and decode steps in turn, no mixed ones")
    parser.add_argument("--ragged", action="store_true", help="chunks do not fill attention's waves")
    steps = "in so many steps those that wait are computed, where the budget allows it (default: %(default)s)"
    parser.add_argument("--drain-steps", type=int, default=DRAIN_STEPS, help=steps)
    calm = "times a decode step that a step with chunks takes while few prompt tokens wait (default: %(default)s)"
    parser.add_argument("--calm", type=float, default=CALM_SLOWDOWN, metavar="FACTOR", help=calm)
    parser.add_argument("--itl-target-ms", type=float, help="how long a step with prompts may take")
    parser.add_argument("--depth", type=int, default=2, help="chain depth")
    parser.add_argument("--rates", nargs="*", type=float, default=[], help="share of windows that keep each guess")
    parser.add_argument("--fewer", nargs="*", type=int, default=[], help="numbers of guesses beside all, descending")
    parser.add_argument("--mixed-percent", type=int, default=25, help="of a step's tokens beside chunks")
    parser.add_argument("--loads", nargs="*", default=list(LOADS), help=f"of {', '.join(LOADS)}")
    return parser.parse_args(arguments)


def config_of(options: argparse.Namespace) -> SchedulerConfig:
    costs = MODELS[options.model]
    config = ROOMY
    if not options.separate:
        waves = not options.ragged
        config = with_table(costs, options.itl_target_ms, waves, options.calm, options.drain_steps)
    config = config_with(config, depth=options.depth)
    if options.rates:
        config = with_windows(config, costs, len(options.rates) + 1, options.mixed_percent, options.fewer)
    return config


def main() -> None:
    options = asked()
    config = config_of(options)
    print(HEADER)
    for load in options.loads:
        figures = simulate(config, MODELS[options.model], *LOADS[load](), rates=options.rates)
        print(f"{load:<22} {figures.line()}", flush=True)


if __name__ == "__main__":
    main()

"""Sessions under random interleavings: every token that one shows is the one that its turn gives alone.

Knows: the verbs of sessions and a client that answers what it is told, after a while, or speaks too early. Does not
know: how a scheduler parks or goes on. One seed is one story; a client's decisions depend on the seed, the session and
how often that was parked, not on steps, so that the same story can be told at another depth.

python -m tests.runtime.schedule.session_fuzz --seeds 50000
python -m tests.runtime.schedule.session_fuzz --seed 7         replay one, and print it
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.schedule.config import MixedSteps, SchedulerConfig
from runtime.schedule.plan import (
    Admit,
    Branch,
    Cancel,
    Continue,
    Event,
    Evicted,
    Extend,
    Finished,
    Parked,
    Refused,
    ResetPrefixCache,
)
from runtime.schedule.request import FinishReason, Request, SamplingParams
from runtime.schedule.scheduler import Scheduler
from tests.runtime.schedule.configs import config_with
from tests.runtime.schedule.fake_device import VOCABULARY, FakeDevice, complete_alone, snapshots_of, spoil_free_pages
from tests.runtime.schedule.fuzz import Outdated, draw_policy, draw_snapshots, with_windows

MOST_STEPS = 3000
FIRST_FORK = 100  # request ids of forks
MOST_FORKS = 4  # those of the first sessions
WIDTHS = ((1,), (1,), (1,), (2,), (4,), (1, 3))

Build = Callable[[SchedulerConfig], Scheduler]


class WrongSession(AssertionError):
    """A session was shown other tokens than its turn gives alone, was parked elsewhere, or ended for another reason."""


class SessionHang(AssertionError):
    """A session that was told to go on never came to an end of its quantum."""


@dataclass(frozen=True)
class Story:
    """``starts``: sessions by the step they begin in. ``plain``: other requests. ``timed``: clients speak at steps of
    their own, too, so that what is refused depends on the depth. ``turns``: times that a session is told something."""

    seed: int
    config: SchedulerConfig
    starts: dict[int, tuple[Admit, ...]]
    plain: dict[int, tuple[Admit, ...]]
    breaks_at: dict[int, int]
    barren: bool
    timed: bool
    turns: int
    resets: tuple[int, ...]  # steps before which the prefix cache is reset


@dataclass
class Client:
    """What the client of one session knows. Lengths are absolute; ``before``: tokens of ``shown`` from its parent."""

    request_id: int
    prompt: tuple[int, ...]
    stops: tuple[int, ...]
    budget: int
    wanted: int
    keep: bool
    epoch: int = 1
    shown: list[int] = field(default_factory=list)
    before: int = 0
    parked: FinishReason | None = None
    parks: int = 0
    ended: Finished | None = None
    due: int = -1  # the step in which it says its next word
    transcript: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.shown)

    def alone(self, breaks_at: int | None) -> tuple[tuple[int, ...], FinishReason]:
        """This turn's whole answer, and its end."""
        known = (*self.prompt, *self.shown[: self.before])
        tokens, reason = complete_alone(self.request_id, known, self.stops, self.budget, breaks_at)
        return (*self.shown[: self.before], *tokens), reason


def make_story(seed: int) -> Story:
    draw = random.Random(seed)
    rows, sessions = draw.choice((1, 2, 3, 4)), draw.randrange(1, 6)
    widths = draw.choice(WIDTHS)
    config = config_with(
        rows=rows,
        slots=rows + sessions + MOST_FORKS + draw.choice((0, rows)),
        blocks=draw.choice((16, 20, 28, 60)) + 2 * max(widths),
        block_size=draw.choice((2, 3, 4)),
        max_model_len=draw.choice((24, 32, 40)),
        depth=draw.randrange(5),
        widths=widths,
        max_prefill_tokens=draw.choice((2, 5, 64)),
        prefill_burst=draw.choice((1, 3)),
        prefix_caching=draw.random() < 0.7,
        max_sessions=draw.choice((sessions + MOST_FORKS, max(1, sessions - 1))),
        session_policy=draw.choice(("evict", "evict", "close", "refuse")),
        mixed=draw.choice((None, MixedSteps(), MixedSteps(long_prompt=6, drain_steps=2))),
    )
    stem = tuple(draw.randrange(VOCABULARY) for _ in range(12))

    def admits(first: int, count: int, *, session: bool) -> dict[int, tuple[Admit, ...]]:
        found: dict[int, tuple[Admit, ...]] = {}
        for request_id in range(first, first + count):
            prompt = stem[: draw.randrange(10)] + tuple(draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 4)))
            stops = tuple(draw.sample(range(VOCABULARY), draw.choice((0, 0, 2))))
            request = Request(request_id, prompt, SamplingParams(max_tokens=draw.choice((1, 4, 8, 14))), stops)
            admit = Admit(request, draw.choice((1, 2, 3, 20)), draw.random() < 0.7) if session else Admit(request)
            at = draw.choice((0, draw.randrange(40)))
            found[at] = (*found.get(at, ()), admit)
        return found

    starts, plain = admits(0, sessions, session=True), admits(50, draw.randrange(5), session=False)
    breaks_at = {}
    if draw.random() < 0.2:
        chosen = draw.choice([*range(sessions), 50, 51])
        breaks_at[chosen] = draw.randrange(4, 16)
    if seed % 3 == 1:
        config = config_with(config, snapshots=draw_snapshots(draw))
    if max(widths) > 1 and draw.random() < 0.7:
        config = config_with(config, speculation=draw_policy(draw, max(widths)))
    barren, timed, turns = draw.random() < 0.2, draw.random() < 0.5, draw.choice((1, 3, 6))
    resets = tuple(draw.sample(range(80), draw.choice((0, 0, 1, 8))))
    if seed % 4 == 3:
        config = with_windows(config, seed)
    return Story(seed, config, starts, plain, breaks_at, barren, timed, turns, resets)


@dataclass
class Told:
    """What a story came to: by session, everything it showed, turn by turn, and how it ended; steps; the digest."""

    transcripts: dict[int, tuple[int, ...]]
    reasons: dict[int, FinishReason]
    steps: int
    digest: int
    events: list[tuple[int, Event]]
    counted: dict[str, int]
    disturbed: bool  # something was refused, closed or rejected


class _Telling:
    """One run of a story."""

    def __init__(self, story: Story, depth: int, build: Build, *, check: bool) -> None:
        self.story, self.check = story, check
        self.config = config_with(story.config, depth=depth)
        self.scheduler = build(self.config)
        limits = self.config.limits
        self.device = FakeDevice(
            self.config.blocks,
            limits.block_size,
            limits.slots,
            limits.max_blocks,
            barren=story.barren,
            snapshots=snapshots_of(self.config),
            windows=self.config.windows,
        )
        spoil_free_pages(self.scheduler, self.device)
        self.device.breaks_at = story.breaks_at
        self.clients: dict[int, Client] = {}
        self.plain: dict[int, Request] = {}
        self.shown: dict[int, list[int]] = {}  # of plain requests
        self.in_flight: deque[int] = deque()
        self.windows: deque[int] = deque()  # rows of windows of each of them
        self.gains: dict[int, list[int]] = {}  # by request, of every window that gained something
        self.chance = random.Random(story.seed + 1)  # of what is said too early
        self.disturbed = False
        self.outdated = Outdated(self.scheduler)
        self.events: list[tuple[int, Event]] = []

    def tell(self) -> Told:
        scheduler, story = self.scheduler, self.story
        last = max([0, *story.starts, *story.plain])
        while scheduler.unfinished or self.in_flight or scheduler.step <= last:
            for admit in story.plain.get(scheduler.step, ()):
                self.plain[admit.request.request_id] = admit.request
                self.submit(admit)
            for admit in story.starts.get(scheduler.step, ()):
                self.start(admit)
            for client in list(self.clients.values()):
                self.speak(client)
            if scheduler.step in story.resets:
                self.outdated.reset()
                self.submit(ResetPrefixCache())
            self.turn()
            self.outdated.check()
            if scheduler.step > MOST_STEPS:
                raise SessionHang(
                    f"no end after {MOST_STEPS} steps: {[c for c in self.clients.values() if not c.ended]}"
                )
            if not scheduler.unfinished and not scheduler.chain.real and scheduler.step > last + 8:
                break
        while self.in_flight:
            self.land()
        scheduler.check()
        if scheduler.pool.free_count != self.config.blocks or scheduler.slots.free_count != self.config.limits.slots:
            raise AssertionError("everything has ended, but not every block and slot is free")
        if scheduler.ledger.sessions:
            raise AssertionError("everything has ended, but there are sessions")
        counters, gains = scheduler.counters, [gain for found in self.gains.values() for gain in found]
        if (counters.spec_num_drafts, counters.spec_num_accepted_tokens) != (len(gains), sum(gains) - len(gains)):
            raise WrongSession(f"{counters}, but {len(gains)} windows gained {sum(gains)} tokens")
        return Told(
            {id_: (*client.transcript, *client.shown) for id_, client in self.clients.items()},
            {id_: client.ended.reason for id_, client in self.clients.items() if client.ended is not None},
            scheduler.step,
            scheduler.digest.value,
            self.events,
            {
                name: getattr(counters, name)
                for name in ("session_parks", "session_evictions", "session_closes", "session_forks", "session_extends")
            },
            self.disturbed,
        )

    # ---- what clients say ----

    def submit(self, event: Event) -> Refused | None:
        """Returns why it was refused."""
        self.events.append((self.scheduler.step, event))
        ended = self.scheduler.submit(event)
        refused = self.hear(ended)
        if self.check:
            self.scheduler.check()
        return refused

    def start(self, admit: Admit) -> None:
        request = admit.request
        prompt = tuple(request.prompt_token_ids)
        budget = min(len(prompt) + request.sampling.max_tokens, self.config.limits.max_model_len)
        self.clients[request.request_id] = Client(
            request.request_id,
            prompt,
            request.stop_token_ids,
            budget,
            min(len(prompt) + admit.quantum, budget),
            admit.keep,
        )
        self.submit(admit)

    def speak(self, client: Client) -> None:
        if client.ended is not None:
            return
        if self.story.timed and self.chance.random() < 0.06:
            self.speak_early(client)
        elif client.parked is not None and self.scheduler.step >= client.due:
            self.answer(client)

    def speak_early(self, client: Client) -> None:
        if self.chance.random() < 0.1:
            self.disturbed = True
            self.submit(Cancel(client.request_id))
        else:
            self.go_on(client, self.chance.choice((1, 2, 9)), client.epoch - (self.chance.random() < 0.2))

    def go_on(self, client: Client, tokens: int, epoch: int) -> None:
        complete = client.parked in (FinishReason.STOP, FinishReason.LENGTH)
        right = epoch == client.epoch and not complete and client.wanted < client.budget
        refused = self.submit(Continue(client.request_id, epoch, tokens))
        if refused is not None:
            self.disturbed = True
            over = self.scheduler.ledger.sequences[client.request_id].session
            landed_stop = over is not None and over.over is FinishReason.STOP  # not told yet: it drains
            if right and not landed_stop:
                raise WrongSession(f"{client} was refused: {refused}")
            return
        if not right:
            raise WrongSession(f"{client} may not go on in epoch {epoch}, and was let")
        client.wanted = min(client.wanted + tokens, client.budget)
        client.parked = None

    def answer(self, client: Client) -> None:
        """Its next word: a function of the seed, of who it is and of how often it was parked."""
        draw = random.Random(f"{self.story.seed} {client.request_id} {client.parks}")
        if client.parks > self.story.turns or (client.parks == self.story.turns and draw.random() < 0.5):
            self.submit(Cancel(client.request_id))
            return
        wish = draw.random()
        if wish < 0.15 and client.request_id < MOST_FORKS:  # not so many in all: who comes first depends on the depth
            self.fork(client, draw)
            client.parks += 1
            return
        if client.parked is FinishReason.NONE and wish < 0.8:
            if draw.random() < 0.1:
                stale = self.submit(Continue(client.request_id, client.epoch - 1, 1))
                if stale is None:
                    raise WrongSession(f"{client}: a stale continue was let")
            self.go_on(client, draw.choice((1, 2, 3, 30)), client.epoch)
            return
        said = tuple(draw.randrange(VOCABULARY) for _ in range(draw.choice((1, 2, 5))))
        most, now = draw.choice((1, 4, 9)), draw.choice((1, 2, 20))
        refused = self.submit(Extend(client.request_id, client.epoch, said, most, now))
        if refused is not None:
            self.disturbed = True
            if client.ended is None:
                self.submit(Cancel(client.request_id))
            return
        client.transcript += [*client.shown, -1]
        client.prompt = (*client.prompt, *client.shown, *said)
        client.shown, client.before, client.parked = [], 0, None
        client.epoch += 1
        client.budget = min(len(client.prompt) + most, self.config.limits.max_model_len)
        client.wanted = min(len(client.prompt) + now, client.budget)

    def fork(self, client: Client, draw: random.Random) -> None:
        child_id = FIRST_FORK + client.request_id  # one a session: the same id at every depth
        if child_id in self.clients:
            return
        child = Client(
            child_id, client.prompt, client.stops, client.budget, client.length, client.keep, shown=list(client.shown),
            before=len(client.shown),
        )  # fmt: skip
        self.clients[child_id] = child
        if self.submit(Branch(child_id, client.request_id)) is not None:
            self.disturbed = True
            del self.clients[child_id]

    # ---- what the scheduler says ----

    def turn(self) -> None:
        plan = self.scheduler.plan()
        self.hear(())
        if plan is not None and len(plan.slots) > self.config.limits.rows:
            raise AssertionError(f"{len(plan.slots)} rows")
        if self.check and plan is not None:
            self.scheduler.check()
        self.device.launch(plan)
        self.in_flight.append(self.scheduler.step - 1)
        self.windows.append(plan.decode_rows if plan is not None and plan.width > 1 else 0)
        if len(self.in_flight) > self.config.limits.depth:
            self.land()

    def land(self) -> None:
        output = self.scheduler.land(self.in_flight.popleft(), self.device.land(self.scheduler.slots.epochs))
        windows = self.windows.popleft()
        for row, (request_id, count) in enumerate(zip(output.request_ids, output.counts, strict=True)):
            if count and request_id >= 0:
                new = output.tokens[row * output.width : row * output.width + count]
                if row < windows:
                    self.gains.setdefault(request_id, []).append(count)
                client = self.clients.get(request_id)
                if client is None:
                    self.shown.setdefault(request_id, []).extend(new)
                    continue
                if client.ended is not None or client.parked is not None:
                    raise WrongSession(f"{client} was shown {new} in step {output.step}")
                client.shown += new
        self.hear(output.finished)
        if self.check:
            self.scheduler.check()

    def hear(self, ended: tuple[Finished, ...]) -> Refused | None:
        notices, closed = self.scheduler.take_notices()
        refused = None
        for notice in notices:
            if isinstance(notice, Refused):
                refused = notice
            elif isinstance(notice, Parked):
                self.hear_parked(notice)
            elif isinstance(notice, Evicted):
                client = self.clients[notice.request_id]
                if client.parked is None or notice.tokens != client.length:
                    raise WrongSession(f"{client} was told {notice}")
        if closed:
            self.disturbed = True
        for finished in (*ended, *closed):
            self.hear_end(finished)
        return refused

    def hear_parked(self, notice: Parked) -> None:
        client = self.clients[notice.request_id]
        if client.parked is not None or (notice.epoch, notice.tokens) != (client.epoch, len(client.shown)):
            raise WrongSession(f"{client} was told {notice}")
        tokens, reason = client.alone(self.story.breaks_at.get(client.request_id))
        if tuple(client.shown) != tokens[: len(client.shown)]:
            raise WrongSession(f"{client} was shown {client.shown}, alone {tokens}")
        if notice.reason is FinishReason.NONE:
            if client.length != client.wanted:
                raise WrongSession(f"{client} has {client.length} tokens, wanted {client.wanted}: {notice}")
        elif len(client.shown) > client.before and (tuple(client.shown), notice.reason) != (tokens, reason):
            raise WrongSession(f"{client} was told {notice}, alone {tokens}, {reason.name}")
        client.parked = notice.reason
        client.parks += 1
        client.due = self.scheduler.step + random.Random(f"{self.story.seed} {client.parks}").choice((0, 0, 1, 4, 12))

    def hear_end(self, finished: Finished) -> None:
        gains = self.gains.get(finished.request_id, [])
        if (finished.rounds, finished.accepted) != (len(gains), sum(gains) - len(gains)):
            raise WrongSession(f"{finished}, but its windows gained {gains}")
        client = self.clients.get(finished.request_id)
        breaks = self.story.breaks_at.get(finished.request_id)
        if client is None:
            request = self.plain[finished.request_id]
            prompt = tuple(request.prompt_token_ids)
            longest = min(len(prompt) + request.sampling.max_tokens, self.config.limits.max_model_len)
            whole = complete_alone(request.request_id, prompt, request.stop_token_ids, longest, breaks)
            if finished.reason is not FinishReason.REJECTED and (finished.token_ids, finished.reason) != whole:
                raise WrongSession(f"{finished}, alone {whole}")
            return
        if client.ended is not None:
            raise WrongSession(f"{client} ended twice")
        client.ended = finished
        if finished.reason is FinishReason.REJECTED:
            self.disturbed = True
            return
        if list(finished.token_ids) != client.shown:
            raise WrongSession(f"{client} ended as {finished}")
        tokens, reason = client.alone(breaks)
        if finished.reason is FinishReason.CANCELLED:
            if tuple(client.shown) != tokens[: len(client.shown)]:
                raise WrongSession(f"{client} was shown {client.shown}, alone {tokens}")
        elif (finished.token_ids, finished.reason) != (tokens, reason) or (
            client.keep and reason is not FinishReason.ERROR
        ):
            raise WrongSession(f"{client} ended as {finished}, alone {tokens}, {reason.name}")


def tell(story: Story, depth: int | None = None, build: Build = Scheduler, *, check: bool = True) -> Told:
    """Raises where the story breaks a promise. ``depth``: None takes the story's own."""
    return _Telling(story, story.config.limits.depth if depth is None else depth, build, check=check).tell()


def check_seed(seed: int, build: Build = Scheduler, *, check: bool = True) -> Told:
    """The story of ``seed`` at its depth; where nothing in it depends on steps, also that depth 0 says the same."""
    story = make_story(seed)
    told = tell(story, build=build, check=check)
    if story.config.limits.depth and not story.timed and not told.disturbed and not story.breaks_at:
        serial = tell(story, 0, build, check=False)
        if not serial.disturbed and (told.transcripts, told.reasons) != (serial.transcripts, serial.reasons):
            raise WrongSession(f"seed {seed}: {told.transcripts} {told.reasons}, at depth 0 {serial.transcripts}")
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="replay this one")
    options = parser.parse_args()
    if options.seed is not None:
        print(make_story(options.seed))
        print(check_seed(options.seed))
        return
    for seed in range(options.first, options.first + options.seeds):
        try:
            check_seed(seed)
        except Exception as error:
            raise SystemExit(f"seed {seed}: {type(error).__name__}: {error}") from error
    print(f"{options.seeds} stories, no difference")


if __name__ == "__main__":
    main()

"""What rank 0 and its API processes say to each other, as bytes on a Unix socket.

Knows: the messages of both directions, msgpack in frames (framing.py). Does not know: who sends what when
(engine_server.py, remote_engine.py), HTTP, engines.

Rank 0 sends one ``Step`` a turn that brought anything, whatever the number of requests, never one a token. Token ids of
prompts travel as little-endian int32. Both ends are processes of one user on one machine, connected by a socketpair
that no other process can open; still every frame is decoded strictly, and one that does not fit ends the connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import msgspec

from runtime.frontend import framing
from runtime.frontend.framing import BadFrame
from runtime.frontend.outputs import TokenLogprob
from runtime.schedule.request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from runtime.execute.sampling.logprobs import PromptLogprobs

MAX_FRAME: Final = 256 << 20  # bytes; a prompt of a million tokens with log-probabilities stays far below
ITERATION_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class WireLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A TokenLogprob; ``top`` as two columns."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top: tuple[float, ...]

    @classmethod
    def of(cls, entry: TokenLogprob) -> WireLogprob:
        ids, values = tuple(zip(*entry.top, strict=True)) if entry.top else ((), ())
        return cls(entry.token_id, entry.logprob, entry.rank, ids, values)

    def entry(self) -> TokenLogprob:
        return TokenLogprob(self.token_id, self.logprob, self.rank, tuple(zip(self.top_ids, self.top, strict=True)))


class ScoredPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A PromptLogprobs, its columns as they lie in memory: rank 0 makes no objects of them, which takes a second for a
    million.
    """

    start: int
    chosen: bytes
    rank: bytes
    top_ids: bytes
    top: bytes

    @classmethod
    def of(cls, part: PromptLogprobs) -> ScoredPrompt:
        columns = (part.chosen_S, part.rank_S, part.top_ids_SN, part.top_SN)
        return cls(part.start, *(column.tobytes() for column in columns))

    def columns(self) -> tuple[list[float], list[int], list[list[int]], list[list[float]]]:
        """As lists: chosen [S], rank [S], top ids [S, n], top values [S, n]."""
        chosen: list[float] = list(memoryview(self.chosen).cast("f"))
        rank: list[int] = list(memoryview(self.rank).cast("i"))
        if not self.top:
            return chosen, rank, [[] for _ in rank], [[] for _ in rank]
        shape = len(rank), len(self.top) // len(self.chosen)
        ids, top = memoryview(self.top_ids).cast("i", shape), memoryview(self.top).cast("f", shape)
        return chosen, rank, cast(list[list[int]], ids.tolist()), cast(list[list[float]], top.tolist())


# ---- rank 0 to an API process ----


class Setup(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The first message: the settings of the API process (JSON), which are no business of this file."""

    settings: bytes


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The engine is loaded. What a front end must know of the model, and of the engine for its information pages.

    ``most_together``: answers of one Submit.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    limit: float  # seconds without progress after which the watchdog ends the job
    cache: dict[str, str]  # of vllm:cache_config_info
    most_together: int


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """A submitted sequence was taken: the API process's ``local`` id for it is the engine's ``request_id``."""

    local: int
    request_id: int


class Scored(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of the tokens that a sequence gained in this step."""

    local: int
    logprobs: tuple[WireLogprob, ...]


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """A sequence ended. ``tokens``: all that it generated, as int32. ``queued``: seconds until it went to the engine.

    ``prompt_logprobs``: of the prompt's tokens, if they were asked for.
    """

    local: int
    reason: FinishReason
    tokens: bytes
    detail: str
    queued: float
    prompt_logprobs: tuple[ScoredPrompt, ...] | None


class Columns(msgspec.Struct, frozen=True, array_like=True):
    """The rows of one landed step, as StepOutput has them: row i gained ``tokens[i*width : i*width+counts[i]]``.

    Every API process gets the rows of all: ids that it does not know, and -1, are not its own.
    """

    request_ids: list[int]
    tokens: list[int]
    counts: list[int]
    width: int


class Step(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Everything that one turn of the engine brought. ``opened`` comes before the first token of a sequence."""

    columns: Columns | None
    opened: tuple[Opened, ...]
    scored: tuple[Scored, ...]
    ended: tuple[Ended, ...]


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Twice a second, from a thread that does nothing else: how the engine gets on.

    ``still_for``: seconds without progress, measured when it was sent. ``silent``: ranks that have said nothing for
    longer than they should.
    """

    still_for: float
    place: str
    step: int
    silent: tuple[int, ...]


class Stats(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Once or twice a second: the engine's counters, and how full it is now.

    ``queued``: sequences that no step has begun. ``full``: no more are taken for now. ``restarts``: API processes that
    had to be started again. ``disconnected``: sequences that were cancelled because their clients had gone.
    ``iterations``: tokens that each step brought, counted in the buckets of ITERATION_BUCKETS and one beyond; and their
    sum. ``agreements``: the same of the seconds that ranks took to agree on a turn's events, in AGREEMENT_BOUNDS.
    """

    counters: dict[str, float]
    running: int
    queued: int
    used_blocks: int
    blocks: int
    full: bool
    restarts: int
    disconnected: int
    iterations: tuple[int, ...]
    iteration_tokens: int
    agreements: tuple[int, ...]
    agreement_seconds: float


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Take no new requests; those that run have so many seconds."""

    seconds: float


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The engine ends. ``failure``: why, if it was not asked to: for those who still wait."""

    failure: str | None


class PrefixCacheReset(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The answer to ResetPrefixCache: what any API process submits from now on comes after it."""


# ---- an API process to rank 0 ----


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """``sampling.n`` sequences of one prompt, checked: their seed is set, their stop strings are the API process's
    business. ``local`` is the first one's id, the others have those that follow.

    ``arrived_at``: time.monotonic(), which all processes of a machine share. ``continues``: it belongs to the same HTTP
    request as the one before it.
    """

    local: int
    prompt: bytes
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    priority: int
    arrived_at: float
    continues: bool = False


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Their clients have gone: CANCELLED, or STOP where their stop string was found."""

    locals: tuple[int, ...]
    reason: FinishReason


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Once a second, from the event loop: a process that hangs says nothing."""


class ResetPrefixCache(msgspec.Struct, frozen=True, array_like=True, tag=3):
    pass


ToApi = Setup | Ready | Step | Beat | Stats | Drain | Bye | PrefixCacheReset
ToEngine = Submit | Drop | Alive | ResetPrefixCache

_ENCODER = msgspec.msgpack.Encoder()
_FROM_ENGINE = msgspec.msgpack.Decoder(ToApi)
_FROM_API = msgspec.msgpack.Decoder(ToEngine)


def framed(message: ToApi | ToEngine) -> bytes:
    """The message as it goes over the socket."""
    return framing.framed(_ENCODER.encode(message))


def from_engine(body: bytes) -> ToApi:
    """Raises BadFrame."""
    try:
        message: ToApi = _FROM_ENGINE.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadFrame(f"{len(body)} bytes are no message: {error}") from error
    return message


def from_api(body: bytes) -> ToEngine:
    """Raises BadFrame."""
    try:
        message: ToEngine = _FROM_API.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadFrame(f"{len(body)} bytes are no message: {error}") from error
    return message

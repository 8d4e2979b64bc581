"""Events queued on rank 0 and not broadcast yet: announced in portions, turn by turn.

Knows: how much of it a turn needs. Does not know: records, steps, how a scheduler chooses.

All of a large batch in one record would keep every rank reading, with an idle device, before the first prefill is
planned. A portion holds what a prefill step can take, so such steps are as full as if everything had been announced,
and the rest is read after them, while the device computes. Nor does a portion have more bytes than a control record
may carry, whatever its requests list.
"""

from __future__ import annotations

from collections import deque

from runtime.config import EngineConfig
from runtime.replicate.event_codec import most_bytes
from runtime.schedule.plan import Admit, Branch, Compile, Event, ResetPrefixCache, Tabled

LEAST_PROMPT_TOKENS = 8192  # reading so much takes well under a millisecond: smaller portions would save nothing
LEAST_REQUESTS = 256
MOST_BYTES = 16 << 20  # half of MAX_PAYLOAD (parallel/control/wire/frames.py), and more than full portions of prompts


class PendingEvents:
    """Events in the order of ``put``, but that none waits for arrivals of other requests.

    ``prompt_tokens``, ``requests``: a portion's arrivals end with the one that reaches either. A portion ends before
    the event that would pass MOST_BYTES, but never before its first. ``count``: events that wait.
    """

    def __init__(self, prompt_tokens: int, requests: int) -> None:
        self.count = 0
        self._prompt_tokens = prompt_tokens
        self._requests = requests
        self._now: deque[Event] = deque()  # about requests that were announced
        self._later: deque[Event] = deque()  # arrivals, and what is about one of them
        self._arriving: set[int] = set()  # the ids of the answers of ``_later``'s arrivals

    def put(self, event: Event) -> None:
        """To be announced soon."""
        self.count += 1
        if isinstance(event, Admit):
            self._arriving.update(event.request.answer_ids)
            self._later.append(event)
        elif isinstance(event, ResetPrefixCache | Tabled | Compile):
            self._now.append(event)
        elif (event.parent if isinstance(event, Branch) else event.request_id) in self._arriving:
            if isinstance(event, Branch):
                self._arriving.add(event.request_id)
            self._later.append(event)
        else:
            self._now.append(event)

    def portion(self) -> list[Event]:
        """What this turn announces; it is not in here any more."""
        events: list[Event] = []
        tokens = requests = size = 0
        while self._now or (self._later and tokens < self._prompt_tokens and requests < self._requests):
            source = self._now or self._later
            size += most_bytes(source[0])
            if events and size > MOST_BYTES:
                break
            event = source.popleft()
            events.append(event)
            if isinstance(event, Admit):
                self._arriving.difference_update(event.request.answer_ids)
                tokens += len(event.request.prompt_token_ids)
                requests += event.request.sampling.n
            elif isinstance(event, Branch):
                self._arriving.discard(event.request_id)
        self.count -= len(events)
        return events


def open_pending_events(config: EngineConfig) -> PendingEvents:
    """A portion fills every group's next prefill step; twice, where it is dealt out to several, as shares differ."""
    steps = 1 if config.data_parallel == 1 else 2 * config.data_parallel
    return PendingEvents(
        max(steps * config.max_prefill_tokens, LEAST_PROMPT_TOKENS), max(steps * config.max_num_seqs, LEAST_REQUESTS)
    )

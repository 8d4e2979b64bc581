"""What the scheduler counts: lives of requests, how long the chain was, why it broke, and what was wasted.

Knows: counts. Does not know: time, or the device's own counters (runtime/observe).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.schedule.request import FinishReason


def _no_request_finished() -> dict[str, int]:
    return {reason.label: 0 for reason in FinishReason if reason is not FinishReason.NONE}


@dataclass(slots=True)
class ScheduleCounters:
    """Steps, in the order planned:

    ``chained_steps``: steps planned while an earlier one was in flight. ``chain_breaks``: the others, by reason:
    ``serial`` (chain depth 0), ``start`` (first step, or everything before had ended), ``no_blocks`` and
    ``context_full`` (void steps came between: rows, or the queue, waited for memory), ``paused`` (all were paused),
    ``grammar`` (all rows have a grammar, and wait for their last token to land). ``grammar_waits``: rows with a grammar
    that a step was planned without, or would have been, since their last token was in flight. ``grammar_tabled``:
    rows that went on by a table on the device.
    ``latest_break``: why the latest step was not chained, or was void; None when it was chained.

    ``mixed_steps`` are those with decode rows and prompt chunks; they count as neither of the other two kinds.
    ``mixed_prompt_tokens``: tokens of their chunks. ``mixed_padded_tokens``: what was added to them up to a bucket.

    Requests: ``finished`` by FinishReason label; every request that was submitted ends in exactly one of them.
    ``cancels``: requests ended by a Cancel event, because a caller asked (``finished{cancelled}``) or because the host
    found a stop string (``finished{stop}``). ``pauses``, ``resumes``: events that changed something; a second Pause of
    a paused request does not. ``admissions``: requests that were given a slot; after an eviction once more.
    ``deferred_admissions``: attempts to admit the head of the queue that failed for want of blocks or a slot. The next
    attempt is made when blocks came back, or a request paused, so that a long wait counts several times. ``evictions``:
    requests that gave up slot and blocks; ``evicted_for``: the same by what was short: ``slots``, or blocks of a KV
    group, ``full`` or ``window_<W>``.

    Prompts, in tokens: ``prefill_tokens`` were computed. ``prefix_query_tokens`` were looked up in the prefix index, of
    which ``prefix_hit_tokens`` were there or came in time, so that they were not computed. ``prefix_waits``: blocks
    that a prompt waited for because another was writing them. ``distrusted``: requests that were computed again
    because blocks that they shared came from one that broke. ``forks``: answers that began where another answer's
    prompt ended; ``forked_tokens``: of their prompts, which were not computed for them. Both are no part of the three.

    Snapshots of recurrent state: ``snapshot_saves``; ``snapshot_restores``: prefixes that were continued from one;
    ``snapshot_evictions``: those that gave way to others. ``snapshot_missed_tokens``: known to the prefix index when
    their prompt was begun, and computed again, because their state was not kept.

    Sessions: ``session_parks``: token quotas that ended with a session parked. ``session_continues``,
    ``session_extends``, ``session_forks``: events that were carried out; ``session_refusals``: that were not.
    ``session_forks_without_copy``: forks that hold nothing yet, for want of room or of a parent that holds something;
    they compute what the prefix index has not. ``session_evictions``: parked sessions that gave up slot and blocks
    (``evictions`` counts them, too); ``session_closes``: that were ended for it.

    Speculation, counted when a live row of a verification step lands: ``spec_num_drafts`` rows,
    ``spec_num_draft_tokens`` draft tokens, ``spec_num_accepted_tokens`` of them accepted;
    ``spec_accepted_per_position``: how often each position, from 0, was accepted; ``spec_compared_per_position``: how
    often all positions before it were accepted in a row that had not ended. Their quotient is its recall@1.
    """

    prefill_steps: int = 0
    decode_steps: int = 0
    mixed_steps: int = 0
    mixed_prompt_tokens: int = 0
    mixed_padded_tokens: int = 0
    void_steps: int = 0
    chained_steps: int = 0
    chain_breaks: dict[str, int] = field(default_factory=dict)
    ghost_rows: int = 0
    wasted_tokens: int = 0
    finished: dict[str, int] = field(default_factory=_no_request_finished)
    admissions: int = 0
    deferred_admissions: int = 0
    cancels: int = 0
    pauses: int = 0
    resumes: int = 0
    evictions: int = 0
    evicted_for: dict[str, int] = field(default_factory=dict)
    stalls: int = 0
    grammar_waits: int = 0
    grammar_tabled: int = 0
    fenced_blocks: int = 0
    prefill_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_waits: int = 0
    forks: int = 0
    forked_tokens: int = 0
    snapshot_saves: int = 0
    snapshot_restores: int = 0
    snapshot_evictions: int = 0
    snapshot_missed_tokens: int = 0
    distrusted: int = 0
    session_parks: int = 0
    session_continues: int = 0
    session_extends: int = 0
    session_forks: int = 0
    session_forks_without_copy: int = 0
    session_refusals: int = 0
    session_evictions: int = 0
    session_closes: int = 0
    spec_num_drafts: int = 0
    spec_num_draft_tokens: int = 0
    spec_num_accepted_tokens: int = 0
    spec_accepted_per_position: list[int] = field(default_factory=list)
    spec_compared_per_position: list[int] = field(default_factory=list)
    latest_break: str | None = None

    def proposed(self, width: int, gains: Sequence[int], last_gains: Sequence[int] = ()) -> list[int]:
        """Rows of a verification step of ``width`` landed: each appended one more than its accepted draft tokens.
        ``last_gains``: of those of them that ended, so that their last token was compared with no draft token.
        Returns how many rows accepted the first draft token, the first two, and so on."""
        self.spec_num_drafts += len(gains)
        self.spec_num_draft_tokens += (width - 1) * len(gains)
        positions, compared = self.spec_accepted_per_position, self.spec_compared_per_position
        positions += [0] * (width - 1 - len(positions))
        compared += [0] * (width - 1 - len(compared))
        kept, found = 0, [0] * (width - 1)  # rows, at this position and so at all before it
        for position in reversed(range(width - 1)):
            kept += gains.count(position + 2)
            found[position] = kept
            positions[position] += kept
            compared[position] += kept + gains.count(position + 1) - last_gains.count(position + 1)
            self.spec_num_accepted_tokens += kept
        return found

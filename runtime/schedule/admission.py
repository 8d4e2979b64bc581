"""Admission: how a request arrives, and how it gets its slot and first blocks, alone or as a fork of another's prompt.

Knows: what is refused at arrival, what an admission takes from the pools, which answers wait for a prompt to fork.
Does not know: when a request is admitted, or whether it fits (planner.py).
"""

from __future__ import annotations

from hashlib import blake2b

from runtime.schedule import prefix, reservation, session_rules, windows
from runtime.schedule.blocks import root_of
from runtime.schedule.ledger import Ledger
from runtime.schedule.plan import Finished, Fork
from runtime.schedule.request import FinishReason, Request
from runtime.schedule.sequence import SequenceState, Session
from runtime.schedule.states import State, Trigger


def arrive(ledger: Ledger, request: Request, quantum: int = 0, *, keep: bool = False) -> tuple[Finished, ...]:
    """Queue a request. Returns the end of its answers if it is refused: it can never run, or the queue is full."""
    prompt, sampling = request.prompt_token_ids, request.sampling
    shape = (request.request_id, sampling.n, len(prompt), request.priority, sampling.max_tokens)
    ledger.digest.fold(ledger.chain.step, "arrive", shape)
    if sampling.cache_salt:
        ledger.digest.fold(ledger.chain.step, "salt", (root_of(sampling.cache_salt),))
    if sampling.grammar:
        ledger.digest.fold(ledger.chain.step, "grammar", blake2b(sampling.grammar.encode(), digest_size=8).digest())
    if quantum:
        ledger.digest.fold(ledger.chain.step, "session", (quantum, keep))
    max_length = min(len(prompt) + sampling.max_tokens, ledger.limits.max_model_len)
    why = _refusal(ledger, request, max_length)
    if why is None and quantum:
        why = session_rules.arrival_refusal(ledger, request, quantum, max_length)
    if why is not None:
        ledger.counters.finished[FinishReason.REJECTED.label] += sampling.n
        return tuple(Finished(answer_id, FinishReason.REJECTED, (), why) for answer_id in request.answer_ids)
    sequences = [SequenceState(answer, ledger.arrivals + i, max_length) for i, answer in enumerate(request.answers())]
    if quantum:
        first = min(len(prompt) + quantum, max_length)
        sequences[0].session = Session(max_length, first, keep, sampling.min_tokens)
        sequences[0].max_length = first
        ledger.sessions[request.request_id] = sequences[0]
    for i, sequence in enumerate(sequences):
        if len(sequences) > 1:
            sequence.answers, sequence.expects_fork = sequences, i > 0
        ledger.queue_up(sequence)
    return ()


def _refusal(ledger: Ledger, request: Request, max_length: int) -> str | None:
    """Why the request can never run, or not now; None if it can be queued."""
    config, prompt, most_tokens = ledger.config, len(request.prompt_token_ids), ledger.limits.max_model_len
    if in_use := [id_ for id_ in request.answer_ids if id_ in ledger.sequences]:
        return f"request id {in_use[0]} is in use"
    if not prompt or request.sampling.max_tokens < 1:
        return "needs at least one prompt token and max_tokens >= 1"
    if prompt >= most_tokens:
        return f"prompt has {prompt} tokens, max_model_len is {most_tokens}"
    if (waiting := ledger.waiting_arrivals) >= config.max_waiting:
        return f"{waiting} requests are waiting, max_waiting is {config.max_waiting}"
    if (needed := ledger.limits.most_blocks(max_length)) > config.blocks:
        return (
            f"{prompt} prompt + {max_length - prompt} new tokens need {needed} blocks of "
            f"{ledger.limits.block_size}, the pool has {config.blocks}"
        )
    return None


def room_version(ledger: Ledger) -> int:
    """Changes whenever an admission that did not fit may fit: a block came back, a prompt's block was published, or a
    request paused or parked, which may be evicted for it.
    """
    return ledger.pool.drops + ledger.prompt_blocks + ledger.idled + sum([pool.drops for pool in ledger.windows])


def admit(ledger: Ledger, sequence: SequenceState, hits: list[int], fresh: int) -> None:
    """Give a waiting sequence a slot, the cached blocks ``hits`` of its prefix, and ``fresh`` new ones.

    The caller has checked that a slot and the blocks are free (unreferenced ``hits`` count as free), and that its
    windows have room.
    """
    slot = ledger.slots.take()
    ledger.move(sequence, Trigger.ADMIT)
    sequence.seated(slot, ledger.slots.epochs[slot])
    windows.seat(ledger, sequence)
    prefix.share(ledger, sequence, hits)
    sequence.blocks += ledger.pool.take(fresh)
    ledger.write_blocks(sequence, 0)
    ledger.counters.admissions += 1
    prefix.count_query(ledger, sequence, sequence.landed_tokens)
    if sequence.answers and sequence.untouched:
        _let_others_join(ledger, sequence)


# ---- forks ----


def _let_others_join(ledger: Ledger, prompt: SequenceState) -> None:
    """The other answers leave the queue and wait for the end of this prompt: as many as there may be rows for."""
    waiting = (answer for answer in prompt.answers if answer.state is State.WAITING and answer.untouched)
    others = [answer for answer in waiting if not (answer.scoring or answer.alone)]
    for answer in others[: ledger.limits.rows - 1]:
        ledger.move(answer, Trigger.JOIN)
        answer.joins = prompt


def kept_rows(ledger: Ledger) -> int:
    """Rows reserved for joining answers, which are before the queue in line.

    None for answers to a long prompt, which shorter ones may pass.
    """
    joining, mixed = ledger.by_state[State.JOINING], ledger.config.mixed
    if mixed is None:
        return len(joining)
    return sum(answer.landed_tokens <= mixed.long_prompt for answer in joining.values())


def blocks_to_fork(ledger: Ledger, answer: SequenceState) -> int:
    """Unshared blocks that it starts with: it shares those that its prompt fills."""
    return reservation.blocks_to_hold(ledger, answer) - answer.landed_tokens // ledger.limits.block_size


def fork(ledger: Ledger, prompt: SequenceState, answer: SequenceState, chunk: int) -> Fork:
    """Admit ``answer`` at the last chunk of ``prompt``, chunk number ``chunk`` of the plan being made.

    The caller has checked that a slot, ``blocks_to_fork`` and room for its windows are free. Both have the same prompt;
    none of either's tokens is generated.
    """
    slot = ledger.slots.take()
    ledger.move(answer, Trigger.FORK)
    answer.seated(slot, ledger.slots.epochs[slot])
    answer.prefill_begun, answer.prefilled = True, answer.prefill_target
    full, rest = divmod(answer.landed_tokens, ledger.limits.block_size)
    fresh = blocks_to_fork(ledger, answer)
    shared = prompt.blocks[:full]
    ledger.pool.share(shared)
    answer.blocks = shared + ledger.pool.take(fresh)
    pairs = windows.copy(ledger, prompt, answer, full, [pool.take(fresh) for pool in ledger.windows])
    answer.borrowed = True  # no token has been sampled over the end of this prompt yet
    ledger.write_blocks(answer, 0)
    answer.planned_tokens = answer.landed_tokens + 1
    answer.last_step = ledger.chain.step
    reservation.set_wake(ledger, answer)
    ledger.counters.admissions += 1
    ledger.counters.forks += 1
    ledger.counters.forked_tokens += answer.landed_tokens
    if not rest:
        return Fork(slot, chunk)
    return Fork(slot, chunk, (prompt.blocks[full], answer.blocks[full]), pairs)

"""Outputs on their way to rank 0: the same after the journey, refused when anything is off, merged row by row."""

from __future__ import annotations

import random
import re
from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest

from runtime.execute.result_reader import StepLogprobs
from runtime.execute.sampling.logprobs import PromptLogprobs
from runtime.groups.load_balancer import LoadBalancer
from runtime.groups.output_codec import OutputRefused, decode_output, encode_output
from runtime.groups.request_router import RequestRouter, merge_outputs
from runtime.schedule.plan import Admit, Cancel, Finished, StepOutput
from runtime.schedule.request import FinishReason
from tests.runtime.engine.rig import request


def logprobs(rows: int, top: int, base: float = 0.0) -> StepLogprobs:
    values = -np.arange(rows * top, dtype=np.float32).reshape(rows, 1, top) - base
    return StepLogprobs(
        chosen_BW=-np.arange(rows, dtype=np.float32).reshape(rows, 1) - base,
        rank_BW=np.arange(rows, dtype=np.int32).reshape(rows, 1),
        top_ids_BWN=np.arange(rows * top, dtype=np.int32).reshape(rows, 1, top),
        top_BWN=values,
    )


def scores(start: int, tokens: int, top: int) -> PromptLogprobs:
    return PromptLogprobs(
        start,
        chosen_S=np.linspace(-2, -1, tokens, dtype=np.float32),
        rank_S=np.ones(tokens, np.int32),
        top_ids_SN=np.full((tokens, top), 7, np.int32),
        top_SN=np.full((tokens, top), -0.5, np.float32),
    )


def output(ids: list[int], step: int = 9, **more: Any) -> StepOutput:
    rows = len(ids)
    return StepOutput(step, ids, [100 + i for i in ids], [1] * rows, **more)


def plain(value: Any) -> Any:
    """Arrays as lists, so that outputs can be compared."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tolist()
    if isinstance(value, StepLogprobs | PromptLogprobs):
        return tuple(plain(getattr(value, name)) for name in type(value)._fields)
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    return value


FULL = output(
    [3, -1, 5],
    finished=(Finished(3, FinishReason.STOP, (1, 2, 103)), Finished(8, FinishReason.ERROR, (), "not finite")),
    logprobs=logprobs(3, 2),
    prompt_logprobs=(None, scores(4, 6, 2), scores(0, 1, 0)),
)


@pytest.mark.parametrize(
    "one", [FULL, output([4]), output([], finished=FULL.finished), output([1], logprobs=logprobs(1, 0))]
)
def test_an_output_is_the_same_after_the_journey(one: StepOutput) -> None:
    (payload,) = encode_output(12, one)
    turn, found = decode_output(payload)
    assert turn == 12
    assert plain(found) == plain(one)


def test_a_large_output_comes_in_pieces() -> None:
    ends = tuple(Finished(i, FinishReason.LENGTH, tuple(range(10))) for i in range(7))
    payloads = list(encode_output(3, output([1, 2], finished=ends), most_tokens=25))
    assert len(payloads) == 4
    pieces = [decode_output(payload) for payload in payloads]
    assert {turn for turn, _ in pieces} == {3}
    assert plain(merge_outputs([piece for _, piece in pieces])) == plain(output([1, 2], finished=ends))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        (0, -1, "$[0]"),
        (2, 0, "$[2]"),
        (3, [3, -2, 5], "$[3][1]"),
        (4, [1, 2], "2 tokens and 3 counts for 3 rows"),
        (5, [1, 1, 1 << 40], "$[5][2]"),
        (6, [[3, 99, [], ""]], "$[6][0][1]"),
        (8, [None, None], "scores of 2 prompts for 3 rows"),
        (7, [["f4", [3, 1], b"123"], ["i4", [3, 1], b""], ["i4", [3, 1, 0], b""], ["f4", [3, 1, 0], b""]], "3 bytes"),
        (7, [["i4", [3, 1], bytes(12)]] * 4, "i4"),
        (7, [["f8", [3, 1], bytes(12)]] * 4, "f8"),
    ],
)
def test_what_is_no_output_is_refused(field: int, value: Any, said: str) -> None:
    (payload,) = encode_output(12, FULL)
    wire = msgspec.msgpack.decode(payload)
    wire[field] = value
    with pytest.raises(OutputRefused, match=re.escape(said)):
        decode_output(msgspec.msgpack.encode(wire))


def test_broken_bytes_are_refused_or_are_an_output() -> None:
    draw = random.Random(3)
    (payload,) = encode_output(12, FULL)
    for _ in range(3000):
        broken = bytearray(payload)
        for _ in range(draw.randrange(1, 4)):
            broken[draw.randrange(len(broken))] = draw.randrange(256)
        try:
            _, found = decode_output(bytes(broken[: draw.choice((len(broken), draw.randrange(len(broken))))]))
        except OutputRefused:
            continue
        assert len(found.counts) == len(found.request_ids)


# ---- merging ----


def test_rows_follow_each_other_and_columns_are_widened() -> None:
    merged = merge_outputs(
        [output([1, 2], logprobs=logprobs(2, 1)), output([]), output([7]), output([8, 9], logprobs=logprobs(2, 3, 5.0))]
    )
    assert merged.request_ids == [1, 2, 7, 8, 9]
    assert merged.tokens == [101, 102, 107, 108, 109]
    columns = merged.logprobs
    assert columns.chosen_BW.shape == (5, 1)
    assert columns.top_BWN.shape == (5, 1, 3)
    assert columns.top_ids_BWN[:, 0].tolist() == [[0, -1, -1], [1, -1, -1], [-1, -1, -1], [0, 1, 2], [3, 4, 5]]
    assert columns.chosen_BW[3:, 0].tolist() == [-5.0, -6.0]
    assert merged.prompt_logprobs is None


def test_scores_stay_with_their_rows() -> None:
    one = scores(0, 2, 1)
    merged = merge_outputs([output([1, 2]), output([3, 4], prompt_logprobs=(None, one))])
    assert merged.prompt_logprobs == (None, None, None, one)
    assert merged.logprobs is None


# ---- dealing ----


class Channel:
    """What four ranks in two groups would see."""

    world = 4

    def __init__(self, rank: int, mailbox: deque[tuple[int, bytes]]) -> None:
        self.rank = rank
        self._mailbox = mailbox

    def send_message(self, payload: bytes) -> None:
        self._mailbox.append((self.rank, payload))

    def take_messages(self) -> list[tuple[int, bytes]]:
        return [self._mailbox.popleft() for _ in range(len(self._mailbox))]


def dealers() -> list[RequestRouter]:
    mailbox: deque[tuple[int, bytes]] = deque()
    return [RequestRouter(Channel(rank, mailbox), LoadBalancer(rank // 2, 2)) for rank in range(4)]


def test_arrivals_go_to_one_group_and_everything_else_to_all() -> None:
    events = [Admit(request(i, (1, 2))) for i in range(3)] + [Cancel(0), Cancel(1)]
    found = [router.mine(events) for router in dealers()]
    assert found[0] == found[1] == [events[0], events[2], *events[3:]]
    assert found[2] == found[3] == [events[1], *events[3:]]


def test_rank_0_puts_out_what_all_groups_did_in_the_turn_before() -> None:
    leader, second, third, fourth = dealers()
    leader.mine([Admit(request(i, (1, 2))) for i in (1, 2)])
    waiting = [leader.outstanding]
    ends = (Finished(2, FinishReason.LENGTH, (5,)),)
    for turn, (mine, theirs) in enumerate([(output([1]), output([2])), (output([]), output([2], finished=ends))]):
        assert second.gather(turn, mine, True) is mine
        assert third.gather(turn, theirs, True) is theirs
        assert fourth.gather(turn, theirs, True) is theirs
        found = leader.gather(turn, mine, True)
        assert list(found.request_ids) == ([1, 2] if turn else [])
    waiting.append(leader.outstanding)
    last = leader.gather(2, output([]), False)
    assert (list(last.request_ids), last.finished) == ([2], ends)
    assert [*waiting, leader.outstanding] == [True, True, False]
    assert leader.idle_steps == [1, 0]


def test_what_a_broken_connection_delayed_comes_late_and_whole() -> None:
    leader, _, third, _ = dealers()
    for turn in range(4):
        leader.gather(turn, output([1], step=turn), True)
    third.gather(1, output([2], step=1), True)
    third.gather(2, output([2], step=2), True)
    third.gather(3, output([2], step=3), True)
    found = [leader.gather(turn, output([]), False) for turn in (4, 5, 6, 7)]
    assert [list(one.request_ids) for one in found] == [[2], [2], [1, 2], []]
    assert [one.step for one in found[:3]] == [1, 2, 3]
    assert not leader.outstanding


def test_groups_of_different_widths_share_the_wider_columns() -> None:
    """One group prefills, a token a row at most, while the other one's rows may gain three."""
    narrow = output([1, 2], logprobs=logprobs(2, 2))
    wide = StepOutput(9, [5], [501, 502, 503], [2], width=3)
    merged = merge_outputs([narrow, wide])
    assert merged.width == 3
    assert merged.tokens == [101, 0, 0, 102, 0, 0, 501, 502, 503]
    assert (merged.counts, merged.request_ids) == ([1, 1, 2], [1, 2, 5])
    assert merged.logprobs is not None
    assert merged.logprobs.chosen_BW.shape == (3, 3)
    assert merged.logprobs.top_ids_BWN.shape == (3, 3, 2)
    assert merged.logprobs.top_ids_BWN[:2, 0].tolist() == logprobs(2, 2).top_ids_BWN[:, 0].tolist()

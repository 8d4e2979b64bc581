"""Results of a wrong shape are refused by name where they are appended, captured and landed; nothing of them is kept.

Kernels take the shapes that they are told, so on their path it is as with torch's: refused before anything is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from runtime.execute.device.cpu_twin import TwinDevice
from runtime.execute.proposer import Proposed
from runtime.execute.result_reader import ResultError, ResultReader
from runtime.execute.result_ring import ResultRing, ResultShape
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.logprobs import TokenLogprobs
from runtime.execute.sampling.sampler import Draw, Verdict
from runtime.execute.step.commit import commit
from runtime.execute.step.gather import Rows, gather_decode_in_torch, gather_window_in_torch
from runtime.execute.step.graphs import CaptureError
from runtime.execute.step.step_io_kernels import StepKernels
from tests.gpu.slot_cases import BLOCK_SIZE, Case, random_case, same_state
from tests.plant import make_row_graphs, plant
from tests.runtime.execute.plans import decode_step

ROWS, WIDTH, TOP = 4, 3, 2


def integers(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int32)


def logprobs(*leading: int, top: int = TOP) -> TokenLogprobs:
    return TokenLogprobs(torch.zeros(leading), integers(*leading), integers(*leading, top), torch.zeros(*leading, top))


@pytest.fixture
def device() -> Iterator[TwinDevice]:
    with TwinDevice() as opened:
        yield opened


@pytest.fixture
def ring(device: TwinDevice) -> ResultRing:
    return ResultRing(device, entries=4, rows=ROWS, width=WIDTH, reported=2 + 2 * TOP)


# ---- append ----


def test_what_fits_is_appended_and_its_shape_known(ring: ResultRing) -> None:
    ring.append(integers(2, 3), integers(2), integers(2), logprobs(2, 3, top=1))
    assert ring.latest == ResultShape(2, 3, 4)
    ring.append(integers(4, 1), integers(4), integers(4), logprobs(4, top=0))
    assert ring.latest == ResultShape(4, 1, 2)
    ring.append(integers(4, 3), integers(4), integers(4))
    assert ring.latest == ResultShape(4, 3)
    assert ring.appended_1.item() == 3
    ring.undo()
    assert ring.latest is None


@pytest.mark.parametrize(
    ("tokens", "counts", "finish", "message"),
    [
        ((4,), (4,), (4,), r"results of tokens \[4\]; they are to be \[B, W\]"),
        ((2, 3, 1), (2,), (2,), r"results of tokens \[2, 3, 1\]"),
        ((4, 2), (3,), (4,), r"results of 4 rows x 2 tokens with counts \[3\] instead of \[4\]"),
        ((4, 2), (4,), (4, 2), r"results of 4 rows x 2 tokens with finish \[4, 2\] instead of \[4\]"),
        ((4, 2), (4, 1), (2,), r"counts \[4, 1\] instead of \[4\], finish \[2\] instead of \[4\]"),
        ((2, 4), (2,), (2,), "results of 2 rows x 4 tokens, .* an entry of the ring has room for 4 rows x 3 tokens"),
        ((5, 1), (5,), (5,), "results of 5 rows x 1 tokens, .* an entry of the ring has room for 4 rows x 3 tokens"),
    ],
)
def test_append_refuses_other_shapes(
    ring: ResultRing, tokens: tuple[int, ...], counts: tuple[int, ...], finish: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ring.append(integers(*tokens), integers(*counts), integers(*finish))
    assert (ring.appended_1.item(), ring.buffer_EX.any().item()) == (0, False)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (logprobs(3, 3), r"\[9, 9, 18, 18\] words reported with 6 tokens"),
        (logprobs(2, 3)._replace(rank=integers(2)), r"\[6, 2, 12, 12\] words reported with 6 tokens"),
        (logprobs(2, 3)._replace(top_values=torch.zeros(5, 2)), r"\[6, 6, 12, 10\] words reported with 6 tokens"),
        (logprobs(2, 3, top=3), "8 words reported with each; an entry .* 6 words reported with each"),
    ],
    ids=["tokens", "rank", "top values", "likely tokens"],
)
def test_append_refuses_log_probabilities_of_other_tokens(ring: ResultRing, parts: TokenLogprobs, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ring.append(integers(2, 3), integers(2), integers(2), parts)
    assert (ring.appended_1.item(), ring.buffer_EX.any().item()) == (0, False)


# ---- land ----


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ({"bucket": 5}, "5 rows x 1 tokens"),
        ({"width": 4}, "2 rows x 4 tokens"),
        ({"logprobs": 3}, "8 words reported with each"),
    ],
    ids=str,
)
def test_landing_refuses_what_an_entry_cannot_hold(
    device: TwinDevice, ring: ResultRing, shape: dict[str, Any], found: str
) -> None:
    """Before the step is launched; its entry is the next one's."""
    landing = ResultReader(device, ring)
    with pytest.raises(ValueError, match=f"results of .*{found}.* an entry of the ring has room for 4 rows x 3"):
        landing.reserve(decode_step(1, (5, 6), **shape))
    ticket = landing.reserve(decode_step(2, (5, 6), bucket=4, width=2))
    device.compute.submit(lambda: ring.append(integers(4, 2), integers(4), integers(4)))
    device.compute.record(ticket.ready)
    landing.submit(ticket)
    assert landing.take(2).tokens == [1] * 4
    assert landing.counters.device_to_host_bytes == 4 * ResultShape(4, 2).words
    landing.close()


def test_landing_refuses_fewer_rows_than_the_plan_has(device: TwinDevice, ring: ResultRing) -> None:
    landing = ResultReader(device, ring)
    ticket = landing.reserve(decode_step(1, (5, 6, 7), bucket=2))
    device.compute.submit(lambda: ring.append(integers(2, 1), integers(2), integers(2)))
    device.compute.record(ticket.ready)
    landing.submit(ticket)
    with pytest.raises(ResultError, match="step 1: the plan has 3 rows, its results have 2"):
        landing.take(1)
    landing.close()


# ---- capture ----


@pytest.mark.parametrize(
    ("append", "found"),
    [
        (
            lambda ring, rows: ring.append(integers(rows, 3), integers(rows), integers(rows)),
            "3 rows x 3 tokens, 0 words",
        ),
        (lambda ring, rows: ring.append(integers(2, 2), integers(2), integers(2), logprobs(2, 2)), "2 rows x 2"),
        (lambda ring, rows: ring.append(integers(3, 2), integers(3), integers(3), logprobs(6, top=1)), "4 words"),
        (lambda ring, rows: None, "no shape"),
    ],
    ids=["width", "rows", "likely tokens", "nothing"],
)
def test_a_graph_of_other_results_than_will_be_read_is_not_captured(
    ring: ResultRing, append: Callable[[ResultRing, int], None], found: str
) -> None:
    device = TwinDevice()
    variant = SamplingVariant(logprobs=True, top_logprobs=TOP)
    row_maps = {3: torch.zeros(3, dtype=torch.int64)}
    graphs = make_row_graphs("toy", device, lambda rows_B, *_: append(ring, len(rows_B)), ring, row_maps, width=2)
    expected = f"the toy graph of 3 rows failed: .*results of .*{found}.*; they are to be read as 3 rows x 2 tokens, 6 "
    with pytest.raises(CaptureError, match=expected):
        graphs.warm_up((variant,))


# ---- the end of a step ----


class Drawn(NamedTuple):
    draw: Draw
    verdict: Verdict


def drawn(tokens: int) -> Drawn:
    counts = integers(tokens)
    return Drawn(Draw(counts.to(torch.int64), counts > 0), Verdict(counts, counts - 1))


def window_of(case: Case, width: int) -> Rows:
    proposed = Proposed(torch.zeros(len(case.rows_B), width - 1, dtype=torch.int64))
    columns = case.tables.gather(case.rows_B)
    return gather_window_in_torch(case.tables, case.rows_B, columns, proposed, BLOCK_SIZE, width)


def never(*_: object) -> Any:
    raise AssertionError("a kernel was launched")


@pytest.fixture(params=["torch", "kernels"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "kernels":
        plant(monkeypatch, lambda *_: StepKernels(*[never] * 6), part="step.kernels")
    return str(request.param)


def change(window: Rows, **fields: Any) -> Rows:
    return replace(window, **{name: made(getattr(window, name)) for name, made in fields.items()})


def verdict_of(counts: int, finish: int) -> Verdict:
    return Verdict(integers(counts), integers(finish))


@pytest.mark.parametrize(
    ("width", "changed", "parts", "message"),
    [
        (3, {}, drawn(11), r"4 rows x 3 tokens with draws \[11\] instead of \[12\], counts \[11\] .*, finish \[11\] "),
        (3, {}, drawn(12)._replace(verdict=verdict_of(12, 4)), r"with finish \[4\] instead of \[12\]$"),
        (3, {}, drawn(12)._replace(verdict=verdict_of(4, 12)), r"with counts \[4\] instead of \[12\]$"),
        (3, {"limit_B": lambda _: integers(4, 1)}, drawn(12), r"with limits \[4, 1\] instead of \[4\]$"),
        (3, {"scripted_B": lambda _: integers(3)}, drawn(12), r"with scripted \[3\] instead of \[4\]$"),
        (3, {"rows_B": lambda rows_B: rows_B[:3]}, drawn(12), r"with slots \[3\] instead of \[4\]$"),
        (3, {"position_BW": lambda at_BW: at_BW[:, 1:]}, drawn(12), r"with positions \[4, 2\] instead of \[4, 3\]$"),
        (3, {"kv_slots_BW": lambda at_BW: at_BW[1:]}, drawn(12), r"with KV places \[3, 3\] instead of \[4, 3\]$"),
        (2, {}, drawn(12), "rows of 3 tokens may not gain 2$"),
        (4, {}, drawn(12), "rows of 3 tokens may not gain 4$"),
    ],
    ids=["draws", "finish", "counts", "limits", "scripted", "slots", "positions", "places", "narrower", "wider"],
)
def test_a_window_of_other_shapes_is_not_committed(
    path: str,
    width: int,
    changed: dict[str, Callable[[Tensor], Tensor]],
    parts: Drawn,
    message: str,
) -> None:
    case = random_case(1, rows=4, blocks=3, width=5)
    before, window = case.on("cpu"), change(window_of(case, 3), **changed)
    with pytest.raises(ValueError, match=message):
        commit(case.tables, case.ring, window, *parts, width)
    same_state(case, before)


@pytest.mark.parametrize(("rows", "width"), [(4, 2), (3, 3)], ids=str)
def test_a_window_that_an_entry_cannot_hold_is_not_committed(path: str, rows: int, width: int) -> None:
    case, small = random_case(1, rows=4, blocks=3, width=5), random_case(1, rows=4, blocks=3, width=5).ring
    small.room = ResultShape(rows, width, 4)
    with pytest.raises(ValueError, match=f"4 rows x 3 tokens, .* the ring has room for {rows} rows x {width} tokens"):
        commit(case.tables, small, window_of(case, 3), *drawn(12), 3)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (drawn(5), r"results of 4 rows x 1 tokens with draws \[5\] instead of \[4\], counts \[5\] .*, finish \[5\] "),
        (
            drawn(4)._replace(verdict=verdict_of(1, 4)),
            r"results of 4 rows x 1 tokens with counts \[1\] instead of \[4\]$",
        ),
        (
            drawn(4)._replace(verdict=verdict_of(4, 3)),
            r"results of 4 rows x 1 tokens with finish \[3\] instead of \[4\]$",
        ),
    ],
    ids=["tokens", "counts", "finish"],
)
def test_draws_of_other_rows_are_not_written_back(path: str, parts: Drawn, message: str) -> None:
    case = random_case(1, rows=4, blocks=3)
    before, rows = case.on("cpu"), gather_decode_in_torch(case.tables, case.rows_B, BLOCK_SIZE)
    with pytest.raises(ValueError, match=message):
        commit(case.tables, case.ring, rows, *parts, 1)
    others = replace(rows, columns=case.tables.gather(case.rows_B[1:]))
    with pytest.raises(ValueError, match=r"with lengths \[3\] instead of \[4\]$"):
        commit(case.tables, case.ring, others, *drawn(4), 1)
    same_state(case, before)


def test_rows_that_an_entry_cannot_hold_are_not_written_back(path: str) -> None:
    case = random_case(1, rows=4, blocks=3)
    case.ring.room = ResultShape(3, 1, 4)
    before, rows = case.on("cpu"), gather_decode_in_torch(case.tables, case.rows_B, BLOCK_SIZE)
    with pytest.raises(ValueError, match=r"results of 4 rows x 1 tokens, .* the ring has room for 3 rows x 1 tokens"):
        commit(case.tables, case.ring, rows, *drawn(4), 1)
    same_state(case, before)

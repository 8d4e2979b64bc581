"""The figures of one measured point, and what it was measured with: what benches write and reports read.

Knows: names and units. Does not know: how a figure was measured, the files that hold it (results.py, report/rows.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One batch, medians over ``runs`` runs; rates are None where there is none.

    ``tok_s``: generated tokens a second; ``tok_s_per_gpu``: divided by ranks; ``tok_s_per_user``: by ``batch``.
    ``chained_ratio``: steps launched while another was in flight. ``device_idle``: share of the decode window in which
    the device ran no step. ``ttft_s``: until the whole batch has its first token. ``startup_s``: from the start of this
    process to its first token. ``speculation``: the method, "synthetic" where a script says what is kept;
    ``accepted_length``: tokens a round. None without.
    """

    hw: str
    kind: str
    model: str
    precision: str
    tp: int
    ep: int
    dp: int = 1
    batch: int
    input_len: int | None
    output_len: int | None
    chain_depth: int
    runs: int
    tpot_ms: float | None = None
    tpot_ms_min: float | None = None
    tpot_ms_max: float | None = None
    ttft_s: float | None = None
    tok_s: float | None = None
    tok_s_per_gpu: float | None = None
    tok_s_per_user: float | None = None
    roofline_fraction: float | None = None
    chained_ratio: float | None = None
    device_idle: float | None = None
    startup_s: float | None = None
    speculation: str | None = None
    num_speculative_tokens: int | None = None
    accepted_length: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(Measured):
    """A flat row of a points.jsonl. ``refused`` says why it has no rate; the rates are None then.

    ``bandwidth_fraction``: bytes that a step must read, over its time and the device's bandwidth. ``round_ms``: of a
    decode step of the full batch, where it may gain several tokens; TPOT is that over the tokens that a row gained.
    ``roofline_floor_ms`` is of a step of one token a row, also where rows gain several; ``round_floor_ms``: of a round.
    """

    framework: str = "lockstride"
    refused: str | None
    roofline_floor_ms: float | None
    bandwidth_fraction: float | None
    round_ms: float | None = None
    round_floor_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePoint(Measured):
    """A flat row of `bench serve`. Times are medians over runs of vLLM's figures of each run, in milliseconds.

    ``batch``: requests that may run at once. ``tok_s``: output tokens over the whole run; ``steady_tok_s``: over its
    steady window, None where it has none. ``tok_s_per_user``: 1000 / ``tpot_ms``. ``ttft_s`` and ``tpot_ms`` are
    medians over requests; the latter's least and most are over runs. ``label``: names the point's files.
    ``request_rate`` None: all at once. ``max_concurrency`` None: no limit. ``refused``: why it counts for nothing.
    """

    framework: str = "lockstride"
    refused: str | None = None
    label: str
    dataset: str
    seed: int
    num_prompts: int
    request_rate: float | None
    burstiness: float | None
    max_concurrency: int | None
    duration_s: float
    request_throughput: float
    request_goodput: float | None
    total_token_throughput: float
    steady_tok_s: float | None
    median_ttft_ms: float | None
    p90_ttft_ms: float | None
    p99_ttft_ms: float | None
    median_tpot_ms: float | None
    p90_tpot_ms: float | None
    p99_tpot_ms: float | None
    median_itl_ms: float | None
    p90_itl_ms: float | None
    p99_itl_ms: float | None
    median_e2el_ms: float | None
    p90_e2el_ms: float | None
    p99_e2el_ms: float | None

"""The page of /metrics: what it makes of the counts of an engine."""

from __future__ import annotations

import os
import re
from os import pwrite
from pathlib import Path
from unittest import mock

import pytest
from prometheus_client.parser import text_string_to_metric_families

from launch.serve.metrics import Metrics
from runtime.frontend.serve_messages import ITERATION_BUCKETS, Stats
from runtime.observe.step_record import AGREEMENT_BOUNDS

DOCS = Path(__file__).parents[3] / "docs"


def page(counters: dict[str, float]) -> str:
    """Of an engine that has counted so far; requests of this process: one of 400 prompt tokens."""
    tokens, seconds = ((0,) * (len(bounds) + 1) for bounds in (ITERATION_BUCKETS, AGREEMENT_BOUNDS))
    metrics = Metrics((), 0)
    metrics.count("vllm:prompt_tokens", 400)
    return metrics.text("m", None, Stats(counters, 0, 0, 0, 1, False, 0, 0, tokens, 0, seconds, 0.0)).decode()


def samples(text: str) -> dict[str, float]:
    """Of those without labels of their own, the value by name."""
    return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}


def test_the_prefix_hit_rate_is_of_what_was_looked_up() -> None:
    """A request that lost its memory is looked up again, so its hits may be more than the tokens of prompts."""
    found = samples(page({"prefix_query_tokens": 966.0, "prefix_hit_tokens": 424.0}))
    assert found["vllm:prompt_tokens_total"] == 400
    assert found["vllm:prefix_cache_queries_total"] == 966
    assert found["vllm:prefix_cache_hits_total"] == 424


def test_what_is_of_now_is_a_gauge() -> None:
    shown = page({"fenced_blocks": 3.0, "evictions": 2.0})
    kinds = {family.name: family.type for family in text_string_to_metric_families(shown)}
    assert kinds["lockstride:fenced_blocks"] == "gauge"
    assert kinds["lockstride:evictions"] == "counter"
    found = samples(shown)
    assert found["lockstride:fenced_blocks"] == 3
    assert "lockstride:fenced_blocks_total" not in found


def test_groups_with_windows_and_what_requests_were_evicted_for_have_names() -> None:
    used = {"window_blocks{128}": 40.0, "window_blocks_used{128}": 7.0, "window_blocks{1024}": 90.0}
    shown = page({**used, "evicted_for{full}": 2.0, "evicted_for{window_128}": 1.0})
    families = {f.name: f for f in text_string_to_metric_families(shown)}
    assert families["lockstride:window_blocks"].type == "gauge"
    held = {s.labels["window"]: s.value for s in families["lockstride:window_blocks"].samples}
    assert held == {"128": 40, "1024": 90}
    evicted = {s.labels["kv_group"]: s.value for s in families["lockstride:evicted_for"].samples}
    assert evicted == {"full": 2, "window_128": 1}


@pytest.mark.parametrize("document", ["observability.md", "serving.md", "speculation.md"])
def test_metrics_that_a_document_names_are_on_the_page(document: str) -> None:
    labelled = ("fallbacks", "finished", "speculation_narrowed", "speculation_off")
    places = ("spec_accepted_per_position", "spec_compared_per_position")
    shown = page({"fenced_blocks": 1.0, **{f"{name}{{1}}": 1.0 for name in (*labelled, *places)}})
    there = {f.name for f in text_string_to_metric_families(shown) if f.type != "counter"} | samples(shown).keys()
    named = set(re.findall(r"`((?:vllm|lockstride):\w+)", (DOCS / document).read_text()))
    assert named
    assert named <= there


def test_counts_outlive_a_process_and_are_those_of_all() -> None:
    """What was being written when a process died is not counted, and costs nothing of what was saved before."""
    files = tuple(os.memfd_create("counts") for _ in range(2))
    one, other = Metrics(files, 0), Metrics(files, 1)
    for metrics, tokens in ((one, 5), (other, 7)):
        metrics.count("vllm:prompt_tokens", tokens)
        metrics.save()
    for _ in range(3):
        one.count("vllm:prompt_tokens", 1)
        one.save()
    assert [metrics.all().counters["vllm:prompt_tokens"] for metrics in (one, other)] == [15, 15]
    one.count("vllm:prompt_tokens", 100)
    with mock.patch("os.pwrite", lambda file, data, place: pwrite(file, data[:20], place)):
        one.save()
    assert other.all().counters["vllm:prompt_tokens"] == 15
    again = Metrics(files, 0)
    again.count("vllm:prompt_tokens", 1)
    again.save()
    assert other.all().counters["vllm:prompt_tokens"] == 16
    for file in files:
        os.close(file)

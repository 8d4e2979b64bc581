"""What users' scripts rely on, as the code has it: each command's flags, the fields of rows and files, their words and
versions.

Knows: how each is found: flags from the parser, fields from the types that are written or from a row of each form.
Does not know: what they should be (public_face.json), who compares (test_public_face.py).

    python -m tests.launch.public_face    records what the code has now in public_face.json

A field is a dotted path: ``[]`` an element of a list, ``*`` a key that is data (a token id, a reason).
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec

import launch.serve.bodies as served
import launch.sweep.point as sweep_point
import launch.sweep.report.rows as report_rows
import launch.tune.journal as tune_journal
import models.expert_load as expert_load
import models.kernels.matmul.choice_table as choice_table
import parallel.control.wire.frames as control_frames
import runtime.daemon.frames as daemon_frames
from launch.api.body_rules import Prompt
from launch.api.parser import BadLine, Form, PreparedRequest
from launch.api.response import answer_row, error_row
from launch.api.schema import ChatBody, CompletionBody, SimpleLine
from launch.bench.batches import BatchRun
from launch.bench.latency import run_figures
from launch.bench.load.figures import (
    batch_figures,
    detail_lists,
    engine_figures,
    load_figures,
    peaks,
    request_rows,
    run_header,
    timeline,
)
from launch.bench.load.journal import Journal, Sample, Served
from launch.bench.point import Point, ServePoint
from launch.bench.session import DeviceWindow
from launch.bench.speculation import Rounds
from launch.cli import build_parser
from launch.engine_options import add_engine_options
from launch.generate.summary import Summary
from launch.serve.metrics import Metrics
from launch.sweep.ledger import Began, Outcome, Plan, PlannedPoint
from launch.sweep.status import PointStatus, SweepStatus
from launch.sweep.submit import Submitted
from models.kernels.attention.decode_variant import DecodeVariant
from parallel.comm.call_log import CallRun, Calls
from parallel.comm.symmetric_all_reduce import SizeLimits
from parallel.control.errors import Cause, Verdict
from parallel.control.wire.frames import Heartbeat
from parallel.layers.experts import ExpertSplit
from runtime.frontend.outputs import Completion, RequestOutput, Timing, TokenLogprob
from runtime.frontend.serve_messages import ITERATION_BUCKETS, Ready, Stats
from runtime.observe.step_record import AGREEMENT_BOUNDS, StepRecord
from runtime.observe.timeline import Part, write_trace
from runtime.schedule.request import FinishReason, SamplingParams
from runtime.watchdog.blame import Sign
from runtime.watchdog.crash_report import Evidence, write_bundle, write_summary

RECORD = Path(__file__).with_name("public_face.json")
ENGINE = "(the engine's)"  # in a command's flags: all of the engine's
Face = dict[str, dict[str, list[str]]]  # section -> what -> names

_SHORT = 60
_WIDTH = 116


def found() -> Face:
    """All of it, in the order of public_face.json."""
    return {
        "flags": dict(_flags()),
        "fields": {what: sorted(names) for what, names in _fields()},
        "words": _words(),
        "formats": _formats(),
    }


def as_json(face: Face) -> str:
    """As JSON that people can read: names in a row."""
    sections = []
    for section, entries in face.items():
        lines = [f"  {json.dumps(what)}: {_row(names)}" for what, names in entries.items()]
        sections.append(f" {json.dumps(section)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def _row(names: list[str]) -> str:
    lines = [""]
    for name in map(json.dumps, names):
        if len(lines[-1]) + len(name) > _WIDTH:
            lines.append("")
        lines[-1] += f"{name}, "
    lines[-1] = lines[-1].removesuffix(", ")
    inside = "\n   ".join(line.rstrip() for line in lines)
    return f"[{inside}]" if len(inside) < _SHORT else f"[\n   {inside}\n  ]"


# ---- flags ----


def _flags() -> Iterator[tuple[str, list[str]]]:
    """Of each command: spellings of one flag joined by a blank, then its words, where only some are taken."""
    bare = argparse.ArgumentParser(add_help=False)
    add_engine_options(bare)
    engine = _own_flags(bare)
    yield ENGINE, sorted(engine)
    for name, parser in _commands("", build_parser()):
        own = _own_flags(parser)
        shared = [ENGINE] if engine <= own else []
        yield name, shared + sorted(own - engine if shared else own)


def _commands(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in below:
        for word, each in action.choices.items():
            yield from _commands(f"{name} {word}".strip(), each)
    if not below:
        yield name, parser


def _own_flags(parser: argparse.ArgumentParser) -> set[str]:
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    return {" ".join(action.option_strings or [f"({action.dest})"]) + _choices(action) for action in actions}


def _choices(action: argparse.Action) -> str:
    return "" if action.choices is None else " {" + ",".join(map(str, action.choices)) + "}"


# ---- fields ----


def names_in(value: Any, path: str = "") -> set[str]:
    """Paths of everything in a plain value that has nothing below it."""
    if isinstance(value, Mapping) and value:
        keys = ((key if isinstance(key, str) and key.isidentifier() else "*", each) for key, each in value.items())
        return {name for key, each in keys for name in names_in(each, f"{path}.{key}" if path else key)}
    if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        return {name for each in value if each is not None for name in names_in(each, f"{path}[]")}
    return {path}


def _of(kind: Any) -> set[str]:
    """Of what is written as it is."""
    if is_dataclass(kind):
        return {field.name for field in fields(kind)}
    return set(kind.__struct_fields__)


def _fields() -> Iterator[tuple[str, set[str]]]:
    yield "generate input, simple form", _of(SimpleLine)
    yield "generate input, body of /v1/completions", _of(CompletionBody)
    yield "generate input, body of /v1/chat/completions", _of(ChatBody)
    yield from _generate_rows()
    yield "generate --summary", _summary()
    yield "serve, body of /v1/completions", _of(served.CompletionBody)
    yield "serve, body of /v1/chat/completions", _of(served.ChatBody)
    yield "serve, body of /tokenize", _of(served.TokenizeBody)
    yield "serve, body of /detokenize", _of(served.DetokenizeBody)
    yield "serve, /metrics beside the engine's counters", _metrics()
    yield "bench latency *.points.jsonl", _of(Point)
    yield "bench serve *.points.jsonl", _of(ServePoint)
    yield from _bench_files()
    below = _under("rows[]", report_rows.Row) | _under("failures[]", report_rows.Failure)
    yield "report.json", _of(report_rows.Report) - {"rows", "failures"} | below
    yield "sweep ledger plan.json", _of(Plan) - {"points"} | _under("points[]", PlannedPoint)
    yield "sweep ledger point.json", _of(PlannedPoint)
    yield "sweep ledger began.json", _of(Began)
    yield "sweep ledger outcome.json", _of(Outcome)
    yield "sweep ledger slurm/jobs.jsonl", _of(Submitted)
    yield "sweep status --json", _of(SweepStatus) - {"points"} | _under("points[]", PointStatus)
    yield from _timeline()
    yield from _bundle()
    yield "tuned tables", _table()
    yield from _journal_of_tune()
    yield "--expert-load", _expert_load()


def _under(path: str, kind: Any) -> set[str]:
    return {f"{path}.{name}" for name in _of(kind)}


def _generate_rows() -> Iterator[tuple[str, set[str]]]:
    logprob = TokenLogprob(5, -0.5, 1, ((5, -0.5), (6, -1.0)))
    answers = tuple(
        Completion(i, "t", (5,), FinishReason.LENGTH, 1, (logprob,), rounds=1, accepted=1) for i in range(2)
    )
    prompt, asked = (1, 2), SamplingParams(max_tokens=1)
    for form in Form:
        request = PreparedRequest(1, "a", form, (Prompt("p", prompt),), asked, model="m", echo=form is Form.COMPLETION)
        several = (1, 2) if form is Form.SIMPLE else (1,)
        names: set[str] = set()
        for count in several:
            output = RequestOutput("a", "p", prompt, answers[:count], Timing(0, 1, 1, 2), (None, logprob))
            names |= names_in(msgspec.json.decode(answer_row(request, [output], None, 0)))
        yield f"generate output, {form.name.lower()}", names
        bad = BadLine(1, "a", form, "invalid_json", "m")
        yield f"generate error row, {form.name.lower()}", names_in(msgspec.json.decode(error_row(bad)))


def _summary() -> set[str]:
    labelled = ("chain_breaks", "finished", "late_captures", "fallbacks", "group_requests", "group_idle_steps")
    counters = {f"{name}{{a reason}}": 1 for name in (*labelled, "speculation_off", "speculation_narrowed")}
    return names_in(Summary().figures(counters | {"spec_num_drafts": 1}))


def _metrics() -> set[str]:
    ready = Ready(1, 1, (), 1.0, {"block_size": "1"}, 1)
    tokens, seconds = ((0,) * (len(bounds) + 1) for bounds in (ITERATION_BUCKETS, AGREEMENT_BOUNDS))
    stats = Stats({}, 0, 0, 0, 1, False, 0, 0, tokens, 0, seconds, 0.0)
    page = Metrics((), 0).text("m", ready, stats).decode()
    return {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE ")}


def _bench_files() -> Iterator[tuple[str, set[str]]]:
    journal = _journal()
    rounds = Rounds("mtp", 1, 1, 1, 1, (1,), (1,), {"a reason": 1}, {"1": 1})
    run = BatchRun(journal, 1.0, 1.0, None, None, rounds, 1.0)
    figures = names_in(batch_figures(journal, "m", 1) | run_figures(run)) - {"device"}
    yield "bench latency *.b<batch>-run<i>.json", figures | _under("device", DeviceWindow)
    yield "bench latency *.requests.jsonl", {"run", *names_in(request_rows(journal)[0])}
    parts = (run_header("m", 1, 1.0, 1.0, 1), load_figures(journal, {}), peaks(journal), rounds.figures())
    counted = {"engine": engine_figures(journal)}
    yield "bench serve *-run<i>.json, figures", {name for part in (*parts, counted) for name in names_in(part)}
    yield "bench serve --save-detailed, added", names_in(detail_lists(journal))
    yield "bench serve *.requests.jsonl", names_in(request_rows(journal)[0])
    yield "bench serve *.timeline.jsonl", names_in(timeline(journal)[0])


def _journal() -> Journal:
    request = Served(2, 0.0, 0.0, 0.0, [1.0, 2.0], [1, 1], 2.0, "length")
    counts = dict.fromkeys(("prefill_steps", "decode_steps", "mixed_steps", "chained_steps"), 0)
    counts |= {"prefix_hit_tokens": 0, "prefix_query_tokens": 0}
    samples = (Sample(0.0, 0, counts), Sample(2.0, 2, {name: count + 1 for name, count in counts.items()}))
    return Journal(0.0, 2.0, [request], samples, {}, {"chain_breaks{a reason}": 1, "steps": 1})


def _timeline() -> Iterator[tuple[str, set[str]]]:
    """Names and arguments of the events of a step of several groups, by thread."""
    step = StepRecord(0, 0, "decode", 8, 8, exchange_rows=8, gained=1, device_started_ms=0.0, device_ended_ms=1.0)
    file = io.BytesIO()
    write_trace(file, [Part(0, "host", "clock", 0, 0, 0, [step])])
    trace = json.loads(file.getvalue())
    yield "--timeline", names_in({key: value for key, value in trace.items() if key != "traceEvents"})
    threads = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    for thread, name in threads.items():
        slices = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == thread]
        named = {f"({event['name']})" for event in slices}
        yield f"--timeline, {name}", named | {path for event in slices for path in names_in(event)}


def _bundle() -> Iterator[tuple[str, set[str]]]:
    verdict = Verdict(Cause.COLLECTIVE, 0, 0, "why")
    beat = Heartbeat(1, 0, "land", 0.0, 1.0, 0, 0, 1, ((0, "all_reduce"),))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        written = write_bundle(folder, 0, verdict, Evidence(calls=lambda: Calls(0, 1, (CallRun(0, "all_reduce"),))))
        summary = write_summary(folder, 0, verdict, {0: Sign(beat, 0.0)}, 0.0)
        assert written is not None
        assert summary is not None
        yield "crash bundle, files of a rank", {path.name for path in written.iterdir()}
        yield "crash bundle, verdict.json", names_in(json.loads((written / "verdict.json").read_text()))
        yield "crash bundle, summary.json", names_in(json.loads(summary.read_text()))
    yield "crash bundle, steps.jsonl", _of(StepRecord)


def _table() -> set[str]:
    """Its parts, and the fields of each kind of choice."""
    kinds = {f"choices.*.{name}.{field}" for name, kind in choice_table._KINDS.items() for field in _of(kind)}
    shipped = sorted(choice_table.SHIPPED_CHOICES.glob("*.json"))
    held = {name: each for path in shipped for name, each in json.loads(path.read_text()).items()}
    parts = {name for name in names_in(held) if name.partition(".")[0] not in ("choices", "attention", "all_reduce")}
    return parts | kinds | _under("attention.*", DecodeVariant) | _under("all_reduce.*", SizeLimits)


def _journal_of_tune() -> Iterator[tuple[str, set[str]]]:
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "journal.jsonl"
        with tune_journal.opened(path, {}) as journal:
            journal.add(tune_journal.Measured("a", 1, None, None, None, 0.0))
            journal.avoid("a", None, "why")
        _, measured, avoided = map(json.loads, path.read_text().splitlines())
    yield "tune journal, measured", names_in(measured)
    yield "tune journal, avoided", names_in(avoided)


def _expert_load() -> set[str]:
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "load.json"
        expert_load.ExpertLoad("a", {0: (1, 1)}).write(path, 1, ExpertSplit())
        return names_in(json.loads(path.read_text()))


# ---- words and versions ----


def _words() -> dict[str, list[str]]:
    return {
        "finish_reason": sorted(reason.label for reason in FinishReason),
        "cause of a crash bundle": sorted(cause.value for cause in Cause),
        "kinds of a daemon's frames": [f"{kind.value} {kind.name}" for kind in daemon_frames.Kind],
    }


def _formats() -> dict[str, list[str]]:
    versions = {
        "tuned tables": choice_table.FORMAT,
        "tune journal": tune_journal.FORMAT,
        "report.json": report_rows.FORMAT,
        "key of a sweep's point": sweep_point.FORMAT,
        "expert load": expert_load.SCHEMA,
        "frames between ranks": control_frames.VERSION,
        "a daemon's frames": daemon_frames.VERSION,
    }
    return {what: [str(version)] for what, version in versions.items()}


if __name__ == "__main__":
    RECORD.write_text(as_json(found()), encoding="utf-8")
    print(f"{RECORD} is written: say in CHANGELOG.md what changed for users", file=sys.stderr)

"""The report as one HTML file: no scripts, nothing fetched, every text escaped.

Knows: how a report is laid out. Does not know: how its figures came about.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape

from launch.bench.point import ServePoint
from launch.sweep.report.load_plot import point_name
from launch.sweep.report.plots import Missing, Picture
from launch.sweep.report.rows import (
    Comparison,
    Report,
    Row,
    differences_between,
    differences_within,
    series_label,
    varying_names,
)

_LONGEST = 120  # characters of a fact's value

_CSS = """
:root { --ink: #1c2430; --soft: #5b6675; --line: #d9dee5; --paper: #ffffff; --band: #f5f7fa; --warn: #fff4e0;
  --bad: #b3261e; --good: #0b6e4f; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 28px 64px; max-width: 1280px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; }
h2 { font-size: 19px; margin: 36px 0 8px; padding-top: 12px; border-top: 1px solid var(--line); }
p { margin: 6px 0; }
.soft, figcaption { color: var(--soft); }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 18px 0; }
.card { flex: 1 1 200px; padding: 10px 14px; background: var(--band); border-radius: 8px; }
.card b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; }
.card span { display: block; color: var(--soft); font-size: 13px; }
.box { margin: 10px 0; padding: 10px 14px; border-left: 4px solid #e69f00; background: var(--warn);
  border-radius: 4px; }
figure { margin: 12px 0 0; }
figure img { width: 100%; height: auto; display: block; }
figcaption { font-size: 14px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 7px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { text-align: right; font-weight: 600; background: var(--band); }
th.text, td.text { text-align: left; }
td.long { white-space: normal; overflow-wrap: anywhere; }
tbody tr:nth-child(even) { background: #fafbfc; }
.slower, .failed { color: var(--bad); font-weight: 600; }
.faster { color: var(--good); font-weight: 600; }
code { font: 13px ui-monospace, "DejaVu Sans Mono", monospace; }
@media print { body { max-width: none; padding: 0; } h2 { break-after: avoid; } figure, tr { break-inside: avoid; } }
"""

DEFINITIONS = (
    ("tok/s", "generated tokens a second: batch / TPOT for fixed batches, the saturated part of a run for throughput"),
    ("TPOT", "time per output token: (t(n) - t(1)) / (n - 1) for fixed batches, (last - first) / (tokens - 1) else"),
    ("TTFT", "until the whole batch has its first token; under load until a request has it"),
    ("ITL", "under load: every gap between two tokens of a request"),
    ("E2EL", "under load: from when a request could begin to its last token"),
    ("steady", "tok/s between ramp and drain"),
    ("good req/s", "requests a second that met every goal of --goodput"),
    ("tok/s/GPU", "tok/s divided by ranks, on CPUs too"),
    ("tok/s/user", "tok/s divided by the batch"),
    ("spread", "smallest to largest TPOT over the runs of a point"),
    ("speculation", "method and guesses a round; synthetic: a script says how many are kept, so texts mean nothing"),
    ("tok/round", "tokens that a round of speculation gained, the one that the model drew itself included"),
    ("of floor", "the time that bytes and FLOPs need, as a share of the time taken; only where --roofline was set"),
)


def html(
    report: Report, pictures: Sequence[Picture | Missing], comparison: Comparison | None, earlier_name: str = ""
) -> str:
    """The whole file."""
    parts = [_head(report), _cards(report), _differences_within(report)]
    if comparison is not None:
        parts.append(_comparison(report, comparison, earlier_name))
    for picture in pictures:
        parts.append(_picture(picture))
    parts += [_load_table(report), _table(report), _failures(report), _environment(report), _definitions()]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(report.name)}: Lockstride sweep</title><style>{_CSS}</style></head><body>",
            *(part for part in parts if part),
            "</body></html>\n",
        ]
    )


def _head(report: Report) -> str:
    made = datetime.fromtimestamp(report.created, UTC).strftime("%Y-%m-%d %H:%M UTC")
    hardware = ", ".join(sorted({row.hw for row in report.rows})) or "nothing measured"
    failed = f', <span class="failed">{len(report.failures)} failed</span>' if report.failures else ""
    models = ", ".join(sorted({row.model for row in report.rows}))
    return (
        f"<h1>{escape(report.name)}</h1>"
        f'<p class="soft">{escape(models)} on {escape(hardware)}; {report.points_done}{failed}; '
        f"report of {made}</p>"
    )


def _cards(report: Report) -> str:
    rated = [row for row in report.rows if row.tok_s is not None and row.tpot_ms is not None]
    if not rated:
        return ""
    names = ["model", *varying_names(rated)] if len({row.model for row in rated}) > 1 else varying_names(rated)
    fastest = max(rated, key=lambda row: row.tok_s or 0.0)
    leanest = max(rated, key=lambda row: row.tok_s_per_gpu or 0.0)
    quickest = min(rated, key=lambda row: row.tpot_ms or float("inf"))
    cards = (
        ("most tokens/s", f"{fastest.tok_s:,.0f}", fastest),
        ("most tokens/s/GPU", f"{leanest.tok_s_per_gpu:,.0f}", leanest),
        ("lowest TPOT", f"{quickest.tpot_ms:.3f} ms", quickest),
    )
    shown = "".join(
        f'<div class="card"><span>{name}</span><b>{value}</b><span>{escape(_label(row, names))}</span></div>'
        for name, value, row in cards
    )
    return f'<div class="cards">{shown}</div>'


def _label(row: Row, names: Sequence[str]) -> str:
    others = [name for name in names if name != "model"]
    model = [row.model] if "model" in names else []
    what = f"batch {row.batch}" if row.serve is None else f"load {point_name(row.serve)}"
    return " ".join([*model, series_label(row, others) if others else f"tp{row.tp}", what])


def _differences_within(report: Report) -> str:
    found = differences_within(report)
    if not found:
        return '<p class="soft">All points were measured with the same code, versions and machine settings.</p>'
    items = "".join(
        f"<li><b>{escape(fact)}</b>: {escape('; '.join(_short(value) for value in values))}</li>"
        for fact, values in found
    )
    return (
        '<div class="box"><b>Points of this report were not all measured alike.</b> Compare them with care.'
        f"<ul>{items}</ul></div>"
    )


def _comparison(report: Report, comparison: Comparison, earlier_name: str) -> str:
    earlier = comparison.earlier
    when = datetime.fromtimestamp(earlier.created, UTC).strftime("%Y-%m-%d %H:%M UTC")
    facts = differences_between(report, earlier)
    parts = [
        f"<h2>Against {escape(earlier_name or earlier.name)}</h2>",
        f'<p class="soft">The report of {when}. Faster or slower: the ranges of TPOT over runs do not overlap. '
        "One run has no range: its change is not judged. TTFT is not judged either.</p>",
        f'<p><span class="faster">{comparison.count("faster")} faster</span>, <span class="slower">'
        f"{comparison.count('slower')} slower</span>, {comparison.count('same')} within their spread, "
        f"{comparison.count('one run')} not judged (one run); "
        f"{len(comparison.only_now)} only here, {len(comparison.only_then)} only there.</p>",
    ]
    if facts:
        rows = [[escape(fact), escape(_short(then)), escape(_short(now))] for fact, then, now in facts]
        parts.append('<div class="box"><b>The environment differs</b>, which may be the reason.')
        parts.append(_html_table(("fact", "then", "now"), rows, texts=3) + "</div>")
    else:
        parts.append('<p class="soft">Code, versions and machine settings are the same.</p>')
    names = varying_names([change.now for change in comparison.changes])
    rows = []
    for change in comparison.changes:
        share = "-" if change.change is None else f"{change.change:+.1%}"
        now, then = change.now, change.then
        ttft = f"{now.ttft_s / then.ttft_s - 1:+.1%}" if now.ttft_s and then.ttft_s else "-"
        rows.append(
            [
                escape(now.model),
                escape(series_label(now, names)),
                str(now.batch) if now.serve is None else f"load {point_name(now.serve)}",
                _number(then.tpot_ms, 3),
                _spread(then),
                _number(now.tpot_ms, 3),
                _spread(now),
                f'<span class="{change.verdict.replace(" ", "-")}">{share} {change.verdict}</span>',
                ttft,
            ]
        )
    if rows:
        head = (
            "model",
            "settings",
            "batch",
            "TPOT then [ms]",
            "spread",
            "TPOT now [ms]",
            "spread",
            "change",
            "TTFT change",
        )
        parts.append(_html_table(head, rows, names=2))
    return "".join(parts)


def _picture(picture: Picture | Missing) -> str:
    if isinstance(picture, Missing):
        return f'<h2>{escape(picture.title)}</h2><p class="soft">Not drawn: {escape(picture.why)}.</p>'
    data = base64.b64encode(picture.svg).decode()
    return (
        f'<h2 id="{picture.name}">{escape(picture.title)}</h2><figure>'
        f'<img alt="{escape(picture.alt)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def _load_table(report: Report) -> str:
    served = [(row, row.serve) for row in report.rows if row.serve is not None]
    names = varying_names([row for row, _ in served])
    head = (
        *("model", "settings", "load", "dataset", "requests", "req/s", "good req/s", "tok/s", "steady"),
        *("TTFT p50 [ms]", "p99", "ITL p50 [ms]", "p99", "E2EL p50 [s]", "p99", "chained", "idle"),
        *_speculation_head([row for row, _ in served]),
    )
    rows = [
        [
            escape(row.model),
            escape(series_label(row, names)),
            escape(point_name(point)),
            escape(point.dataset),
            f"{point.num_prompts:,}",
            _number(point.request_throughput, 2),
            _number(point.request_goodput, 2),
            _number(point.tok_s, 0),
            _number(point.steady_tok_s, 0),
            *_times(point),
            _percent(point.chained_ratio),
            _percent(point.device_idle),
            *_speculation(row, head),
        ]
        for row, point in served
    ]
    return f'<h2 id="load-points">Points under load</h2>{_html_table(head, rows, names=4)}' if rows else ""


def _times(point: ServePoint) -> list[str]:
    shown = [_number(value, 2) for value in (point.median_ttft_ms, point.p99_ttft_ms)]
    shown += [_number(value, 2) for value in (point.median_itl_ms, point.p99_itl_ms)]
    return shown + [_number(value and value / 1e3, 2) for value in (point.median_e2el_ms, point.p99_e2el_ms)]


def _table(report: Report) -> str:
    measured = [row for row in report.rows if row.serve is None]
    names = varying_names(measured)
    head = (
        *("model", "settings", "batch", "runs", "TPOT [ms]", "spread", "p99 [ms]", "TTFT [s]", "tok/s", "tok/s/GPU"),
        *("tok/s/user", "of floor", "chained", "idle", "start [s]"),
        *_speculation_head(measured),
    )
    rows = [
        [
            escape(row.model),
            escape(series_label(row, names)),
            str(row.batch),
            str(row.runs),
            _number(row.tpot_ms, 3),
            _spread(row),
            _number(row.tpot_percentiles.get("99"), 3),
            _number(row.ttft_s, 3),
            _number(row.tok_s, 1),
            _number(row.tok_s_per_gpu, 1),
            _number(row.tok_s_per_user, 1),
            _percent(row.roofline_fraction),
            _percent(row.chained_ratio),
            _percent(row.device_idle),
            _number(row.startup_s, 1),
            *_speculation(row, head),
        ]
        for row in measured
    ]
    return f'<h2 id="points">All points</h2>{_html_table(head, rows, names=2)}' if rows else ""


def _speculation_head(rows: Iterable[Row]) -> tuple[str, ...]:
    """Columns that a table has where one of its points speculates."""
    return ("speculation", "tok/round") if any(row.speculation is not None for row in rows) else ()


def _speculation(row: Row, head: Sequence[str]) -> list[str]:
    """Cells below ``_speculation_head``."""
    if "tok/round" not in head:
        return []
    if row.speculation is None:
        return ["-", "-"]
    return [escape(f"{row.speculation}, k = {row.num_speculative_tokens}"), _number(row.accepted_length, 2)]


def _failures(report: Report) -> str:
    if not report.failures:
        return ""
    rows = [
        [escape(failure.label), escape(failure.reason), f"<code>{escape(failure.folder)}</code>"]
        for failure in report.failures
    ]
    return f'<h2 id="failed">Failed points</h2>{_html_table(("point", "why", "logs"), rows, texts=3)}'


def _environment(report: Report) -> str:
    rows = [[escape(fact), escape(_short(" | ".join(values)))] for fact, values in sorted(report.environments.items())]
    return f'<h2 id="environment">Measured on</h2>{_html_table(("fact", "value"), rows, texts=2)}' if rows else ""


def _definitions() -> str:
    rows = [[escape(word), escape(meaning)] for word, meaning in DEFINITIONS]
    return f"<h2>Words</h2>{_html_table(('word', 'meaning'), rows, texts=2)}"


def _html_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, names: int = 0, texts: int = 0) -> str:
    """``rows`` are HTML already. The first columns hold ``names``, or ``texts``, which may wrap; the others numbers."""
    kinds = ['class="text"'] * names + ['class="text long"'] * texts
    kinds += [""] * (len(head) - len(kinds))
    cells = "".join(f"<th {kind}>{escape(name)}</th>" for kind, name in zip(kinds, head, strict=True))
    lines = ("".join(f"<td {kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _spread(row: Row) -> str:
    if row.tpot_ms_min is None or row.tpot_ms_max is None:
        return "-"
    return f"{row.tpot_ms_min:,.3f} .. {row.tpot_ms_max:,.3f}"


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST else value[: _LONGEST - 3] + "..."

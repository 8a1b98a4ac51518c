"""The report of a run as one HTML page: the verdict, what happened when, what was checked, and the evidence.

It is made from what the run left in its folder, so that it can be made again: `run.json`, `verdict.json`,
`faults.jsonl`, `manifest.json` and the rows. The page needs no script and nothing from anywhere else.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np

from semel.charts import COLOURS, Axis, Series, Span, line_chart, short_number
from semel.verify.anomalies import ANOMALIES, TOLERATED, definition
from semel.verify.history import History
from semel.verify.timeline import Counts, Figures, Timeline, timeline_of

REPORT_NAME: Final = "report.html"
_FAULTS_LISTED_MAX: Final = 400
_SHADED_MAX: Final = 150
"""If there were more faults, those that did not take a process away are counted in a chart rather than shaded."""
_FAULT_PARTS: Final = 60
_POINTS_MAX: Final = 600
"""Of a line: a chart has no more pixels."""
_OF_TRANSACTIONS: Final = ("transactions committed", "aborted", "of unknown outcome")
_ENDURED: Final = ("process kills", "connection cuts", "pauses past every time-out")
_TAKES_AWAY: Final = frozenset({"kill", "restart", "pause", "disk", "storm", "worker-kill", "worker-pause", "zombie"})

STYLE: Final = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 15%, transparent);
        --good: #2e8b57; --bad: #c0392b; --dim: color-mix(in srgb, currentColor 60%, transparent); }
body { max-width: 860px; margin: 2rem auto; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
.dim { color: var(--dim); } .good { color: var(--good); } .bad { color: var(--bad); }
.verdict { border-left: 6px solid; padding: .6rem 1rem; margin: 1.2rem 0; font-size: 1.1rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: .8rem; }
.tiles div { border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
.tiles b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid var(--line); border-radius: 8px; font-size: 12.5px; }
.swatch { margin-right: .8rem; white-space: nowrap; }
.swatch::before { content: ""; display: inline-block; width: .8em; height: .8em; margin-right: .35em;
                  border-radius: 2px; background: var(--colour); opacity: .55; }
details summary { cursor: pointer; } svg { width: 100%; height: auto; }
"""


def write_report(folder: Path) -> Path:
    """Make the page from a run's folder; returns where it is."""
    run = json.loads((folder / "run.json").read_text())
    verdict = json.loads((folder / "verdict.json").read_text())
    faults_path = folder / "faults.jsonl"
    faults = [json.loads(line) for line in faults_path.read_text().splitlines()] if faults_path.exists() else []
    page = render(run, verdict, faults, timeline_of(History.in_folder(folder)))
    path = folder / REPORT_NAME
    path.write_text(page, encoding="utf-8")
    return path


def render(
    run: Mapping[str, Any], verdict: Mapping[str, Any], faults: Sequence[Mapping[str, Any]], timeline: Timeline
) -> str:
    """The page. `run` has what the run was asked for: workload, client, target, seed, command, and notes.

    A run of a user's own command has a `title` and its own `checks`.
    """
    title = _title(run)
    done = [fault for fault in faults if fault.get("outcome") == "done"]
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>semel verify: {escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f'<p class="dim">seed {run["seed"]}, {timeline.seconds:,} seconds, {escape(str(run.get("began", "")))}</p>',
            *_verdict(verdict),
            *_tiles(timeline, done, run),
            *_endured(verdict),
            *_charts(timeline, done),
            *_faults(done, run, timeline),
            *_checks(verdict, run),
            *_witnesses(verdict),
            *_again(run),
            "</body></html>\n",
        )
    )


def _title(run: Mapping[str, Any]) -> str:
    if "title" in run:
        return f"{run['title']}, on {run['target']}"
    kind = run.get("guarantee", "exactly-once")
    what = run["workload"] if kind == "exactly-once" else f"{run['workload']}, {kind},"
    return f"{what} with {run['client']} on {run['target']}"


def _verdict(verdict: Mapping[str, Any]) -> Iterator[str]:
    checked = ", ".join(f"{count:,} {escape(_words(name))}" for name, count in verdict["checked"].items())
    broken = [one for one in verdict["anomalies"] if one["count"] and not one["tolerated"]]
    if verdict["is_clean"]:
        text = f"<b>Exactly once.</b> Nothing was lost, repeated, torn or read too early: {checked}."
        yield f'<div class="verdict good">{text}</div>'
    else:
        names = ", ".join(f"{one['count']:,} of {escape(_words(one['name']))}" for one in broken)
        yield f'<div class="verdict bad"><b>Not exactly once:</b> {names}. Checked: {checked}.</div>'


def _tiles(timeline: Timeline, done: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> Iterator[str]:
    totals = timeline.totals
    tiles = {
        "records sent": totals["sent"],
        "transactions committed": totals["committed"],
        "aborted": totals["aborted"],
        "of unknown outcome": totals["unknown"],
        "records read meanwhile": totals["read"],
        "faults": len(done),
        "lives of processes": run.get("lives", 0),
    }
    if not timeline.knows_transactions:
        tiles = {name: tiles[name] for name in tiles if name not in _OF_TRANSACTIONS}
    yield '<div class="tiles">'
    for name, count in tiles.items():
        yield f"<div><b>{count:,}</b>{name}</div>"
    yield f"<div><b>{short_number(totals['sent'] / timeline.seconds)}/s</b>sent on average</div></div>"


def _endured(verdict: Mapping[str, Any]) -> Iterator[str]:
    counts = verdict.get("faults", {})
    told = [f"{counts[name]:,} {escape(name)}" for name in _ENDURED if counts.get(name)]
    if told:
        yield f"<p>Meanwhile there were {', '.join(told)}, and more: see the faults below.</p>"


def _charts(timeline: Timeline, done: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    is_crowded = len(done) > _SHADED_MAX
    shaded = [fault for fault in done if fault["kind"] in _TAKES_AWAY] if is_crowded else done
    colours = _colours(done)
    spans = _spans(timeline, shaded, colours)
    seconds = Axis("seconds")
    yield "<h2>What happened when</h2>"
    what = "faults that took a process away" if is_crowded else "faults"
    yield f'<p class="dim">Shaded: {what}. Point at one to see what it was.</p>'
    if shaded:
        kinds = [kind for kind in colours if any(fault["kind"] == kind for fault in shaded)]
        yield f"<p>{' '.join(_swatch(colours[kind], kind) for kind in kinds)}</p>"
    if is_crowded:
        yield line_chart(
            "Faults", _faults_over_time(timeline, done), x=seconds, y=Axis("a minute", is_logarithmic=True)
        )
    yield line_chart(
        "Records",
        [Series("sent", _per_second(timeline.sent)), Series("read", _per_second(timeline.read))],
        x=seconds,
        y=Axis("a second"),
        spans=spans,
    )
    if timeline.knows_transactions:
        yield from _transaction_charts(timeline, spans, seconds)
    if not np.isnan(timeline.unstable_records).all():
        yield line_chart(
            "What readers of committed records have to wait for",
            [Series("offsets", _known(timeline.unstable_records))],
            x=seconds,
            y=Axis("offsets from the last stable one to the end, all partitions"),
            spans=spans,
        )


def _transaction_charts(timeline: Timeline, spans: Sequence[Span], seconds: Axis) -> Iterator[str]:
    yield line_chart(
        "Transactions",
        [
            Series("committed", _per_second(timeline.committed)),
            Series("aborted", _per_second(timeline.aborted)),
            Series("unknown", _per_second(timeline.unknown)),
        ],
        x=seconds,
        y=Axis("a second"),
        spans=spans,
    )
    yield line_chart(
        "How long a commit takes",
        [Series("p50", _known(timeline.commit_p50_ms)), Series("p99", _known(timeline.commit_p99_ms))],
        x=seconds,
        y=Axis("ms", is_logarithmic=True),
        spans=spans,
    )


def _swatch(colour: str, kind: str) -> str:
    return f'<span class="swatch" style="--colour: {colour}">{escape(kind)}</span>'


def _per_second(counts: Counts) -> list[tuple[float, float]]:
    """In a long run the mean of a few seconds at a time."""
    step = _step(len(counts))
    return [(float(second), float(counts[second : second + step].mean())) for second in range(0, len(counts), step)]


def _known(figures: Figures) -> list[tuple[float, float]]:
    """In a long run the highest of a few seconds at a time: what stands out must stay. Nothing known is a gap."""
    step = _step(len(figures))
    parts = [(float(second), figures[second : second + step]) for second in range(0, len(figures), step)]
    return [(second, math.nan if np.isnan(part).all() else float(np.nanmax(part))) for second, part in parts]


def _step(count: int) -> int:
    return -(-count // _POINTS_MAX)


def _faults_over_time(timeline: Timeline, done: Sequence[Mapping[str, Any]]) -> list[Series]:
    """Each of the commonest kinds by itself, as many as there are colours, over parts of the run."""
    part_s = max(1, timeline.seconds // _FAULT_PARTS)
    parts = -(-timeline.seconds // part_s)
    counts = Counter(fault["kind"] for fault in done)
    series: list[Series] = []
    for kind, _ in counts.most_common(len(COLOURS)):
        at = [int(timeline.at_second(fault["begin_ns"]) // part_s) for fault in done if fault["kind"] == kind]
        per_part = np.bincount(np.clip(at, 0, parts - 1), minlength=parts)
        rates = [60.0 * count / part_s if count else math.nan for count in per_part.tolist()]
        series.append(Series(kind, [((number + 0.5) * part_s, rate) for number, rate in enumerate(rates)]))
    return series


def _colours(done: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """By kind; those that take a process away come first, so that they differ."""
    kinds = sorted({fault["kind"] for fault in done}, key=lambda kind: (kind not in _TAKES_AWAY, kind))
    return {kind: COLOURS[number % len(COLOURS)] for number, kind in enumerate(kinds)}


def _spans(timeline: Timeline, done: Sequence[Mapping[str, Any]], colours: Mapping[str, str]) -> list[Span]:
    return [
        Span(
            timeline.at_second(fault["begin_ns"]),
            timeline.at_second(fault["end_ns"]),
            f"{fault['kind']}: {_details(fault)}",
            colours[fault["kind"]],
        )
        for fault in done
    ]


def _faults(done: Sequence[Mapping[str, Any]], run: Mapping[str, Any], timeline: Timeline) -> Iterator[str]:
    yield "<h2>Faults</h2>"
    if not done:
        yield "<p>None: this run shows the pipeline in good weather.</p>"
    counts = Counter(fault["kind"] for fault in done)
    yield f"<p>{', '.join(f'{count:,} &times; {escape(kind)}' for kind, count in counts.most_common())}</p>"
    for kind, reason in dict(run.get("left_out", {})).items():
        yield f'<p class="dim">Left out: {escape(kind)}, because {escape(reason)}</p>'
    if done:
        yield "<details><summary>All of them</summary><table><tr><th>at</th><th>for</th><th>what</th></tr>"
        for fault in done[:_FAULTS_LISTED_MAX]:
            began, ended = timeline.at_second(fault["begin_ns"]), timeline.at_second(fault["end_ns"])
            yield (
                f"<tr><td>{began:.1f} s</td><td>{ended - began:.1f} s</td>"
                f"<td>{escape(fault['kind'])} {escape(_details(fault))}</td></tr>"
            )
        yield "</table>"
        if len(done) > _FAULTS_LISTED_MAX:
            yield f"<p>and {len(done) - _FAULTS_LISTED_MAX:,} more, in faults.jsonl</p>"
        yield "</details>"


def _details(fault: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fault.get("details", {}).items() if value is not None)


def _checks(verdict: Mapping[str, Any], run: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>What was checked</h2><table>"
    yield '<tr><th></th><th>anomaly</th><th class="number">found</th><th>what it is</th></tr>'
    counts = {one["name"]: one["count"] for one in verdict["anomalies"]}
    found = {one["name"]: one["definition"] for one in verdict["anomalies"]}
    checks = run.get("checks") or {anomaly.__name__: definition(anomaly) for anomaly in ANOMALIES}
    for name, what in {**checks, **found}.items():
        count, reason = counts.get(name, 0), TOLERATED.get(name)
        mark, style = ("&#10003;", "good") if not count else ("~", "dim") if reason else ("&#10007;", "bad")
        tolerated = f' <span class="dim">Tolerated: {escape(reason)}</span>' if reason else ""
        yield (
            f'<tr><td class="{style}">{mark}</td><td>{escape(_words(name))}</td>'
            f'<td class="number">{count:,}</td><td>{escape(what)}{tolerated}</td></tr>'
        )
    yield "</table>"


def _witnesses(verdict: Mapping[str, Any]) -> Iterator[str]:
    found = [one for one in verdict["anomalies"] if one["witnesses"]]
    if not found:
        return
    yield "<h2>Evidence</h2>"
    for one in found:
        shown = len(one["witnesses"])
        yield f"<h3>{escape(_words(one['name']))}</h3><p class='dim'>{shown:,} of {one['count']:,}</p>"
        for witness in one["witnesses"]:
            text = "\n".join(witness["lines"])
            yield f"<pre>{escape(text)}</pre>"
            if witness["rows"]:
                yield "<details><summary>The rows of the history</summary><pre>"
                yield from (escape(json.dumps(row)) for row in witness["rows"])
                yield "</pre></details>"


def _again(run: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2>The same again</h2><pre>{escape(run['command'])}</pre>"
    versions = ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items())
    yield f'<p class="dim">{escape(versions)}</p>'
    for note in run.get("notes", ()):
        yield f'<p class="dim">{escape(note)}</p>'


def _words(name: str) -> str:
    return name.replace("_", " ")

"""The page of a comparison: three guarantees in one table, when the damage was done, and why, told of one record each.

Like the report of a run it needs no script and nothing from anywhere else; it links to the three reports beside it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, Final

import numpy as np

from semel.charts import COLOURS, Axis, Series, Span, line_chart
from semel.verify.copies import missing_copies
from semel.verify.evidence import Evidence, gather
from semel.verify.guarantees import Comparison, Shown, read_faults
from semel.verify.history import Act, History, Phase
from semel.verify.report import STYLE
from semel.verify.workloads.options import Guarantee

_MORE_STYLE: Final = """
table.guarantees td { padding: .7rem .6rem .7rem 0; } table.guarantees td.number { font-size: 1.25rem; }
.story { border-left: 4px solid var(--line); padding: .1rem 1rem; margin: .8rem 0; }
"""
HOW: Final[dict[Guarantee, tuple[str, str]]] = {
    "at-most-once": (
        "commit the position, then write with acks=0 and no retries",
        "Nothing can appear twice, because a position is never read again once work on it begins. Whatever fails after "
        "the commit is lost, and nobody is told.",
    ),
    "at-least-once": (
        "write with acks=all, retries and an idempotent producer until all is acknowledged, then commit the position",
        "Nothing can be lost, because a position is committed only when its copies are stored. Whoever dies between "
        "the two has its successor write the same records again.",
    ),
    "exactly-once": (
        "copies and position in one transaction; readers with isolation.level=read_committed",
        "Copies and position become visible together or not at all, so a successor begins exactly where the visible "
        "copies end. What was written in vain stays in the log, and readers pass over it.",
    ),
}


def write_guarantees_report(comparison: Comparison) -> None:
    """Make the page from the comparison and the folders of its runs."""
    comparison.report.write_text(render(comparison), encoding="utf-8")


def render(comparison: Comparison) -> str:
    settings = comparison.settings
    title = f"Three guarantees under the same faults, with {settings.client} on {settings.target}"
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>semel guarantees</title><style>{STYLE}{_MORE_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f'<p class="dim">seed {settings.seed}, {settings.time_s:g} seconds of faults for each, '
            f"{comparison.faults_planned} planned</p>",
            *_verdict(comparison),
            *_table(comparison),
            *_chart(comparison),
            "<h2>Why</h2>",
            *(line for one in comparison.shown for line in _why(one)),
            *_faults(comparison),
            f"<h2>The same again</h2><pre>{escape(settings.command())}</pre>",
            "</body></html>\n",
        )
    )


def conclusion(comparison: Comparison) -> str:
    """What follows from it, in one sentence or two."""
    by_name = {one.guarantee: one for one in comparison.shown}
    if comparison.outcome == "broken":
        broken = ", ".join(one.guarantee for one in comparison.shown if not one.keeps_its_promise)
        return f"Not kept: {broken}. The reports of the runs have the evidence."
    if comparison.outcome == "nothing":
        return f"Nothing was shown: {comparison.why_nothing}."
    most, least = by_name["at-most-once"].tally, by_name["at-least-once"].tally
    return (
        f"At most once lost {most.lost:,} records, at least once repeated {least.repeated:,}, and exactly once did "
        f"neither, though {by_name['exactly-once'].deaths} brokers and workers died under it."
    )


def _verdict(comparison: Comparison) -> Iterator[str]:
    style = "good" if comparison.outcome == "shown" else "bad"
    yield f'<div class="verdict {style}">{escape(conclusion(comparison))}</div>'


def _table(comparison: Comparison) -> Iterator[str]:
    heads = ("input", "lost", "repeated", "out of order", "torn", "records/s", "ms a batch", "faults met")
    yield '<table class="guarantees"><tr><th>guarantee</th>'
    yield "".join(f'<th class="number">{head}</th>' for head in heads) + "</tr>"
    for one in comparison.shown:
        tally = one.tally
        torn = "&ndash;" if tally.torn is None else _figure(tally.torn)
        batch = "&ndash;" if math.isnan(tally.batch_ms) else f"{tally.batch_ms:.1f}"
        figures = (
            f"{tally.input:,}",
            _figure(tally.lost),
            _figure(tally.repeated),
            _figure(tally.out_of_order),
            torn,
            f"{tally.records_per_s:,.0f}",
            batch,
            f"{one.faults:,}",
        )
        name = f'<a href="{one.guarantee}/{escape(one.report.name)}">{one.guarantee}</a>'
        cells = "".join(f'<td class="number">{figure}</td>' for figure in figures)
        yield f"<tr><td>{name}</td>{cells}</tr>"
    yield "</table>"
    yield (
        '<p class="dim">Every run had the same input. Records/s are those that arrived, from the first of the input to '
        "the end of the work; ms a batch is the median of what a worker finished.</p>"
    )


def _figure(count: int) -> str:
    return f'<span class="{"bad" if count else "good"}">{count:,}</span>'


def _chart(comparison: Comparison) -> Iterator[str]:
    series: list[Series] = []
    spans: list[Span] = []
    for one in comparison.shown:
        folder = one.report.parent
        faults = [fault for fault in read_faults(folder) if fault["outcome"] == "done"]
        if not faults:
            continue
        history = History.in_folder(folder)
        moments = damage_times(history, gather(history), int(faults[0]["start_ns"]))
        end = max(comparison.settings.time_s, moments[-1] if moments else 0.0)
        steps = [(at, float(number)) for number, at in enumerate(moments, 1)]
        series.append(Series(one.guarantee, [(0.0, 0.0), *steps, (end, float(len(moments)))]))
        spans = spans or _spans(faults)
    if series:
        yield "<h2>When the damage was done</h2>"
        yield (
            '<p class="dim">Records lost or repeated so far, by when they were in the input. Shaded: the faults of the '
            "first run, which are planned for the same times in all three. Point at one to see what it was.</p>"
        )
        yield line_chart("Lost or repeated", series, x=Axis("seconds"), y=Axis("records"), spans=spans)


def damage_times(history: History, evidence: Evidence, start_ns: int) -> list[float]:
    """When each record that was lost, or each that was repeated, was sent to the input: seconds, in order."""
    lanes, log = evidence.lanes, evidence.log
    missing = missing_copies(evidence)
    wanted = Counter(missing.case(number).records[0] for number in range(missing.count))
    wanted.update(lanes.origin_and_sequence(int(key)) for key in log.key[log.is_repeat])
    times: list[float] = []
    for rows in history.parts():
        sent = rows[(rows["act"] == Act.SEND) & (rows["phase"] == Phase.INVOKE) & (rows["writer"] == rows["origin"])]
        for origin, sequence, time_ns in zip(
            *(sent[name].tolist() for name in ("origin", "sequence", "time_ns")), strict=True
        ):
            times += [(time_ns - start_ns) / 1e9] * wanted.get((origin, sequence), 0)
    return np.maximum(np.sort(times), 0.0).tolist()


def _spans(faults: Sequence[dict[str, Any]]) -> list[Span]:
    kinds = sorted({fault["kind"] for fault in faults})
    return [
        Span(
            (fault["begin_ns"] - fault["start_ns"]) / 1e9,
            (fault["end_ns"] - fault["start_ns"]) / 1e9,
            f"{fault['kind']}: {fault['note']}",
            COLOURS[kinds.index(fault["kind"]) % len(COLOURS)],
        )
        for fault in faults
    ]


def _why(one: Shown) -> Iterator[str]:
    how, why = HOW[one.guarantee]
    yield f"<h3>{one.guarantee}</h3><p><b>The pipeline:</b> {escape(how)}.</p><p>{escape(why)}</p>"
    if one.guarantee == "exactly-once" and one.tally.undone:
        yield f"<p>{one.tally.undone:,} copies were written in vain here. No reader saw one of them.</p>"
    if one.story is None:
        yield '<p class="dim">In this run it did not come to that.</p>'
        return
    yield f'<div class="story"><p>{escape(one.story.text)}</p></div>'
    yield "<details><summary>What the history says of this record</summary><pre>"
    yield from (escape(line) for line in one.story.lines)
    yield "</pre></details>"


def _faults(comparison: Comparison) -> Iterator[str]:
    yield "<h2>Faults</h2><table><tr><th>kind</th>"
    yield "".join(f'<th class="number">{one.guarantee}</th>' for one in comparison.shown) + "</tr>"
    done = [
        Counter(fault["kind"] for fault in read_faults(one.report.parent) if fault["outcome"] == "done")
        for one in comparison.shown
    ]
    for kind in sorted(set().union(*done)):
        cells = "".join(f'<td class="number">{counts[kind]:,}</td>' for counts in done)
        yield f"<tr><td>{escape(kind)}</td>{cells}</tr>"
    yield (
        '</table><p class="dim">What really happened of one plan: a fault that waits for a request strikes only '
        "pipelines that make it, and who is dead already cannot be killed.</p>"
    )

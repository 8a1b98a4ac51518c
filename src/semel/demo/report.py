"""The demo's page: the table, what happened when, and why. It needs no script and nothing from anywhere else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from semel.charts import COLOURS, Axis, Series, Span, line_chart
from semel.demo.judgement import Tally
from semel.demo.kills import ABOUT, VICTIMS, Victim
from semel.demo.pipeline_names import PIPELINES, PLAIN, SEMEL
from semel.demo.readers import Sample
from semel.demo.run import Result
from semel.verify.report import STYLE

TITLES: Final = {PLAIN: "plain foreachBatch", SEMEL: "Semel"}
_MORE_STYLE: Final = """
body { max-width: 920px; } .scroll { overflow-x: auto; }
table.result th, table.result td { padding: .55rem .6rem .55rem 0; } table.result td.number { font-size: 1.3rem; }
td.number, th.number, td.short { white-space: nowrap; }
"""
_COLOURS: Final[dict[Victim, str]] = {
    victim: COLOURS[number] for victim, number in zip(VICTIMS, (3, 4, 5, 6, 2), strict=True)
}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table: its name and, for each pipeline, a text and whether it is as it should be.

    None says that there is nothing to judge. A line without texts is a heading.
    """

    name: str
    texts: tuple[str, ...] = ()
    are_good: tuple[bool | None, ...] = ()


def lines(result: Result) -> Iterator[Line]:
    """The table, for the terminal and for the page."""
    tallies = [result.tallies[pipeline] for pipeline in PIPELINES]
    tables = [result.table_tallies[pipeline] for pipeline in PIPELINES]
    yield _line("orders taken", [tally.orders for tally in tallies], is_judged=False)
    yield Line("Kafka, records of three topics")
    yield _line("lost", [tally.lost for tally in tallies])
    yield _line("repeated", [tally.repeated for tally in tallies])
    yield _line("wrong", [tally.wrong for tally in tallies])
    yield _line("torn", [tally.torn for tally in tallies])
    yield Line(f"{result.database}, one row per order")
    yield _line("rows expected", [table.expected for table in tables], is_judged=False)
    yield _line("rows found", [table.found for table in tables], is_judged=False)
    yield _line("rows lost", [table.lost for table in tables])
    yield _line("rows repeated", [table.repeated for table in tables])
    yield _line("rows wrong", [table.wrong for table in tables])
    yield Line("total expected", tuple(_money(table.expected_cents) for table in tables), (None,) * len(tables))
    yield Line(
        "total found",
        tuple(_money(table.found_cents) for table in tables),
        tuple(table.found_cents == table.expected_cents for table in tables),
    )


def _line(name: str, counts: Sequence[int], *, is_judged: bool = True) -> Line:
    return Line(
        name, tuple(f"{count:,}" for count in counts), tuple(count == 0 if is_judged else None for count in counts)
    )


def render(result: Result) -> str:
    """The whole page."""
    settings = result.settings
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>semel demo</title><style>{STYLE}{_MORE_STYLE}</style></head><body>",
            "<h1>One Spark pipeline, with and without Semel, under the same kills</h1>",
            f'<p class="dim">seed {settings.seed}, {result.seconds:.0f} seconds, {len(result.kills)} kills</p>',
            *_verdict(result),
            *_table(result),
            *_charts(result),
            *_kills(result),
            *_why(result),
            f"<h2>The same again</h2><pre>{settings.command}</pre>",
            "</body></html>\n",
        )
    )


def conclusion(result: Result) -> str:
    """What follows, in a sentence or two."""
    plain, plain_table = result.tallies[PLAIN], result.table_tallies[PLAIN]
    relay = result.relay_tally
    if not relay.is_exactly_once:
        return (
            f"Of {relay.expected:,} orders in the shop's database the relay has lost {relay.lost:,} and repeated "
            f"{relay.repeated:,}, and {relay.wrong:,} records are of no order: this must not happen, and is worth "
            "an issue with the seed."
        )
    if not result.is_exactly_once:
        return "Semel's column is not all zeros: this must not happen, and is worth an issue with the seed."
    for repeated, where in ((plain.repeated, "Kafka"), (plain_table.repeated, result.database)):
        if not repeated:
            return (
                f"No kill hit the plain sink while it mattered for {where}, so there is nothing to compare with: run "
                "it again."
            )
    return (
        f"After {len(result.kills)} kills the plain sink has repeated {plain.repeated:,} records in Kafka and "
        f"{plain_table.repeated:,} rows in {result.database}, where sales add up to "
        f"{_money(plain_table.found_cents - plain_table.expected_cents)} too much. With Semel every record and every "
        f"row is there once, and each of the {relay.expected:,} orders came from the shop's database to Kafka once."
    )


def _verdict(result: Result) -> Iterator[str]:
    style = "good" if result.exit_code == 0 else "bad"
    yield f'<div class="verdict {style}">{escape(conclusion(result))}</div>'


def _table(result: Result) -> Iterator[str]:
    yield '<div class="scroll"><table class="result"><tr><th></th>'
    yield "".join(f'<th class="number">{escape(TITLES[pipeline])}</th>' for pipeline in PIPELINES) + "</tr>"
    for line in lines(result):
        if not line.texts:
            yield f'<tr><th colspan="{len(PIPELINES) + 1}">{escape(line.name)}</th></tr>'
            continue
        cells = zip(line.texts, line.are_good, strict=True)
        yield f"<tr><td>{escape(line.name)}</td>" + "".join(_cell(text, good) for text, good in cells) + "</tr>"
    yield "</table></div>"
    plain = result.tallies[PLAIN]
    yield (
        f'<p class="dim">The topics have an invoice and a parcel of each order, and the revenue of {plain.windows:,} '
        "windows; the table has a row of each order. Everything was compared, value by value, with what plain Python "
        "makes of the same orders. <b>Repeated</b> are records and rows beyond the first of each: in Kafka "
        f"{_repeats(plain)} for the plain sink, whose invoices ask for {_money(plain.cents)} too much. <b>Wrong</b> "
        "are records and rows that nobody expects, such as another sum. An order is <b>torn</b> if a reader saw its "
        "invoice but not its parcel, or the reverse, while the driver was down.</p>"
    )


def _repeats(tally: Tally) -> str:
    return f"{tally.repeated_documents:,} invoices and parcels, {tally.repeated_revenues:,} revenues"


def _cell(text: str, is_good: bool | None) -> str:
    shown = text if is_good is None else _mark(not is_good, text)
    return f'<td class="number">{shown}</td>'


def _mark(count: int, text: str) -> str:
    return f'<span class="{"bad" if count else "good"}">{text}</span>'


def _money(cents: int) -> str:
    return f"{cents / 100:,.2f} EUR"


def _charts(result: Result) -> Iterator[str]:
    spans = [
        Span(one.at, one.back_at or result.seconds, f"kill -9 of the {one.victim} {one.note}", _COLOURS[one.victim])
        for one in result.kills
    ]
    seconds = Axis("seconds")
    yield "<h2>What happened when</h2>"
    yield (
        '<p class="dim">As a reader of committed records saw it; what it had seen before counts again. Shaded: from a '
        "kill until both pipelines had finished a batch again. Point at one to see what it was.</p>"
    )
    swatches = (
        f'<span class="swatch" style="--colour: {_COLOURS[victim]}">{victim}</span>'
        for victim in VICTIMS
        if any(one.victim == victim for one in result.kills)
    )
    yield f"<p>{' '.join(swatches)}</p>"
    names = [(pipeline, TITLES[pipeline]) for pipeline in reversed(PIPELINES)]
    yield line_chart(
        "Invoices that readers get",
        [Series(name, per_second(result.samples[pipeline], result.seconds)) for pipeline, name in names],
        x=seconds,
        y=Axis("a second"),
        spans=spans,
    )
    yield line_chart(
        "Orders that wait for their invoice",
        [Series(name, waiting(result, pipeline)) for pipeline, name in names],
        x=seconds,
        y=Axis("orders"),
        spans=spans,
    )
    yield line_chart(
        "Invoices that readers got twice or more, so far",
        [Series(name, repeated_so_far(result.samples[pipeline], result.seconds)) for pipeline, name in names],
        x=seconds,
        y=Axis("invoices"),
        spans=spans,
    )


def per_second(samples: Sequence[Sample], seconds: float) -> list[tuple[float, float]]:
    """Records a second, second by second."""
    counts = [0] * (math.ceil(seconds) + 1)
    for one in samples:
        counts[int(one.at)] += one.new + one.repeated
    return [(float(second), float(count)) for second, count in enumerate(counts)]


def repeated_so_far(samples: Sequence[Sample], seconds: float) -> list[tuple[float, float]]:
    """A line that goes up in steps."""
    points, total = [(0.0, 0.0)], 0
    for one in samples:
        if one.repeated:
            points.append((one.at, float(total)))
            total += one.repeated
            points.append((one.at, float(total)))
    return [*points, (seconds, float(total))]


def waiting(result: Result, pipeline: str) -> list[tuple[float, float]]:
    """Orders sent less orders that readers have an invoice of, second by second."""
    before = [0, *(count for _, count in result.fed)]
    sent = [(at, count - earlier) for (at, count), earlier in zip(result.fed, before, strict=False)]
    steps = sorted([*sent, *((one.at, -one.new) for one in result.samples[pipeline])])
    points: list[tuple[float, float]] = []
    count, number = 0, 0
    for second in range(math.ceil(result.seconds) + 1):
        while number < len(steps) and steps[number][0] <= second:
            count += steps[number][1]
            number += 1
        points.append((float(second), max(0.0, float(count))))  # a reader may be quicker than the acknowledgement
    return points


def _kills(result: Result) -> Iterator[str]:
    yield "<h2>The kills</h2>"
    struck = {one.victim for one in result.kills}
    items = "".join(f"<li><b>{victim}</b>: {escape(ABOUT[victim])}</li>" for victim in VICTIMS if victim in struck)
    yield f"<p>All with <code>kill -9</code>, and both pipelines suffer each of them.</p><ul>{items}</ul>"
    yield '<div class="scroll"><table><tr><th>at</th><th>who</th><th>when</th><th class="number">back after</th>'
    yield '<th class="number">torn, plain</th><th class="number">torn, Semel</th></tr>'
    for one in result.kills:
        back = "&ndash;" if one.back_at is None else f"{one.back_at - one.at:.1f} s"
        torn = "".join(
            f'<td class="number">{_mark(one.torn[name], f"{one.torn[name]:,}") if name in one.torn else ""}</td>'
            for name in PIPELINES
        )
        yield (
            f'<tr><td class="short">{one.at:.1f} s</td><td>{one.victim}</td><td>{escape(one.note)}</td>'
            f'<td class="number">{back}</td>{torn}</tr>'
        )
    yield "</table></div>"
    if result.failures.total():
        told = ", ".join(f"{count} of {TITLES[name]}" for name, count in result.failures.items())
        yield f'<p class="dim">Queries that stopped with an error and were started again: {told}.</p>'


def _why(result: Result) -> Iterator[str]:
    yield (
        "<h2>Why</h2><p>The shop writes each order and its event into its database, in one transaction. "
        "<code>semel relay</code> brings the events to Kafka; its progress is inside the Kafka transaction, so a "
        "kill repeats nothing.</p>"
        "<p>Both pipelines are the same query: orders are read, their products looked up, an invoice and a parcel "
        "made of each, and the revenue of each category added up in windows. After a crash Spark repeats the "
        "micro-batch that was under way. Both sinks then get the same rows a second time.</p>"
        "<p><b>The plain sink</b> is the usual recipe: <code>foreachBatch</code> inserts rows into the table and "
        "commits them, then writes one topic after the other with an idempotent producer that waits for every "
        "acknowledgement. What it had written before the crash is there, and is written again. Until then, readers see "
        "half of the batch.</p>"
        "<p><b>Semel's sinks</b> write a micro-batch in one Kafka transaction, with a record that says which batch it "
        f"was, and in one transaction of {result.database}, with a row that says so. If the crash comes before the "
        "commit, readers never see what was written. If it comes after, the batch is recognised and not written "
        "again.</p>"
    )

"""What a bench section reports: rows of figures, charts of them, and bars that must be cleared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rich.console import Console
from rich.table import Table

from semel.charts import Axis, Series, line_chart, short_number

_TEXT_BAR_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class Row:
    """One case; a figure that could not be measured is None."""

    case: str
    figures: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio that must be reached, or with `at_most` not passed; one that could not be measured counts as missed."""

    name: str
    required: float
    measured: float | None
    at_most: bool = False

    @property
    def passed(self) -> bool:
        if self.measured is None:
            return False
        return self.measured <= self.required if self.at_most else self.measured >= self.required


@dataclass(frozen=True, slots=True)
class Chart:
    """Figures as lines: what `line_chart` takes."""

    title: str
    series: tuple[Series, ...]
    x: Axis
    y: Axis


@dataclass(frozen=True, slots=True)
class Section:
    """The outcome of one section. `columns` name the figures of each row, `timed` says what they are the time of."""

    name: str
    timed: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    bars: tuple[Bar, ...]
    notes: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()

    @property
    def passed(self) -> bool:
        return all(bar.passed for bar in self.bars)


def print_sections(sections: Sequence[Section], console: Console) -> None:
    """Tables for people."""
    for section in sections:
        table = Table(title=f"semel bench {section.name}", caption=section.timed, caption_justify="left")
        table.add_column("case")
        for column in section.columns:
            table.add_column(column, justify="right")
        for row in section.rows:
            table.add_row(row.case, *(_figure(figure) for figure in row.figures))
        console.print(table)
        for note in section.notes:
            console.print(note, style="dim")
        for chart in section.charts:
            _print_chart(chart, console)
        for bar in section.bars:
            verdict = "[green]pass[/green]" if bar.passed else "[red]MISSED[/red]"
            limit = f"at {'most' if bar.at_most else 'least'} {bar.required:g}x asked for"
            console.print(f"{verdict}  {bar.name}: {_figure(bar.measured)}x, {limit}")


def _print_chart(chart: Chart, console: Console) -> None:
    """Bars of characters, each as long as its share of the largest figure."""
    console.print(f"\n{chart.title}: {chart.y.label} by {chart.x.label}")
    largest = max((y for series in chart.series for _, y in series.points), default=1.0)
    for series in chart.series:
        console.print(f"  {series.name}", style="bold")
        for x, y in series.points:
            bar = "█" * max(1, round(y / largest * _TEXT_BAR_CHARACTERS))
            console.print(f"  {short_number(x):>6}  {bar} {short_number(y)}")


def sections_as_page(sections: Sequence[Section]) -> str:
    """The charts of all sections as a page for a browser."""
    charts = [line_chart(one.title, one.series, x=one.x, y=one.y) for section in sections for one in section.charts]
    title = f"semel bench {' '.join(section.name for section in sections if section.charts)}"
    return "\n".join(
        (
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            "<style>:root{color-scheme:light dark}body{max-width:760px;margin:2em auto;font-family:system-ui}</style>",
            f"</head><body><h1>{escape(title)}</h1>",
            *(f"<p>{escape(section.timed)}</p>" for section in sections if section.charts),
            *charts,
            "</body></html>\n",
        )
    )


def sections_as_json(sections: Sequence[Section]) -> str:
    """The same for programs."""
    report = {
        "passed": all(section.passed for section in sections),
        "sections": [
            {
                "name": section.name,
                "timed": section.timed,
                "rows": [
                    {"case": row.case, **dict(zip(section.columns, row.figures, strict=True))} for row in section.rows
                ],
                "bars": [
                    {
                        "name": bar.name,
                        "required": bar.required,
                        "at_most": bar.at_most,
                        "measured": bar.measured,
                        "passed": bar.passed,
                    }
                    for bar in section.bars
                ],
                "notes": list(section.notes),
            }
            for section in sections
        ],
    }
    return json.dumps(report, indent=2)


def _figure(figure: float | None) -> str:
    if figure is None:
        return "-"
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.1f}" if figure >= 1 else f"{figure:.2f}"

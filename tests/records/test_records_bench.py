"""The bench report: its shape and its verdicts. Nothing is timed here."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from semel import bench as sections
from semel.bench import records
from semel.bench.report import Bar, Row, Section, print_sections, sections_as_json
from semel.cli.bench import bench


def make_section(measured: float | None) -> Section:
    return Section(
        name="sample",
        timed="nothing",
        columns=("ours", "theirs"),
        rows=(Row("a case", (12.34, 1234.0)), Row("half a case", (1.0, None))),
        bars=(Bar("speed", 3.0, measured),),
        notes=("a note",),
    )


def fake_sections(measured: float | None) -> Callable[..., list[Section]]:
    return lambda name=None, **sizes: [make_section(measured)]


@pytest.mark.parametrize(("measured", "passed"), [(3.0, True), (2.99, False), (None, False)])
def test_bar_passes_only_when_reached(measured: float | None, passed: bool) -> None:
    """A bar that is missed or was not measured fails its section and the whole report."""
    section = make_section(measured)
    assert section.bars[0].passed is passed
    assert section.passed is passed
    assert json.loads(sections_as_json([make_section(3.0), section]))["passed"] is passed


def test_json_report_has_a_figure_for_each_column() -> None:
    """Programs find each row's figures by the name of the column, and each bar with its verdict."""
    report = json.loads(sections_as_json([make_section(4.0)]))
    (section,) = report["sections"]
    assert section["rows"] == [
        {"case": "a case", "ours": 12.34, "theirs": 1234.0},
        {"case": "half a case", "ours": 1.0, "theirs": None},
    ]
    assert section["bars"] == [{"name": "speed", "required": 3.0, "at_most": False, "measured": 4.0, "passed": True}]
    assert section["notes"] == ["a note"]


def test_table_shows_rows_bars_and_notes() -> None:
    """People see every case, what is timed, and the verdict."""
    console = Console(width=120, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    print_sections([make_section(1.5)], console)
    console.file.close()
    text = console.export_text()
    for part in ("a case", "12.3", "1234", "nothing", "a note", "MISSED", "speed: 1.5x, at least 3x"):
        assert part in text


def run_command(monkeypatch: pytest.MonkeyPatch, measured: float | None, *arguments: str) -> Any:
    monkeypatch.setattr("semel.cli.bench.run_sections", fake_sections(measured))
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(("measured", "code"), [(5.0, 0), (1.0, 1)])
def test_command_ends_with_one_when_a_bar_is_missed(
    monkeypatch: pytest.MonkeyPatch, measured: float, code: int
) -> None:
    """Scripts can rely on the exit code, with and without --json."""
    assert run_command(monkeypatch, measured).exit_code == code
    outcome = run_command(monkeypatch, measured, "--json")
    assert outcome.exit_code == code
    assert json.loads(outcome.stdout)["sections"][0]["name"] == "sample"


def test_unknown_section_is_refused_with_those_there_are() -> None:
    """A mistyped section names the ones to choose from."""
    app = typer.Typer()
    app.command()(bench)
    outcome = CliRunner().invoke(app, ["no-such-section"])
    assert outcome.exit_code == 2
    assert "records" in outcome.output


def test_records_section_measures_every_case() -> None:
    """The section runs through on a few records: every case has figures, and all bars are there."""
    section = records.run(record_count=40)
    assert set(sections.SECTIONS) >= {"records"}
    assert [bar.required for bar in section.bars] == [3.0, 6.0, 6.0, 6.0, 4.0, 4.0]
    assert all(bar.measured is not None for bar in section.bars)
    assert all(len(row.figures) == len(section.columns) for row in section.rows)
    assert all(row.figures[5] and (row.figures[0] or "kept" in row.case) for row in section.rows)
    cases = [row.case for row in section.rows]
    for part in ("10 B", "1,000 B", "ragged", "headers", "gzip", "snappy", "lz4", "zstd", "kept"):
        assert any(part in case for case in cases)

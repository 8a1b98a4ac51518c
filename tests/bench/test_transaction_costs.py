"""`semel bench transactions` on the embedded broker: every size and way is measured, printed and drawn."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from semel.bench import transactions
from semel.bench.report import print_sections, sections_as_json, sections_as_page
from semel.broker.process import Broker
from semel.cli.main import app


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with Broker() as broker:
        yield broker.bootstrap


def test_every_size_and_way_has_its_figures(bootstrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger transactions carry more records a second; the table, the JSON and the page tell the same."""
    monkeypatch.setenv("SEMEL_BENCH_BOOTSTRAP", bootstrap)

    section = transactions.run(sizes=(1, 500), seconds_a_case=0.2)

    single, many = section.rows
    assert all(figure is not None and figure > 0 for row in section.rows for figure in row.figures)
    assert (many.figures[2] or 0) > 10 * (single.figures[2] or 0)
    told = json.loads(sections_as_json([section]))["sections"][0]["rows"]
    assert [row["transactions"] for row in told] == [single.figures[2], many.figures[2]]
    page = sections_as_page([section])
    assert page.count("<svg") == page.count("</svg>") == len(section.charts) == 2
    text = io.StringIO()
    print_sections([section], Console(file=text, width=200))
    assert "groups of 500" in text.getvalue()
    assert text.getvalue().count("█") > 6


def test_the_command_writes_the_charts(bootstrap: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`--plot FILE` beside the table."""
    monkeypatch.setenv("SEMEL_BENCH_BOOTSTRAP", bootstrap)
    monkeypatch.setattr(transactions.run, "__defaults__", ((1, 10), 0.05))

    result = CliRunner().invoke(app, ["bench", "transactions", "--plot", str(tmp_path / "costs.html")])

    assert result.exit_code == 0, result.output
    assert "records in a transaction" in (tmp_path / "costs.html").read_text()

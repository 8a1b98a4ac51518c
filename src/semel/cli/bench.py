"""`semel bench [SECTION]`: measure, compare, and fail when a bar is missed. Options: sizes, `--json`, `--plot`."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Final

import typer

from semel.advise.measured import save_figures
from semel.bench import SECTIONS, run_sections
from semel.bench.report import print_sections, sections_as_json, sections_as_page
from semel.cli.needs import AIOKAFKA, CONFLUENT, POSTGRES, SPARK, Need, ensure, java
from semel.cli.output import Console, ensure_writable
from semel.cli.progress import tell, working
from semel.errors import ConfigError

NEEDS: Final[dict[str, tuple[Need, ...]]] = {
    "records": (AIOKAFKA,),
    "client": (CONFLUENT, java),
    "broker": (CONFLUENT, java),
    "transactions": (java,),
    "session": (CONFLUENT, java),
    "mirror": (CONFLUENT, java),
    "checker": (),
    "spark": SPARK,
    "bridges": (CONFLUENT, *POSTGRES, *SPARK),
}


def bench(
    section: Annotated[
        str | None, typer.Argument(help=f"What to measure: {', '.join(SECTIONS)}. All of them without it.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only what has a bar (section spark).")] = False,
    records: Annotated[int | None, typer.Option(help="How many records, for sections that count them.")] = None,
    rounds: Annotated[int | None, typer.Option(help="How many turns, of which the best counts.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a report for programs.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the charts of the figures into this HTML file.")] = None,
) -> None:
    """Measure Semel beside other clients on this machine. Exits with status 1 if a bar is missed.

    \b
    semel bench transactions
    semel bench spark --quick
    semel bench records --json | jq
    """
    ensure_writable(plot)
    wanted = NEEDS if section is None else {section: NEEDS.get(section, ())}
    ensure(tuple(dict.fromkeys(need for needs in wanted.values() for need in needs)))
    try:
        with working("starting"):
            sections = run_sections(
                section,
                on_section=lambda name: tell(f"measuring {name}"),
                quick=quick or None,
                records=records,
                rounds=rounds,
            )
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    for part in sections:
        if part.name == "transactions":  # `semel advise` tells them
            rows = ({"case": row.case, **dict(zip(part.columns, row.figures, strict=True))} for row in part.rows)
            try:
                save_figures(rows, date.today().isoformat())
            except OSError as error:
                typer.echo(f"The figures could not be kept for `semel advise`: {error}", err=True)
    if plot is not None:
        plot.write_text(sections_as_page(sections), encoding="utf-8")
    if as_json:
        typer.echo(sections_as_json(sections))
    else:
        print_sections(sections, Console())
    if not all(part.passed for part in sections):
        raise typer.Exit(1)

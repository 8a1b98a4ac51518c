"""`semel demo`: one Spark pipeline with and without Semel under `kill -9`, with a table and a page at the end."""

from __future__ import annotations

import random
import shutil
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from semel.cli.needs import POSTGRES, SPARK, ensure, missing
from semel.cli.output import Console, ensure_writable, print_failure
from semel.cli.progress import progress_view
from semel.errors import SemelError

if TYPE_CHECKING:
    from semel.demo.database import DemoDatabase
    from semel.demo.run import Progress, Result


class DatabaseName(StrEnum):
    """For `--database`."""

    POSTGRES = "postgres"
    SQLITE = "sqlite"


def demo(
    seconds: Annotated[
        float, typer.Option(help="How long orders come in and processes are killed; starting and counting add to it.")
    ] = 60.0,
    report: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("semel-demo.html"),
    seed: Annotated[int | None, typer.Option(help="For the same orders and kills again; a random one without.")] = None,
    database: Annotated[
        DatabaseName | None,
        typer.Option(help="By default Postgres if it is installed (extras postgres and clients), else SQLite."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the broker's data, checkpoints and Spark's log.")] = False,
) -> None:
    """Kill Spark, the Kafka broker, the database and the relay that reads from it, while one pipeline writes to both.

    The pipeline runs twice at the same time, with the usual sinks and with Semel's.

    \b
    semel demo
    semel demo --seconds 120 --seed 7 --database sqlite

    Exits with status 1 if Semel lost, repeated or tore anything, and with 2 if the plain sink had nothing to show.
    """
    console = Console()
    ensure_writable(report)
    ensure(SPARK + POSTGRES if database is DatabaseName.POSTGRES else SPARK)
    database = database or (DatabaseName.POSTGRES if missing(POSTGRES) is None else DatabaseName.SQLITE)
    from semel.demo.report import render
    from semel.demo.run import DemoRun, DemoSettings

    seed = random.randrange(1_000_000) if seed is None else seed
    folder = Path(tempfile.mkdtemp(prefix="semel-demo-"))
    settings = DemoSettings(folder, seconds, seed, database.value)
    console.print(settings.command, style="bold", markup=False, highlight=False, soft_wrap=True)
    try:
        with progress_view() as shown:
            result = DemoRun(
                settings,
                lambda progress: shown.update(_view(progress)),
                lambda used: shown.aside(
                    lambda: console.print(
                        about_database(used), markup=False, highlight=False, style="dim", soft_wrap=True
                    )
                ),
            ).run()
        report.write_text(render(result), encoding="utf-8")
    except SemelError as error:
        print_failure("Nothing was shown", error)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        console.print("Stopped; every process has ended.")
        raise typer.Exit(130) from None
    finally:
        if keep:
            console.print(f"Data, checkpoints and logs: {folder}", highlight=False, soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    _print(result, console)
    console.print(f"Page: {report.absolute()}", highlight=False, soft_wrap=True)
    raise typer.Exit(result.exit_code)


def about_database(database: DemoDatabase) -> str:
    """One line: which database it is, and how to get the other."""
    if database.refusal is not None:
        return f"Database: SQLite, because Postgres did not start here: {database.refusal}"
    if database.tables.kind == "postgres":
        return "Database: Postgres, started for this run (--database sqlite runs without a server)"
    return "Database: SQLite (for Postgres: pip install 'semel[postgres,clients]')"


def _view(progress: Progress) -> Table:
    from semel.demo.pipeline_names import PIPELINES
    from semel.demo.report import TITLES

    view = Table.grid(padding=(0, 2))
    view.add_row(f"{progress.elapsed_s:.0f} s", progress.stage)
    view.add_row("orders taken", f"{progress.sent:,}")
    for pipeline in PIPELINES:
        repeated = progress.repeated[pipeline]
        told = f"[red]{repeated:,} twice[/red]" if repeated else "[green]none twice[/green]"
        view.add_row(TITLES[pipeline], f"{progress.done[pipeline]:,} orders done, {told}")
    view.add_row("kill -9", ", ".join(f"{victim} {count}x" for victim, count in progress.kills.items()))
    return view


def _print(result: Result, console: Console) -> None:
    from semel.demo.pipeline_names import PIPELINES
    from semel.demo.report import TITLES, conclusion, lines

    for one in result.kills:
        back = "" if one.back_at is None else f", back after {one.back_at - one.at:.1f} s"
        console.print(
            f"{one.at:5.1f} s  kill -9 {one.victim:8}  {one.note}{back}", highlight=False, style="dim", soft_wrap=True
        )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for pipeline in PIPELINES:
        table.add_column(TITLES[pipeline], justify="right")
    for line in lines(result):
        cells = zip(line.texts, line.are_good, strict=True)
        table.add_row(line.name, *(_coloured(text, good) for text, good in cells), style=None if line.texts else "bold")
    console.print(table)
    colour = "green" if result.exit_code == 0 else "red"
    console.print(f"\n[{colour}]{conclusion(result)}[/{colour}] It took {result.seconds:.0f} s.", highlight=False)


def _coloured(text: str, is_good: bool | None) -> str:
    if is_good is None:
        return text
    return f"[green]{text}[/green]" if is_good else f"[red]{text}[/red]"

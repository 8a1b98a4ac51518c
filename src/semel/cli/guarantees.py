"""`semel guarantees`: at most once, at least once and exactly once under the same faults, and what each does wrong."""

from __future__ import annotations

import math
import random
import tempfile
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.table import Table

from semel.cli.output import Console, print_failure
from semel.cli.progress import progress_view
from semel.cli.side_effects import print_side_effects, show_side_effects
from semel.cli.verify import parse_option, parse_time
from semel.errors import SemelError
from semel.verify.course import Progress
from semel.verify.faults.kinds import ABOUT
from semel.verify.guarantees import DEFAULT_OPTIONS, DEFAULT_RATES, Comparison, GuaranteeSettings, compare
from semel.verify.guarantees_report import conclusion, write_guarantees_report
from semel.verify.workloads.options import GUARANTEES

_EXITS = {"shown": 0, "broken": 1, "nothing": 2}


def guarantees(
    target: Annotated[
        str, typer.Option(help="embedded, kafka, kafka:VERSION (both start it), or HOST:PORT.")
    ] = "embedded",
    client: Annotated[str, typer.Option(help="semel, confluent-kafka, kafka-python or aiokafka.")] = "semel",
    faults: Annotated[
        str | None,
        typer.Option(
            help=f"Some of {', '.join(ABOUT)}, with rates a minute if wanted; without it "
            + ",".join(f"{kind}={rate:g}" for kind, rate in DEFAULT_RATES.items())
            + "."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="For the same input and faults again; a random one without.")] = None,
    time: Annotated[str, typer.Option(help="How long the faults last, for each of the three: 15s, 2m.")] = "15s",
    folder: Annotated[Path | None, typer.Option(help="Where the results go; a temporary one without.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE of the pipeline, such as partitions=12; may be repeated. Without: "
            + ", ".join(f"{name}={value:g}" for name, value in DEFAULT_OPTIONS.items())
            + "."
        ),
    ] = None,
    effects: Annotated[
        bool,
        typer.Option(
            "--effects",
            help="Compare four ways to make calls to the outside instead; of the others it takes "
            "--seed, --folder and --json.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result for programs.")] = False,
) -> None:
    """Run one pipeline at most once, at least once and exactly once under the same faults; count what each loses and
    repeats. Exits with status 1 if a guarantee was not kept, with 2 if the faults were too mild to show anything.

    \b
    semel guarantees --time 30s
    semel guarantees --effects
    """
    console = Console(stderr=as_json)
    folder = folder or Path(tempfile.mkdtemp(prefix="semel-guarantees-"))
    seed = random.randrange(1_000_000) if seed is None else seed
    if effects:
        _compare_effects(folder, seed, console, as_json)
    try:
        settings = GuaranteeSettings(
            folder=folder,
            target=target,
            client=client,
            faults=faults,
            seed=seed,
            time_s=parse_time(time),
            options=dict(map(parse_option, option or [])),
        )
        console.print(settings.command(), style="bold", markup=False, highlight=False, soft_wrap=True)
        with progress_view() as shown:
            comparison = compare(settings, lambda name, progress: shown.update(_view(name, progress)))
        write_guarantees_report(comparison)
    except SemelError as error:
        print_failure("Nothing was shown", error)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(comparison.to_json())
    else:
        _print(comparison, console)
    raise typer.Exit(_EXITS[comparison.outcome])


def _compare_effects(folder: Path, seed: int, console: Console, as_json: bool) -> NoReturn:
    console.print(f"[bold]semel guarantees --effects --seed {seed}[/bold]")
    try:
        comparison = show_side_effects(folder, seed)
    except SemelError as error:
        print_failure("Nothing was shown", error)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(comparison.to_json())
    else:
        print_side_effects(comparison, folder, console)
    raise typer.Exit(_EXITS[comparison.outcome])


def _view(name: str, progress: Progress) -> Table:
    view = Table.grid(padding=(0, 2))
    for number, guarantee in enumerate(GUARANTEES):
        if guarantee == name:
            faults = f"{progress.faults_done} of {progress.faults_planned} faults"
            view.add_row(f"[bold]{guarantee}[/bold]", f"{progress.elapsed_s:.0f} s", progress.stage, faults)
        else:
            view.add_row(guarantee, "", "done" if number < GUARANTEES.index(name) else "", "", style="dim")
    return view


def _print(comparison: Comparison, console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for head in ("input", "lost", "repeated", "out of\norder", "torn", "records/s", "ms a\nbatch", "faults\nmet"):
        table.add_column(head, justify="right")
    for one in comparison.shown:
        tally = one.tally
        table.add_row(
            one.guarantee,
            f"{tally.input:,}",
            *(_coloured(number) for number in (tally.lost, tally.repeated, tally.out_of_order)),
            "-" if tally.torn is None else _coloured(tally.torn),
            f"{tally.records_per_s:,.0f}",
            "-" if math.isnan(tally.batch_ms) else f"{tally.batch_ms:.1f}",
            f"{one.faults}",
        )
    console.print(table)
    for one in comparison.shown:
        if one.story is not None:
            console.print(f"\n[bold]{one.guarantee}[/bold]: {one.story.text}", highlight=False)
    colour = "green" if comparison.outcome == "shown" else "red"
    console.print(f"\n[{colour}]{conclusion(comparison)}[/{colour}]", highlight=False)
    console.print(f"Report: {comparison.report}", highlight=False, soft_wrap=True)


def _coloured(number: int) -> str:
    return f"[red]{number:,}[/red]" if number else f"[green]{number}[/green]"

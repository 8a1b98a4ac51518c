"""`semel verify`: a workload under faults, watched live, with a verdict, a JSON result and a report at the end."""

from __future__ import annotations

import random
import re
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from semel.errors import ConfigError, SemelError
from semel.verify.faults.kinds import ABOUT
from semel.verify.run import Finished, Progress, RunSettings, ensure_verdict, run
from semel.verify.workloads.options import Options
from semel.verify.workloads.registry import WORKLOADS

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


def verify(
    target: Annotated[
        str, typer.Option(help="embedded, kafka, kafka:VERSION (both start it), or HOST:PORT.")
    ] = "embedded",
    workload: Annotated[str, typer.Option(help=f"One of {', '.join(WORKLOADS)}.")] = "copier",
    client: Annotated[str, typer.Option(help="semel, confluent-kafka, kafka-python or aiokafka.")] = "semel",
    faults: Annotated[
        str | None,
        typer.Option(help=f"Some of {', '.join(ABOUT)}, with rates a minute if wanted (cut=30); none; all without it."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="For the same workload and faults again; a random one without.")
    ] = None,
    time: Annotated[str, typer.Option(help="How long the faults last: 60s, 10m, 2h.")] = "60s",
    folder: Annotated[Path | None, typer.Option(help="Where history and report go; a temporary one without.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of the workload, such as partitions=12; may be repeated.")
    ] = None,
    transaction_version: Annotated[
        int | None,
        typer.Option(help="Transaction protocol of a broker that is started here: 2, or 1 or 0 for the old."),
    ] = None,
    replay: Annotated[Path | None, typer.Option(help="Carry out the faults in this plan.json or faults.jsonl.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict for programs.")] = False,
) -> None:
    """Prove that a pipeline is exactly-once under faults. Ends with 1 if it is not, with 2 if nothing was proved."""
    console = Console(stderr=as_json)
    try:
        settings = RunSettings(
            folder=folder or Path(tempfile.mkdtemp(prefix="semel-verify-")),
            target=target,
            workload=workload,
            client=client,
            faults=faults,
            seed=random.randrange(1_000_000) if seed is None else seed,
            time_s=parse_time(time),
            options=Options.from_mapping(dict(map(parse_option, option or []))),
            transaction_version=transaction_version,
            replay=replay,
        )
        console.print(f"[bold]{settings.command()}[/bold]")
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            finished = run(settings, lambda progress: live.update(_view(progress, settings)))
        verdict = ensure_verdict(finished)
    except SemelError as error:
        console.print(f"[red]Nothing was proved:[/red] {error}", highlight=False)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(verdict.to_json())
    else:
        _print_verdict(finished, console)
    if not verdict.is_clean:
        raise typer.Exit(1)


def parse_time(text: str) -> float:
    """
    >>> parse_time("90s"), parse_time("10m"), parse_time("2")
    (90.0, 600.0, 2.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{text!r} is no time: write 60s, 10m or 2h.")
    return float(match[1]) * _UNITS[match[2]]


def parse_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    default = {one.name: one.default for one in fields(Options)}.get(name)
    if not equals or default is None:
        names = ", ".join(one.name for one in fields(Options))
        raise ConfigError(f"{text!r} is no option of a workload: write NAME=VALUE with one of {names}.")
    try:
        return name, type(default)(value)
    except ValueError:
        raise ConfigError(f"{value!r} is no value for {name}: it is {default!r} without it.") from None


def _view(progress: Progress, settings: RunSettings) -> Table:
    view = Table.grid(padding=(0, 2))
    view.add_row("[bold]semel verify[/bold]", f"{settings.workload} with {settings.client} on {settings.target}")
    view.add_row(progress.stage, f"{progress.elapsed_s:.0f} s of {settings.time_s:.0f} s and then to rest")
    view.add_row("faults", f"{progress.faults_done:,} done, {progress.faults_planned:,} planned")
    view.add_row("process lives", f"{progress.lives:,}")
    waiting = "no broker answers" if progress.unstable is None else f"{progress.unstable:,} offsets"
    view.add_row("not stable yet", waiting)
    return view


def _print_verdict(finished: Finished, console: Console) -> None:
    verdict = finished.verdict
    table = Table(show_header=False, box=None)
    for name, count in {**verdict.checked, **verdict.faults}.items():
        table.add_row(f"{count:,}", name.replace("_", " "))
    console.print(table)
    for anomaly in verdict.anomalies:
        colour = "yellow" if anomaly.tolerated else "red"
        console.print(f"[{colour}]{anomaly.count:,} {anomaly.name.replace('_', ' ')}[/{colour}]: {anomaly.definition}")
        if anomaly.tolerated:
            console.print(f"  tolerated: {anomaly.tolerated}", style="dim")
        for witness in anomaly.witnesses[:1]:
            for line in witness.lines:
                console.print(f"  {line}", highlight=False, markup=False)
    console.print("[green]Exactly once.[/green]" if verdict.is_clean else "[red]Not exactly once.[/red]")
    console.print(f"Report: {finished.report}", highlight=False)

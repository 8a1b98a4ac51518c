"""`semel verify`: a workload or a user's own program under faults, watched live, with a verdict and a report."""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from semel.cli.output import Console, print_failure
from semel.cli.progress import progress_view
from semel.errors import ConfigError, SemelError
from semel.verify.course import Finished, Progress, Watch, ensure_verdict
from semel.verify.faults.kinds import ABOUT
from semel.verify.programs.run import run_program
from semel.verify.programs.settings import ProgramSettings
from semel.verify.run import RunSettings, run
from semel.verify.verdict import Verdict
from semel.verify.workloads.options import Options
from semel.verify.workloads.registry import WORKLOADS

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


def verify(
    command: Annotated[
        str | None,
        typer.Option(help="Your own program, such as 'python my_job.py {bootstrap} {input} {output}'."),
    ] = None,
    input: Annotated[str, typer.Option(help="The topic that the command reads; it is created and filled.")] = "",
    output: Annotated[
        list[str] | None, typer.Option(help="A topic that the command writes; it is created. May be repeated.")
    ] = None,
    rule: Annotated[
        str,
        typer.Option(
            help="What the outputs must be: copy, key=MODULE:FUNCTION (the outputs for one key and value), or "
            "MODULE:FUNCTION (finds what is wrong in all inputs and outputs)."
        ),
    ] = "copy",
    generator: Annotated[
        str | None,
        typer.Option(help="MODULE:FUNCTION that returns (key, value, headers) of input number N; JSON without."),
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help=f"Without --command: one of {', '.join(WORKLOADS)}; copier without it.")
    ] = None,
    client: Annotated[
        str,
        typer.Option(
            help="Who runs the workload, or watches the outputs of the command: semel, confluent-kafka, "
            "kafka-python or aiokafka."
        ),
    ] = "semel",
    target: Annotated[
        str, typer.Option(help="embedded, kafka, kafka:VERSION (each is started for the run), or HOST:PORT.")
    ] = "embedded",
    faults: Annotated[
        str | None,
        typer.Option(help=f"Some of {', '.join(ABOUT)}, with rates a minute if wanted (cut=30); none; all without it."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="For the same input and plan of faults again; a random one without.")
    ] = None,
    time: Annotated[str, typer.Option(help="How long the faults last: 60s, 10m, 2h.")] = "60s",
    folder: Annotated[Path | None, typer.Option(help="Where logs and report go; a temporary one without.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE, such as partitions=12 or rate=500; may be repeated. docs/verify.md lists them."),
    ] = None,
    transaction_version: Annotated[
        int | None,
        typer.Option(help="Transaction protocol of a broker that is started here: 2, or 1 or 0 for the old."),
    ] = None,
    replay: Annotated[Path | None, typer.Option(help="Carry out the faults in this plan.json or faults.jsonl.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict for programs.")] = False,
) -> None:
    """Prove, or disprove, that a pipeline is exactly-once.

    With --command it is your own program. Semel starts a broker, creates the
    topics, and writes input. It kills and restarts the program and the broker,
    and cuts connections. Then it compares the outputs with the input.

    The program finds the broker in the environment: SEMEL_BOOTSTRAP (also as
    KAFKA_BOOTSTRAP_SERVERS), SEMEL_INPUT, SEMEL_OUTPUT, and SEMEL_FOLDER for
    files of its own. In its arguments, {bootstrap}, {input}, {output} and
    {folder} are filled in. A program that ends is started again.

    \b
    semel verify --command 'python my_job.py' --input orders --output invoices
    semel verify --command 'python my_job.py --broker {bootstrap}' \\
        --input orders --output invoices --rule key=my_rules:invoice \\
        --time 60s --faults kill=4,worker-kill=10,cut=30

    Without --command, a built-in workload runs:

    \b
    semel verify --workload copier --faults none --time 10s

    Exits with status 0 if the pipeline is exactly-once, 1 if it is not,
    2 if nothing was proved.
    """
    console = Console(stderr=as_json)
    try:
        chosen_folder = folder or Path(tempfile.mkdtemp(prefix="semel-verify-"))
        options = dict(map(parse_option, option or []))
        chosen_seed = random.randrange(1_000_000) if seed is None else seed
        if command is not None:
            if workload is not None:
                raise ConfigError("--command and --workload exclude each other: leave one out.")
            program = ProgramSettings(
                folder=chosen_folder,
                command=command,
                input=input,
                outputs=tuple(output or ()),
                rule=rule,
                generator=generator,
                target=target,
                client=client,
                faults=faults,
                seed=chosen_seed,
                time_s=parse_time(time),
                options=options,
                transaction_version=transaction_version,
                replay=replay,
            )
            title = f"{command} on {target}"
            again, start = program.again(), lambda watch: run_program(program, watch)
        else:
            if input or output or generator or rule != "copy":
                raise ConfigError("--input, --output, --rule and --generator are for your own program: add --command.")
            settings = RunSettings(
                folder=chosen_folder,
                target=target,
                workload=workload or "copier",
                client=client,
                faults=faults,
                seed=chosen_seed,
                time_s=parse_time(time),
                options=Options.from_mapping(options),
                transaction_version=transaction_version,
                replay=replay,
            )
            title = f"{settings.workload} with {client} on {target}"
            again, start = settings.command(), lambda watch: run(settings, watch)
        finished = _carry_out(start, title, again, parse_time(time), console)
        verdict = ensure_verdict(finished)
    except SemelError as error:
        print_failure("Nothing was proved", error)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(verdict.to_json())
    else:
        _print_verdict(finished, console)
    if status := status_of(verdict):
        raise typer.Exit(status)


def status_of(verdict: Verdict) -> int:
    """A clean verdict of a program that no kill has met while it was writing proves nothing.

    >>> status_of(Verdict((), {"records": 10, "kills_while_writing": 0})), status_of(Verdict((), {"records": 10}))
    (2, 0)
    """
    if not verdict.is_clean:
        return 1
    return 2 if verdict.checked.get("kills_while_writing") == 0 else 0


def _carry_out(start: Callable[[Watch], Finished], title: str, again: str, time_s: float, console: Console) -> Finished:
    console.print(again, style="bold", markup=False, highlight=False, soft_wrap=True)
    with progress_view() as shown:
        return start(lambda progress: shown.update(_view(progress, title, time_s)))


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


def _view(progress: Progress, title: str, time_s: float) -> Table:
    view = Table.grid(padding=(0, 2))
    view.add_row("[bold]semel verify[/bold]", title)
    view.add_row(progress.stage, f"{progress.elapsed_s:.0f} s of {time_s:.0f} s and then to rest")
    view.add_row("faults", f"{progress.faults_done:,} done, {progress.faults_planned:,} planned")
    view.add_row("process lives", f"{progress.lives:,}")
    waiting = "no broker answers" if progress.unstable is None else f"{progress.unstable:,} offsets"
    view.add_row("not stable yet", waiting)
    return view


_SAID: Final = (
    "[green]Exactly once.[/green]",
    "[red]Not exactly once.[/red]",
    "[yellow]Nothing was proved: no kill met the command while it was writing.[/yellow]",
)
"""By exit status."""


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
    for note in finished.notes:
        console.print(note, style="dim", highlight=False, markup=False)
    console.print(_SAID[status_of(verdict)])
    console.print(f"Report: {finished.report}", highlight=False, soft_wrap=True)

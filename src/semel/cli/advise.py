"""`semel advise`: a few questions; the guarantee that a pipeline needs, its cost, and a program that runs as it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.markup import escape

from semel.advise.measured import load_figures
from semel.advise.program import Names
from semel.advise.questions import QUESTIONS, Answers, Question, defaults, read_answer
from semel.advise.recommend import Advice, recommend
from semel.cli.output import Console, print_failure
from semel.errors import ConfigError

_NAMES: Final = Names()


def advise(
    platform: Annotated[str | None, typer.Option(help="service or spark.")] = None,
    source: Annotated[str | None, typer.Option(help="kafka, program or database.")] = None,
    target: Annotated[str | None, typer.Option(help="kafka, postgres, sqlite or calls.")] = None,
    database: Annotated[str | None, typer.Option(help="postgres or sqlite, for source database.")] = None,
    loss: Annotated[str | None, typer.Option(help="May records be lost? no or yes.")] = None,
    duplicates: Annotated[
        str | None, typer.Option(help="What a duplicate costs: harmless, annoying or costly.")
    ] = None,
    writes: Annotated[str | None, typer.Option(help="In a table: replace or add.")] = None,
    takes_key: Annotated[str | None, typer.Option(help="Callee takes an idempotency key: no or yes.")] = None,
    together: Annotated[str | None, typer.Option(help="Records must appear together: yes or no.")] = None,
    deployment: Annotated[str | None, typer.Option(help="single, indexed or statefulset.")] = None,
    latency_ms: Annotated[str | None, typer.Option(help="How soon a result must be visible.")] = None,
    work_s: Annotated[str | None, typer.Option(help="How long one portion of work may take.")] = None,
    name: Annotated[str, typer.Option(help="The pipeline's name.")] = _NAMES.name,
    bootstrap: Annotated[
        str, typer.Option(help="Kafka's HOST:PORT, for the program.", envvar="SEMEL_BOOTSTRAP")
    ] = _NAMES.bootstrap,
    input: Annotated[str, typer.Option("--input", help="The topic to read.")] = _NAMES.input,
    output: Annotated[str, typer.Option(help="The topic to write.")] = _NAMES.output,
    table: Annotated[str, typer.Option(help="The table to write.")] = _NAMES.table,
    postgres: Annotated[str, typer.Option(help="The URL of a Postgres.")] = _NAMES.postgres,
    sqlite: Annotated[str, typer.Option(help="The path of a SQLite file.")] = _NAMES.sqlite,
    checkpoint: Annotated[str, typer.Option(help="Where Spark keeps the checkpoint.")] = _NAMES.checkpoint,
    file: Annotated[str, typer.Option(help="The file whose lines a program or job sends.")] = _NAMES.file,
    url: Annotated[str, typer.Option(help="Where calls go.")] = _NAMES.url,
    folder: Annotated[Path | None, typer.Option(help="Write the programs into this folder; keeps files.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the advice for programs.")] = False,
) -> None:
    """Choose between at-most-once, at-least-once and exactly-once, and print the program for it.

    \b
    semel advise
    semel advise --platform service --source kafka --target postgres --duplicates costly
    semel advise --target kafka --deployment statefulset --folder my-pipeline
    semel advise --platform spark --json | jq -r '.programs[0].text'

    In a terminal it asks what the flags do not say, if no flag is given.
    Otherwise questions without a flag count as answered by their default:
    a service from Kafka to Kafka that may neither lose nor repeat records.

    Exits with status 0 when it has an advice, and with 2 if the answers do
    not fit together or a file is there already.
    """
    console = Console(stderr=as_json)
    flags = {
        "platform": platform,
        "source": source,
        "target": target,
        "database": database,
        "loss": loss,
        "duplicates": duplicates,
        "writes": writes,
        "takes_key": takes_key,
        "together": together,
        "deployment": deployment,
        "latency_ms": latency_ms,
        "work_s": work_s,
    }
    try:
        given = {question.name: _answer(question, flags[question.name]) for question in _asked_by(flags)}
        if not given and not as_json and sys.stdin.isatty() and sys.stdout.isatty():
            given = _ask(console)
        names = Names(name, bootstrap, input, output, table, postgres, sqlite, checkpoint, file, url)
        advice = recommend(Answers(**given), names=names, figures=load_figures())
        written = [] if folder is None else _write(advice, folder)
    except ConfigError as error:
        print_failure("No advice", error)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps(advice.as_dict(), indent=2))
    else:
        _print(advice, written, console)


def _asked_by(flags: dict[str, str | None]) -> list[Question]:
    return [question for question in QUESTIONS if flags[question.name] is not None]


def _answer(question: Question, text: str | None) -> Any:
    try:
        return read_answer(question, text or "")
    except ConfigError as error:
        raise ConfigError(f"{question.flag} {error}") from error


def _ask(console: Console) -> dict[str, Any]:
    """The questions that concern this pipeline, one after the other."""
    given: dict[str, Any] = {}
    for question in QUESTIONS:
        so_far = {**defaults(), **given}
        if not question.concerns(so_far):
            continue
        console.print(f"\n[bold]{escape(question.text)}[/bold]", highlight=False)
        for number, (choice, meaning) in enumerate(question.choices.items(), 1):
            console.print(f"  {number} [cyan]{choice}[/cyan]  {escape(meaning)}", highlight=False)
        while True:
            typed = typer.prompt("", default=so_far[question.name] or "", prompt_suffix="> ", show_default=True)
            try:
                given[question.name] = read_answer(question, str(typed))
                break
            except ConfigError as error:
                console.print(f"[red]{escape(str(error))}[/red]", highlight=False)
    return given


def _write(advice: Advice, folder: Path) -> list[Path]:
    """The programs as files. What is there is never written over."""
    paths = [folder / program.file for program in advice.programs]
    there = [path for path in paths if path.exists()]
    if there:
        raise ConfigError(f"{there[0]} is there already: name another --folder. Nothing was written.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, program in zip(paths, advice.programs, strict=True):
            path.write_text(program.text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to: {error}.") from error
    return paths


def _print(advice: Advice, written: list[Path], console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say(f"\n[bold green]{advice.guarantee}[/bold green]  {escape(advice.promise)}")
    parts = (
        ("Why", advice.reasons),
        ("What it costs", advice.costs),
        ("Mind", advice.cautions),
        ("transactional.id", (advice.transactional_id,)),
        ("Before you start", advice.before),
    )
    for title, lines in parts:
        if lines:
            say(f"\n[bold]{title}[/bold]")
            for line in lines:
                say(f"  {escape(line)}")
    for program in advice.programs:
        say(f"\n[bold]{program.file}[/bold]  ({escape(program.command)})\n")
        typer.echo(program.text)  # by rich, long lines would be cut or broken
    for path in written:
        say(f"Written: {escape(str(path))}")

"""The `semel` command."""

from __future__ import annotations

from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from semel.cli.bench import bench
from semel.cli.demo import demo

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Exactly-once data pipelines between Kafka, Spark and databases.",
)
app.command()(bench)
app.command()(demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"semel {installed_version('semel')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Exactly-once data pipelines between Kafka, Spark and databases."""

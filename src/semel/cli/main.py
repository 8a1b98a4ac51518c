"""The `semel` command."""

from __future__ import annotations

from typing import Annotated

import typer

from semel import __version__
from semel.cli.advise import advise
from semel.cli.bench import bench
from semel.cli.capture import capture
from semel.cli.demo import demo
from semel.cli.doctor import doctor
from semel.cli.guarantees import guarantees
from semel.cli.inspect import inspect
from semel.cli.metrics import metrics
from semel.cli.mirror import mirror
from semel.cli.output import EXIT_CODES, guarded
from semel.cli.produce import produce
from semel.cli.relay import relay
from semel.cli.tail import tail
from semel.cli.topics import topics
from semel.cli.ui import ui
from semel.cli.verify import verify

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Exactly-once data pipelines between Kafka, Spark and databases.",
)
app.command()(guarded(advise))
app.command()(guarded(bench))
app.command()(guarded(capture))
app.command()(guarded(demo))
app.command()(guarded(doctor))
app.command()(guarded(guarantees))
app.command()(guarded(mirror))
app.command(epilog=EXIT_CODES)(guarded(produce))
app.command()(guarded(relay))
app.command(epilog=EXIT_CODES)(guarded(tail))
app.command(epilog=EXIT_CODES)(guarded(ui))
app.command()(guarded(verify))
app.add_typer(inspect, name="inspect")
app.add_typer(metrics, name="metrics")
app.add_typer(topics, name="topics")


@app.command(
    "broker",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    help="Run a Kafka broker in this process; see `semel broker --help`.",
)
def broker(context: typer.Context) -> None:
    # `entry.py` gets there first. This is what `semel --help` lists, and what runs when the app is called by itself.
    from semel.broker.__main__ import main

    raise typer.Exit(main(context.args))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"semel {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Exactly-once data pipelines between Kafka, Spark and databases."""

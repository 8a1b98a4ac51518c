"""`semel metrics`: the dashboard and the alert rules that come with the package, and the names of all metrics."""

from __future__ import annotations

import sys
from importlib.resources import files
from typing import Final

import typer

from semel.cli.output import AsJson, Shown, expected_errors, show, table
from semel.metrics.families import Family, Kind
from semel.metrics.parts import PREFIX, REGISTRY

metrics: Final = typer.Typer(no_args_is_help=True, help="What Prometheus and Grafana need to watch pipelines.")


@metrics.command()
def dashboard() -> None:
    """Print a dashboard for Grafana, to be imported there.

    \b
    semel metrics dashboard > semel-dashboard.json
    """
    _print_file("dashboard.json")


@metrics.command()
def alerts() -> None:
    """Print alert rules for Prometheus; each says what to do.

    \b
    semel metrics alerts > semel-alerts.yml
    """
    _print_file("alerts.yml")


@metrics.command(name="list")
def list_(as_json: AsJson = False) -> None:
    """List the metrics of sinks, sessions and relays. A broker's are on the page that --metrics-port serves.

    \b
    semel metrics list
    semel metrics list --json | jq '.[].name'
    """

    def make() -> Shown:
        found = REGISTRY.families()
        rows = [(_name(one), one.kind.name.lower(), ", ".join(one.labels), one.help_text) for one in found]
        value = [
            {"name": name, "kind": kind, "labels": labels.split(", "), "help": help_text}
            for name, kind, labels, help_text in rows
        ]
        return Shown(value, table(["name", "kind", "labels", "what it shows"], rows))

    with expected_errors():
        show(make, as_json=as_json)


def _name(family: Family) -> str:
    return f"{PREFIX}{family.name}" + ("_total" if family.kind is Kind.COUNTER else "")


def _print_file(name: str) -> None:
    with expected_errors():
        sys.stdout.write(files("semel.metrics").joinpath("files", name).read_text(encoding="utf-8"))

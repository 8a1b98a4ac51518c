"""`semel relay DATABASE`: rows of an outbox table into Kafka, until it is stopped."""

from __future__ import annotations

import threading
from typing import Annotated, Any, Literal

import typer

from semel.bridges.postgres_url import hide_password
from semel.bridges.relay.options import DEFAULT_PROGRESS_TOPIC, POLL_MS, RETRY_S, ROWS_MAX
from semel.bridges.relay.relay import relay as run_relay
from semel.bridges.relay.runs import RelayReport
from semel.cli.connecting import Bootstrap, ConfigFile, ProfileName, Setting, bridge_settings
from semel.cli.until_stopped import until_stopped
from semel.client.dead_letters import DEAD_LETTER_MAX


def relay(
    database: Annotated[
        str,
        typer.Argument(
            help="postgresql://user@host/database, or the path of a SQLite file. Keep a password out of the list of "
            "processes: set SEMEL_DATABASE, or PGPASSWORD.",
            envvar="SEMEL_DATABASE",
        ),
    ],
    name: Annotated[str, typer.Option(help="The relay's own name: a second one of the same name takes over.")],
    table: Annotated[str, typer.Option(help="The outbox table.")] = "outbox",
    topic: Annotated[str, typer.Option(help="A topic, or columns in braces: events.{aggregate_type}.")] = "{topic}",
    value: Annotated[str, typer.Option(help="The column with the record's value.")] = "value",
    key: Annotated[str | None, typer.Option(help="The column with the key; key, if there is one.")] = None,
    headers: Annotated[str | None, typer.Option(help="A column of JSON; headers, if there is one.")] = None,
    timestamp: Annotated[str | None, typer.Option(help="The record's time; created_at, if there is one.")] = None,
    id: Annotated[str, typer.Option("--id", help="A unique whole number that grows.")] = "id",
    xid: Annotated[str, typer.Option(help="Postgres: the column with the row's transaction id.")] = "semel_xid",
    delete: Annotated[bool, typer.Option("--delete", help="Delete rows after they were relayed.")] = False,
    dead_letter: Annotated[str | None, typer.Option(help="The topic for rows that cannot be written.")] = None,
    dead_letter_max: Annotated[int, typer.Option(help="How many such rows a run may have.")] = DEAD_LETTER_MAX,
    resume: Annotated[
        str | None, typer.Option(help="For a database that is another one than before: continue, or all.")
    ] = None,
    progress_topic: Annotated[str, typer.Option(help="Where progress is kept.")] = DEFAULT_PROGRESS_TOPIC,
    transaction_rows_max: Annotated[int, typer.Option(help="How many rows a Kafka transaction may have.")] = ROWS_MAX,
    poll_ms: Annotated[float, typer.Option(help="How often to look for new rows.")] = POLL_MS,
    wake: Annotated[bool, typer.Option(help="Look at once when the database tells of a commit.")] = True,
    retry_s: Annotated[float, typer.Option(help="How long a lost database or broker is tried again.")] = RETRY_S,
    idle_ms: Annotated[float | None, typer.Option(help="End when nothing has come for so long.")] = None,
    bootstrap: Bootstrap = None,
    profile: ProfileName = None,
    config: ConfigFile = None,
    setting: Setting = None,
) -> None:
    """Relay committed rows of an outbox table into Kafka, each exactly once.

    \b
    semel relay postgresql://shop@localhost/shop --name shop --bootstrap localhost:9092
    semel relay shop.db --name shop --bootstrap localhost:9092 --topic orders --delete
    semel relay shop.db --name shop --profile prod

    Prints one line when it is ready. Ctrl-C and SIGTERM end it after the
    present transaction. Exits with status 1 and one sentence if it cannot go on,
    with 2 for wrong use.
    """

    def run(stop: threading.Event) -> RelayReport:
        settings = bridge_settings(bootstrap, profile, config, setting)
        return run_relay(
            database,
            name=name,
            table=table,
            topic=topic,
            value=value,
            key=key,
            headers=headers,
            timestamp=timestamp,
            id=id,
            xid=xid,
            delete=delete,
            dead_letter=dead_letter,
            dead_letter_max=dead_letter_max,
            resume=_resume(resume),
            progress_topic=progress_topic,
            transaction_rows_max=transaction_rows_max,
            poll_ms=poll_ms,
            wake=wake,
            retry_s=retry_s,
            idle_ms=idle_ms,
            stop=stop,
            on_ready=lambda: typer.echo(
                f"semel relay ready: {table} of {hide_password(database)} to {settings['bootstrap.servers']}"
            ),
            settings=settings,
        )

    typer.echo(summary(until_stopped(run)))


def summary(report: RelayReport) -> str:
    parts = [f"{report.rows} rows in {report.transactions} transactions"]
    parts += [f"{report.dead_letters} of them dead letters"] if report.dead_letters else []
    parts += [f"{report.deleted} rows deleted"] if report.deleted else []
    return ", ".join(parts) + "."


def _resume(text: str | None) -> Literal["continue", "all"] | None:
    found: Any = text  # checked with the other options
    return found

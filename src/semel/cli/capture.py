"""`semel capture DATABASE`: committed changes of Postgres tables into Kafka, until it is stopped."""

from __future__ import annotations

import threading
from typing import Annotated

import typer

from semel.bridges.capture.capture import capture as run_capture
from semel.bridges.capture.options import HEARTBEAT_S
from semel.bridges.postgres_url import hide_password
from semel.bridges.relay.options import DEFAULT_PROGRESS_TOPIC, POLL_MS, RETRY_S, ROWS_MAX
from semel.bridges.relay.runs import RelayReport
from semel.cli.connecting import Bootstrap, ConfigFile, ProfileName, Setting, bridge_settings
from semel.cli.relay import summary
from semel.cli.until_stopped import until_stopped
from semel.client.dead_letters import DEAD_LETTER_MAX


def capture(
    database: Annotated[
        str,
        typer.Argument(
            help="postgresql://user@host/database. Keep a password out of the list of processes: set SEMEL_DATABASE, "
            "or PGPASSWORD.",
            envvar="SEMEL_DATABASE",
        ),
    ],
    name: Annotated[str, typer.Option(help="The capture's own name: a second one of the same name takes over.")],
    table: Annotated[list[str] | None, typer.Option(help="A table to capture. May be repeated.")] = None,
    outbox: Annotated[str | None, typer.Option(help="Instead: an outbox table, whose new rows are records.")] = None,
    topic: Annotated[
        str | None, typer.Option(help="A topic, with columns in braces; {schema}.{table}, or {topic} of an outbox.")
    ] = None,
    value: Annotated[str, typer.Option(help="Outbox: the column with the record's value.")] = "value",
    key: Annotated[str | None, typer.Option(help="Outbox: the column with the key; key, if there is one.")] = None,
    headers: Annotated[str | None, typer.Option(help="Outbox: a column of JSON; headers, if there is one.")] = None,
    timestamp: Annotated[
        str | None, typer.Option(help="Outbox: the record's time; created_at, if there is one.")
    ] = None,
    slot: Annotated[str | None, typer.Option(help="The replication slot; semel_NAME.")] = None,
    publication: Annotated[str | None, typer.Option(help="The publication; as the slot.")] = None,
    failover: Annotated[bool, typer.Option("--failover", help="Standbys keep the slot too (Postgres 17).")] = False,
    snapshot: Annotated[bool, typer.Option(help="Begin with the rows that are there.")] = True,
    heartbeat_s: Annotated[float, typer.Option(help="How often the slot moves on while nothing comes.")] = HEARTBEAT_S,
    dead_letter: Annotated[str | None, typer.Option(help="The topic for events that cannot be written.")] = None,
    dead_letter_max: Annotated[int, typer.Option(help="How many such events a run may have.")] = DEAD_LETTER_MAX,
    progress_topic: Annotated[str, typer.Option(help="Where progress is kept.")] = DEFAULT_PROGRESS_TOPIC,
    transaction_rows_max: Annotated[int, typer.Option(help="How many events a Kafka transaction may have.")] = ROWS_MAX,
    poll_ms: Annotated[float, typer.Option(help="How often to look whether to end.")] = POLL_MS,
    retry_s: Annotated[float, typer.Option(help="How long a lost database or broker is tried again.")] = RETRY_S,
    idle_ms: Annotated[float | None, typer.Option(help="End when nothing has come for so long.")] = None,
    bootstrap: Bootstrap = None,
    profile: ProfileName = None,
    config: ConfigFile = None,
    setting: Setting = None,
) -> None:
    """Write the changes of Postgres tables into Kafka, each exactly once.

    \b
    semel capture postgresql://shop@localhost/shop --name shop --table accounts --bootstrap localhost:9092
    semel capture postgresql://shop@localhost/shop --name shop --outbox outbox --bootstrap localhost:9092

    Prints one line when it is ready. Ctrl-C and SIGTERM end it after the
    present transaction. Exits with status 1 and one sentence if it cannot go on,
    with 2 for wrong use.
    """
    what = outbox or ", ".join(table or [])

    def run(stop: threading.Event) -> RelayReport:
        settings = bridge_settings(bootstrap, profile, config, setting)
        return run_capture(
            database,
            name=name,
            tables=table,
            outbox=outbox,
            topic=topic,
            value=value,
            key=key,
            headers=headers,
            timestamp=timestamp,
            slot=slot,
            publication=publication,
            failover=failover,
            snapshot=snapshot,
            heartbeat_s=heartbeat_s,
            dead_letter=dead_letter,
            dead_letter_max=dead_letter_max,
            progress_topic=progress_topic,
            transaction_rows_max=transaction_rows_max,
            poll_ms=poll_ms,
            retry_s=retry_s,
            idle_ms=idle_ms,
            stop=stop,
            on_ready=lambda: typer.echo(
                f"semel capture ready: {what} of {hide_password(database)} to {settings['bootstrap.servers']}"
            ),
            settings=settings,
        )

    typer.echo(summary(until_stopped(run)))

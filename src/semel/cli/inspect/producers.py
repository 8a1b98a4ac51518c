"""`semel inspect producers`: what the leaders remember of the producers of a topic."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from semel.cli.connecting import Bootstrap, ConfigFile, ProfileName, Setting, connect
from semel.cli.output import AsJson, Shown, Watch, expected_errors, parse_place, show, table
from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.partitions import TopicPartition
from semel.inspect.shown import show_span
from semel.inspect.transactions import by_producer


def producers(
    topic: Annotated[str, typer.Argument(metavar="TOPIC[:PARTITION]", help="A topic, or one partition of it.")],
    as_json: AsJson = False,
    watch: Watch = None,
    bootstrap: Bootstrap = None,
    profile: ProfileName = None,
    config: ConfigFile = None,
    setting: Setting = None,
) -> None:
    """Show the idempotent and transactional producers of a topic.

    Partition leaders remember the last sequence of each producer, and where
    its open transaction begins. The transactional id is shown where this user
    may describe it.

    \b
    semel inspect producers orders --bootstrap localhost:9092
    semel inspect producers orders:3 --json | jq '.[].last_sequence'
    """
    with expected_errors(), connect(bootstrap, profile, config, setting) as cluster:
        show(lambda: _report(cluster, topic), as_json=as_json, watch=watch)


def _report(cluster: Cluster, place: str) -> Shown:
    topic, partition = parse_place(place)
    admin = Admin(cluster)
    numbers = list(cluster.leaders(topic)) if partition is None else [partition]
    found = admin.describe_all_producers(TopicPartition(topic, number) for number in numbers)
    ids = {producer.producer_id for producers in found.values() for producer in producers}
    known = by_producer(admin, ids) if ids else {}
    values = [
        {
            "topic": topic,
            "partition": named.partition,
            "producer_id": one.producer_id,
            "producer_epoch": one.producer_epoch,
            "last_sequence": one.last_sequence,
            "last_timestamp_ms": one.last_timestamp_ms,
            "coordinator_epoch": one.coordinator_epoch,
            "transaction_start_offset": one.transaction_start_offset,
            "transactional_id": known[one.producer_id].transactional_id if one.producer_id in known else None,
        }
        for named, producers in sorted(found.items())
        for one in sorted(producers, key=lambda one: one.producer_id)
    ]
    if not values:
        return Shown(
            values, ["No producer is remembered here: none with idempotence has written, or they have expired."]
        )
    now_ms = time.time() * 1000
    rows = [
        (
            one["partition"],
            one["producer_id"],
            one["producer_epoch"],
            one["last_sequence"],
            show_span(max(0.0, now_ms - one["last_timestamp_ms"])),
            "-" if one["transaction_start_offset"] is None else one["transaction_start_offset"],
            one["transactional_id"] or "-",
        )
        for one in values
    ]
    titles = ("PARTITION", "PRODUCER ID", "EPOCH", "LAST SEQUENCE", "LAST WRITE", "OPEN FROM", "TRANSACTIONAL ID")
    return Shown(values, table(titles, rows, right=titles[:4]))

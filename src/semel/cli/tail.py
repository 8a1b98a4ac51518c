"""`semel tail TOPIC`: the last records of a topic, committed, open and aborted ones told apart."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from semel.cli.connecting import Bootstrap, ConfigFile, ProfileName, Setting, connect
from semel.cli.output import AsJson, expected_errors, paint, parse_place, print_json
from semel.client.cluster import Cluster
from semel.client.offsets import edge_offsets
from semel.client.partitions import TopicPartition
from semel.errors import ConfigError
from semel.inspect.following import Tailed, TailedMarker, TailedRecord
from semel.inspect.following import tail as follow_records
from semel.inspect.shown import TEXT_MAX, bytes_as_json, show_text, show_time


def tail(
    topic: Annotated[str, typer.Argument(metavar="TOPIC[:PARTITION]", help="A topic, or one partition of it.")],
    count: Annotated[
        int, typer.Option("-n", "--offsets", min=0, help="Begin so many offsets before the end of each partition.")
    ] = 10,
    start: Annotated[
        str | None, typer.Option("--from", metavar="OFFSET", help="Begin at this offset, earliest or latest.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as records arrive, until Ctrl-C.")] = False,
    committed: Annotated[bool, typer.Option("--committed", help="Only what readers of committed records see.")] = False,
    cut: Annotated[
        int, typer.Option(min=0, help="How many characters of a key, value or header are shown; 0 for all.")
    ] = TEXT_MAX,
    as_json: AsJson = False,
    bootstrap: Bootstrap = None,
    profile: ProfileName = None,
    config: ConfigFile = None,
    setting: Setting = None,
) -> None:
    """Show the last records of a topic, and what became of each.

    committed records are seen by every reader; plain ones belong to no
    transaction. aborted ones are seen only by readers of uncommitted records.
    open ones wait for their transaction: when it ends, a line says how.
    Control characters are escaped, and long values are cut.

    \b
    semel tail orders --bootstrap localhost:9092
    semel tail orders:0 --from earliest --follow
    semel tail orders --json | jq -r 'select(.status == "aborted") | .value'
    """
    with expected_errors(), connect(bootstrap, profile, config, setting) as cluster:
        name, number = parse_place(topic)
        positions = _positions(cluster, name, number, start, count, committed)
        for one in follow_records(cluster, positions, follow=follow, committed_only=committed):
            if as_json:
                print_json(_value(one))
            else:
                typer.echo(_line(one, cut or None))
            if follow:
                sys.stdout.flush()


def _positions(
    cluster: Cluster, topic: str, number: int | None, start: str | None, count: int, committed: bool
) -> dict[TopicPartition, int]:
    numbers = list(cluster.leaders(topic)) if number is None else [number]
    partitions = [TopicPartition(topic, one) for one in numbers]
    first = edge_offsets(cluster, partitions, "earliest")
    last = edge_offsets(cluster, partitions, "latest", "read_committed" if committed else "read_uncommitted")
    if start is None:
        return {one: max(first[one], last[one] - count) for one in partitions}
    if start in ("earliest", "latest"):
        return first if start == "earliest" else last
    if not start.isascii() or not start.isdigit() or len(start) > 18:
        raise ConfigError("--from takes an offset, earliest or latest. Nothing was read.")
    return {one: min(max(int(start), first[one]), last[one]) for one in partitions}


def _line(one: Tailed, cut: int | None) -> str:
    place = f"{one.partition.partition}:{_offset(one)}"
    if isinstance(one, TailedMarker):
        ended = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in one.decided)
        state = "committed" if one.marker.kind == "commit" else "aborted"
        about = f": {ended} are {paint(state)}" if ended else ""
        return f"{place:<12} {one.marker.kind:<9} of producer {one.marker.producer_id}{about}"
    record = one.record
    key = "" if record.key is None else f"{show_text(record.key, cut)} = "
    headers = "".join(f"  [{show_text(name, cut)}: {show_text(value, cut)}]" for name, value in record.headers)
    state = f"{paint(one.status)}{' ' * (9 - len(one.status))}"
    return f"{place:<12} {state} {show_time(record.timestamp_ms)}  {key}{show_text(record.value, cut)}{headers}"


def _offset(one: Tailed) -> int:
    return one.record.offset if isinstance(one, TailedRecord) else one.marker.offset


def _value(one: Tailed) -> dict[str, Any]:
    place = {"topic": one.partition.topic, "partition": one.partition.partition, "offset": _offset(one)}
    if isinstance(one, TailedMarker):
        return {
            **place,
            "status": "marker",
            "marker": one.marker.kind,
            "producer_id": one.marker.producer_id,
            "producer_epoch": one.marker.producer_epoch,
            "decided": [{"first_offset": first, "last_offset": last} for first, last in one.decided],
        }
    return {
        **place,
        "status": one.status,
        "timestamp_ms": one.record.timestamp_ms,
        **bytes_as_json("key", one.record.key),
        **bytes_as_json("value", one.record.value),
        "headers": [{"name": name, **bytes_as_json("value", value)} for name, value in one.record.headers],
        "producer_id": one.batch.producer_id,
        "producer_epoch": one.batch.producer_epoch,
    }

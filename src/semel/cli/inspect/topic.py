"""`semel inspect topic`: a topic's partitions, batches or records, who wrote them, and who sees them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from semel.cli.connecting import Bootstrap, ConfigFile, ProfileName, Setting, connect
from semel.cli.output import AsJson, Shown, Watch, bold, expected_errors, parse_place, show, table
from semel.client.cluster import Cluster
from semel.client.offsets import edge_offsets
from semel.client.partitions import TopicPartition
from semel.errors import ConfigError, OffsetOutOfRange
from semel.inspect.excerpts import Excerpt, LoggedRecord, ShownBatch, read_excerpt
from semel.inspect.ledgers import DEFAULT_LEDGER
from semel.inspect.provenance import Provenance, find_provenance
from semel.inspect.shown import bytes_as_json, show_text, show_time
from semel.inspect.wording import seen_by, spark_batch_of, transaction_of, writer_of
from semel.wire import ErrorCode

_CELL_MAX = 40


def topic(
    topic: Annotated[str, typer.Argument(metavar="TOPIC[:PARTITION]", help="A topic, or one partition of it.")],
    offset: Annotated[int | None, typer.Option(min=0, help="Explain the record at this offset.")] = None,
    start: Annotated[int | None, typer.Option("--from", min=0, help="Begin at this offset.")] = None,
    end: Annotated[int | None, typer.Option("--to", min=0, help="End before this offset.")] = None,
    records: Annotated[bool, typer.Option("--records", help="Show records in place of batches.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many batches or records.")] = 20,
    ledger: Annotated[str, typer.Option(help="Where Spark pipelines have their ledger.")] = DEFAULT_LEDGER,
    as_json: AsJson = False,
    watch: Watch = None,
    bootstrap: Bootstrap = None,
    profile: ProfileName = None,
    config: ConfigFile = None,
    setting: Setting = None,
) -> None:
    """Show where the partitions of a topic end, or what one partition holds.

    Without a partition: the ends of each. With one: its last batches, with
    their producers, sequences and markers; or, with --records, the records.
    With --offset: who wrote a record, in which transaction, what became of it,
    who sees it, and the Spark batch that it came from.

    \b
    semel inspect topic orders --bootstrap localhost:9092
    semel inspect topic orders:0 --from 100 --to 200
    semel inspect topic orders:0 --records --json | jq '.records[].status'
    semel inspect topic orders:0 --offset 123
    """
    with expected_errors(), connect(bootstrap, profile, config, setting) as cluster:
        name, number = parse_place(topic)
        if number is None:
            if offset is not None or start is not None or end is not None or records:
                raise ConfigError(
                    "Offsets and records belong to one partition: write TOPIC:PARTITION. Nothing was asked."
                )
            show(lambda: _ends(cluster, name), as_json=as_json, watch=watch)
            return
        named = TopicPartition(name, number)
        if offset is not None:
            show(lambda: _explain(cluster, named, offset, ledger), as_json=as_json, watch=watch)
            return
        show(lambda: _excerpt(cluster, named, start, end, limit, records), as_json=as_json, watch=watch)


def _ends(cluster: Cluster, name: str) -> Shown:
    partitions = [TopicPartition(name, number) for number in cluster.leaders(name)]
    begin = edge_offsets(cluster, partitions, "earliest")
    stable = edge_offsets(cluster, partitions, "latest", "read_committed")
    ends = edge_offsets(cluster, partitions, "latest", "read_uncommitted")
    values = [
        {
            "partition": one.partition,
            "log_start": begin[one],
            "last_stable_offset": stable[one],
            "high_watermark": ends[one],
            "leader": cluster.leader(*one).node,
        }
        for one in partitions
    ]
    titles = ("PARTITION", "BEGINS AT", "STABLE TO", "END", "HELD BACK", "LEADER")
    rows = [
        (one["partition"], one["log_start"], one["last_stable_offset"], one["high_watermark"],
         one["high_watermark"] - one["last_stable_offset"], one["leader"])
        for one in values
    ]  # fmt: skip
    return Shown(values, table(titles, rows, right=titles))


def _excerpt(
    cluster: Cluster, named: TopicPartition, start: int | None, end: int | None, limit: int, records: bool
) -> Shown:
    [first] = edge_offsets(cluster, [named], "earliest").values()
    [last] = edge_offsets(cluster, [named], "latest", "read_uncommitted").values()
    if start is None:
        start = max(first, (last if end is None else min(end, last)) - limit)
    if not first <= start <= last:
        raise _out_of_range(named, start, first, last)
    found = read_excerpt(cluster, named, start, end=end, batches_max=limit)
    about = {
        "topic": named.topic,
        "partition": named.partition,
        "log_start": found.log_start_offset,
        "last_stable_offset": found.last_stable_offset,
        "high_watermark": found.high_watermark,
        "next_offset": found.next_offset,
        "is_decided": found.is_decided,
    }
    place = show_text(f"{named.topic}:{named.partition}", longest=None)
    ends = f"stable to {found.last_stable_offset}, ends at {found.high_watermark}"
    lines = [f"{place}: begins at {found.log_start_offset}, {ends}"]
    if records:
        chosen = [one for one, _ in zip(found.records(start, end), range(limit), strict=False)]
        value = {**about, "records": [_record_value(one) for one in chosen]}
        lines += _record_lines(chosen)
    else:
        value = {**about, "batches": [_batch_value(one) for one in found.batches]}
        lines += _batch_lines(found)
    if not found.is_decided:
        lines.append("The log was not read far enough to tell whether the open ones have ended.")
    return Shown(value, lines)


def _out_of_range(named: TopicPartition, offset: int, first: int, last: int) -> OffsetOutOfRange:
    return OffsetOutOfRange(
        f"Topic {named.topic!r} partition {named.partition} holds offsets {first} up to {last}, and not {offset}. "
        "Nothing was read: choose one of these.",
        code=ErrorCode.offset_out_of_range,
    )


def _batch_lines(found: Excerpt) -> list[str]:
    if not found.batches:
        return ["Nothing is there."]
    rows = [
        (
            _span(one.batch.base_offset, one.batch.last_offset),
            one.batch.marker.kind + " marker" if one.batch.marker is not None else one.batch.status,
            one.batch.record_count,
            show_time(one.batch.max_timestamp_ms),
            one.batch.producer_id if one.batch.producer_id >= 0 else "-",
            one.batch.producer_epoch if one.batch.producer_id >= 0 else "-",
            _span(one.batch.base_sequence, one.batch.last_sequence) if one.batch.base_sequence >= 0 else "-",
            one.batch.total_bytes,
            one.batch.compression,
            one.ended_by.offset if one.ended_by is not None else "-",
        )
        for one in found.batches
    ]
    titles = ("OFFSETS", "STATUS", "RECORDS", "TIME", "PRODUCER ID", "EPOCH", "SEQUENCES", "BYTES", "CODEC", "ENDED AT")
    return table(titles, rows, right=("RECORDS", "PRODUCER ID", "EPOCH", "BYTES", "ENDED AT"))


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def _record_lines(chosen: list[LoggedRecord]) -> list[str]:
    if not chosen:
        return ["No record is there."]
    rows = [
        (
            one.record.offset,
            one.batch.status,
            one.visible_to,
            show_time(one.record.timestamp_ms),
            one.batch.producer_id if one.batch.producer_id >= 0 else "-",
            show_text(one.record.key, _CELL_MAX),
            show_text(one.record.value, _CELL_MAX),
        )
        for one in chosen
    ]
    titles = ("OFFSET", "STATUS", "SEEN BY", "TIME", "PRODUCER ID", "KEY", "VALUE")
    return table(titles, rows, right=("OFFSET", "PRODUCER ID"))


def _batch_value(one: ShownBatch) -> dict[str, Any]:
    batch = one.batch
    return {
        "base_offset": batch.base_offset,
        "last_offset": batch.last_offset,
        "status": batch.status,
        "marker": None if batch.marker is None else batch.marker.kind,
        "coordinator_epoch": None if batch.marker is None else batch.marker.coordinator_epoch,
        "records": batch.record_count,
        "bytes": batch.total_bytes,
        "compression": batch.compression,
        "max_timestamp_ms": batch.max_timestamp_ms,
        "producer_id": batch.producer_id,
        "producer_epoch": batch.producer_epoch,
        "base_sequence": batch.base_sequence,
        "last_sequence": batch.last_sequence,
        "leader_epoch": batch.leader_epoch,
        "is_transactional": batch.is_transactional,
        "ended_at_offset": None if one.ended_by is None else one.ended_by.offset,
    }


def _record_value(one: LoggedRecord) -> dict[str, Any]:
    return {
        "offset": one.record.offset,
        "status": one.batch.status,
        "seen_by": one.visible_to,
        "timestamp_ms": one.record.timestamp_ms,
        **bytes_as_json("key", one.record.key),
        **bytes_as_json("value", one.record.value),
        "headers": [{"name": name, **bytes_as_json("value", value)} for name, value in one.record.headers],
        "producer_id": one.batch.producer_id,
        "producer_epoch": one.batch.producer_epoch,
        "base_offset": one.batch.base_offset,
        "is_transactional": one.batch.is_transactional,
        "ended_at_offset": None if one.ended_by is None else one.ended_by.offset,
    }


# -- one record ----------------------------------------------------------------------------------------------------


def _explain(cluster: Cluster, named: TopicPartition, offset: int, ledger: str) -> Shown:
    [first] = edge_offsets(cluster, [named], "earliest").values()
    [last] = edge_offsets(cluster, [named], "latest", "read_uncommitted").values()
    if not first <= offset < last:
        raise _out_of_range(named, offset, first, last)
    found = read_excerpt(cluster, named, offset, end=offset + 1, batches_max=1)
    record = next(iter(found.records(offset, offset + 1)), None)
    if record is None:
        return _no_record(found, named, offset)
    origin = find_provenance(cluster, record.batch.producer_id, record.batch.producer_epoch, ledger=ledger)
    spark = None
    if origin.spark is not None:
        entry = origin.spark
        spark = {
            "pipeline": entry.pipeline,
            "job": entry.job,
            "batch": None if entry.job is not None else entry.entry.batch,
            "query": entry.entry.query or None,
        }
    value = {
        "topic": named.topic,
        "partition": named.partition,
        **_record_value(record),
        "is_decided": found.is_decided,
        "transactional_id": origin.transactional_id,
        "spark": spark,
        "left_out": list(origin.left_out),
    }
    return Shown(value, _explanation(named, found, record, origin))


def _no_record(found: Excerpt, named: TopicPartition, offset: int) -> Shown:
    marker = next((one.batch.marker for one in found.batches if one.batch.base_offset == offset), None)
    place = f"{show_text(named.topic, longest=None)}:{named.partition} offset {offset}"
    about = {"topic": named.topic, "partition": named.partition, "offset": offset}
    if marker is None:
        return Shown({**about, "status": "gone"}, [f"{place}: no record. Compaction has removed it."])
    value = {**about, "status": "marker", "marker": marker.kind, "producer_id": marker.producer_id,
             "producer_epoch": marker.producer_epoch, "coordinator_epoch": marker.coordinator_epoch}  # fmt: skip
    line = f"{place}: a {marker.kind} marker, which ends the transaction of producer {marker.producer_id} here."
    return Shown(value, [line, "Readers step over it. It is no record, and still takes an offset."])


def _explanation(named: TopicPartition, found: Excerpt, one: LoggedRecord, origin: Provenance) -> list[str]:
    rows: list[tuple[str, str]] = [
        ("record", f"{show_text(named.topic, longest=None)}:{named.partition} offset {one.record.offset}"),
        ("time", show_time(one.record.timestamp_ms)),
        ("key", show_text(one.record.key)),
        ("value", show_text(one.record.value)),
        *(("header", f"{show_text(name)} = {show_text(value)}") for name, value in one.record.headers),
        ("written by", writer_of(one, origin)),
        ("transaction", transaction_of(one, found)),
        ("seen by", seen_by(one, found)),
    ]
    if (spark := spark_batch_of(origin)) is not None:
        rows.append(("spark", spark))
    rows += [("not known", show_text(sentence, longest=500)) for sentence in origin.left_out]
    return [f"{bold(f'{title:12}')}{text}" for title, text in rows]

"""One record: who wrote it, who sees it, and its whole value, a piece at a time or as a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from semel.client.cluster import Cluster
from semel.client.partitions import TopicPartition
from semel.errors import SemelError, UnknownTopic
from semel.inspect.provenance import find_provenance
from semel.inspect.shown import show_text, show_time
from semel.inspect.wording import seen_by, spark_batch_of, transaction_of, writer_of
from semel.web.site import number_of, site_of, text_of
from semel.web.views.topics import marker_at, read_one
from semel.wire import ErrorCode

PIECE: Final = 16 << 10
"""Bytes of a value that are shown at a time."""
_HEADERS_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class RecordNow:
    """What the page tells of a record. `facts` are titles with sentences."""

    facts: list[tuple[str, str]]
    headers: list[tuple[str, str]]
    header_count: int
    size: int | None
    """Of the value in bytes; None if the record has none."""
    piece: str = ""
    piece_end: int = 0


def _look_at_record(cluster: Cluster, named: TopicPartition, offset: int, start: int, ledger: str) -> RecordNow:
    found, one = read_one(cluster, named, offset)
    if one is None:
        marker = marker_at(found, offset)
        said = "Compaction has removed the record that was here."
        if marker is not None and marker.marker is not None:
            said = f"A {marker.marker.kind} marker: it ends the transaction of producer {marker.producer_id} here."
            said += " Readers step over it. It is no record, and still takes an offset."
        return RecordNow([("here", said)], [], 0, None)
    origin = find_provenance(cluster, one.batch.producer_id, one.batch.producer_epoch, ledger=ledger)
    facts = [
        ("status", one.batch.status),
        ("time", show_time(one.record.timestamp_ms)),
        ("key", show_text(one.record.key, 1_000)),
        ("written by", writer_of(one, origin)),
        ("transaction", transaction_of(one, found)),
        ("seen by", seen_by(one, found)),
    ]
    if (spark := spark_batch_of(origin)) is not None:
        facts.append(("Spark", spark))
    facts += [("not known", show_text(sentence, 500)) for sentence in origin.left_out]
    headers = [(show_text(name), show_text(value, 500)) for name, value in one.record.headers[:_HEADERS_MAX]]
    value = one.record.value
    if value is None:
        return RecordNow(facts, headers, len(one.record.headers), None)
    piece = bytes(value[start : start + PIECE])
    text = show_text(piece, longest=None)
    return RecordNow(facts, headers, len(one.record.headers), len(value), text, start + len(piece))


async def record(request: Request) -> Response:
    """One record."""
    site = site_of(request)
    named = TopicPartition(text_of(request, "topic"), number_of(request, "partition"))
    offset, start = number_of(request, "offset"), number_of(request, "at", 0)
    ledger = site.settings.ledger
    look = await site.looks.ask(
        ("record", named, offset, start),
        lambda cluster: _look_at_record(cluster, named, offset, start, ledger),
        fresh_s=5.0,
        patience_s=3.0,
        deadline_s=15.0,
    )
    return site.page(request, "record.html", look, named=named, offset=offset, start=start, piece=PIECE)


async def value(request: Request) -> Response:
    """The whole value as a file. It is never shown as what it says it is."""
    site = site_of(request)
    named = TopicPartition(text_of(request, "topic"), number_of(request, "partition"))
    offset = number_of(request, "offset")

    def job(cluster: Cluster) -> bytes:
        _, one = read_one(cluster, named, offset)
        if one is None or one.record.value is None:
            raise UnknownTopic("There is no value at this offset.", code=ErrorCode.offset_out_of_range)
        return bytes(one.record.value)

    try:
        content = await site.looks.do(job)
    except SemelError as error:
        return site.error(request, error)
    name = "".join(one if one.isascii() and (one.isalnum() or one in "-_.") else "_" for one in named.topic)
    file_name = f"{name}-{named.partition}-{offset}.bin"
    return Response(
        content,
        media_type="application/octet-stream",
        headers={"Content-Disposition": f'attachment; filename="{file_name}"'},
    )

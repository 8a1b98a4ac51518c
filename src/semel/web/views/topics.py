"""The topic browser: topics, their partitions, and records with what became of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from starlette.requests import Request
from starlette.responses import Response

from semel.client.cluster import Cluster
from semel.client.offsets import edge_offsets
from semel.client.partitions import TopicPartition
from semel.errors import OffsetOutOfRange
from semel.inspect.excerpts import Excerpt, LoggedRecord, read_excerpt
from semel.inspect.outcomes import LoggedBatch, Status
from semel.inspect.shown import show_text
from semel.web.site import Paging, WrongAddress, number_of, optional_number_of, page_number, search_of, site_of, text_of
from semel.wire import ErrorCode

FRESH_S: Final = 3.0
_TOPICS: Final = 100
_PARTITIONS: Final = 200
_PARTITIONS_OF_LIST_MAX: Final = 5_000
"""In a list of topics, the ends are asked of so many partitions."""
_RECORDS: Final = 50
_BATCHES_MAX: Final = 500
_EXCERPT_BYTES_MAX: Final = 8 << 20
UNPACKED_BYTES_MAX: Final = 64 << 20
_KEY_MAX: Final = 60
_VALUE_MAX: Final = 160
_STATUSES: Final = ("plain", "committed", "open", "aborted")
_SHOW: Final = ("all", *_STATUSES)


# -- the list ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TopicNow:
    """A topic. `offsets` and `held` are None if there are too many partitions to ask for."""

    name: str
    partitions: int
    offsets: int | None = None
    held: int | None = None
    """Offsets that readers of committed records cannot reach yet."""


@dataclass(frozen=True, slots=True)
class TopicsNow:
    """One page of the topics."""

    total: int
    partitions: int
    topics: list[TopicNow]


def look_at_topics(cluster: Cluster, wanted: str, page: int) -> TopicsNow:
    """Topics whose name holds `wanted`."""
    every = cluster.list_topics()
    # Kafka's own topics come last.
    names = sorted((name for name in every if wanted in name), key=lambda name: (name.startswith("__"), name))
    paging = Paging(page, _TOPICS, len(names))
    shown = names[paging.start : paging.end]
    places = [TopicPartition(name, number) for name in shown for number, led in every[name].items() if led.node >= 0]
    count = sum(len(every[name]) for name in names)
    if len(places) > _PARTITIONS_OF_LIST_MAX:
        return TopicsNow(len(names), count, [TopicNow(name, len(every[name])) for name in shown])
    ends = look_at_ends(cluster, places)
    topics = {name: TopicNow(name, len(every[name]), 0, 0) for name in shown}
    for one in ends:
        known = topics[one.topic]
        offsets = (known.offsets or 0) + one.high_watermark - one.log_start
        topics[one.topic] = TopicNow(one.topic, known.partitions, offsets, (known.held or 0) + one.held)
    return TopicsNow(len(names), count, list(topics.values()))


@dataclass(frozen=True, slots=True)
class Ends:
    """Where a partition begins, is stable to, and ends."""

    topic: str
    partition: int
    leader: int
    log_start: int
    last_stable_offset: int
    high_watermark: int

    @property
    def held(self) -> int:
        return max(0, self.high_watermark - self.last_stable_offset)


def look_at_ends(cluster: Cluster, places: list[TopicPartition]) -> list[Ends]:
    """Three questions to each leader, whatever the number of partitions."""
    first = edge_offsets(cluster, places, "earliest")
    stable = edge_offsets(cluster, places, "latest", "read_committed")
    last = edge_offsets(cluster, places, "latest", "read_uncommitted")
    return [Ends(*one, cluster.leader(*one).node, first[one], stable[one], last[one]) for one in places]


async def topics(request: Request) -> Response:
    """All topics."""
    site, page = site_of(request), page_number(request)
    wanted = search_of(request)
    look = await site.looks.ask(("topics", wanted, page), lambda cluster: look_at_topics(cluster, wanted, page))
    paging = Paging(page, _TOPICS, 0 if look.value is None else look.value.total)
    return site.page(request, "topics.html", look, paging=paging, wanted=wanted)


async def topic(request: Request) -> Response:
    """One topic with its partitions."""
    site, name = site_of(request), text_of(request, "name")

    def job(cluster: Cluster) -> list[Ends]:
        cluster.refresh_topics([name])
        leaders = cluster.leaders(name)
        return look_at_ends(cluster, [TopicPartition(name, one) for one in sorted(leaders) if leaders[one].node >= 0])

    look = await site.looks.ask(("topic", name), job)
    rows = look.value or []
    paging = Paging(page_number(request), _PARTITIONS, len(rows))
    return site.page(request, "topic.html", look, name=name, rows=rows[paging.start : paging.end], paging=paging)


# -- records -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordRow:
    """A record or a marker, as text that is cut."""

    offset: int
    status: Status
    time_ms: int
    producer_id: int
    producer_epoch: int
    seen_by: str
    key: str | None
    value: str
    header_count: int = 0
    marker: Literal["commit", "abort"] | None = None
    ended_at: int | None = None


@dataclass(frozen=True, slots=True)
class RecordsNow:
    """A piece of a partition. `next_offset` is the first offset that was not looked at."""

    ends: Ends
    start: int
    next_offset: int
    is_decided: bool
    rows: list[RecordRow] = field(default_factory=list[RecordRow])


def look_at_records(cluster: Cluster, named: TopicPartition, start: int | None, show: str) -> RecordsNow:
    """Records from `start` on, or the last ones. With `show`, those of one status among the batches that were read."""
    if show not in _SHOW:
        raise WrongAddress(f"A record is {', '.join(_STATUSES)}, or all are shown. Nothing was read.")
    cluster.refresh_topics([named.topic])
    [ends] = look_at_ends(cluster, [named])
    if start is None:
        start = max(ends.log_start, ends.high_watermark - _RECORDS)
    if not ends.log_start <= start <= ends.high_watermark:
        raise OffsetOutOfRange(
            f"The partition holds offsets {ends.log_start} up to {ends.high_watermark}, and not {start}. Nothing was "
            "read: choose one of these.",
            code=ErrorCode.offset_out_of_range,
        )
    found = read_excerpt(cluster, named, start, batches_max=_BATCHES_MAX, bytes_max=_EXCERPT_BYTES_MAX)
    rows = sorted([*_markers(found, start), *_records(found, start, show)], key=lambda row: row.offset)
    cut = rows[_RECORDS].offset if len(rows) > _RECORDS else found.next_offset
    return RecordsNow(ends, start, max(cut, start), found.is_decided, rows[:_RECORDS])


def _markers(found: Excerpt, start: int) -> list[RecordRow]:
    return [
        RecordRow(
            batch.base_offset,
            "marker",
            batch.max_timestamp_ms,
            batch.producer_id,
            batch.producer_epoch,
            "nobody",
            None,
            "",
            marker=batch.marker.kind,
        )
        for one in found.batches
        if (batch := one.batch).marker is not None and batch.base_offset >= start
    ]


def _records(found: Excerpt, start: int, show: str) -> list[RecordRow]:
    rows: list[RecordRow] = []
    for one in found.records(start, unpacked_bytes_max=UNPACKED_BYTES_MAX):
        if show in ("all", one.batch.status):
            rows.append(_row(one))
            if len(rows) > _RECORDS:
                break
    return rows


def _row(one: LoggedRecord) -> RecordRow:
    record, batch = one.record, one.batch
    return RecordRow(
        record.offset,
        batch.status,
        record.timestamp_ms,
        batch.producer_id,
        batch.producer_epoch,
        one.visible_to,
        None if record.key is None else show_text(record.key, _KEY_MAX),
        show_text(record.value, _VALUE_MAX),
        len(record.headers),
        ended_at=None if one.ended_by is None else one.ended_by.offset,
    )


def read_one(cluster: Cluster, named: TopicPartition, offset: int) -> tuple[Excerpt, LoggedRecord | None]:
    """The record at an offset, with the end of its transaction; None for a marker, or what compaction has removed."""
    cluster.refresh_topics([named.topic])
    [ends] = look_at_ends(cluster, [named])
    if not ends.log_start <= offset < ends.high_watermark:
        raise OffsetOutOfRange(
            f"The partition holds offsets {ends.log_start} up to {ends.high_watermark}, and not {offset}. Nothing was "
            "read: choose one of these.",
            code=ErrorCode.offset_out_of_range,
        )
    found = read_excerpt(cluster, named, offset, end=offset + 1, batches_max=1)
    records = found.records(offset, offset + 1, unpacked_bytes_max=UNPACKED_BYTES_MAX)
    return found, next(records, None)


def marker_at(found: Excerpt, offset: int) -> LoggedBatch | None:
    """The marker at an offset."""
    batches = (one.batch for one in found.batches if one.batch.base_offset == offset)
    return next((batch for batch in batches if batch.marker is not None), None)


async def records(request: Request) -> Response:
    """The records of a partition, those of each status apart."""
    site = site_of(request)
    named = TopicPartition(text_of(request, "topic"), number_of(request, "partition"))
    start, show = optional_number_of(request, "from"), request.query_params.get("show", "all")
    look = await site.looks.ask(
        ("records", named, start, show), lambda cluster: look_at_records(cluster, named, start, show), deadline_s=15.0
    )
    return site.page(
        request, "records.html", look, named=named, start=start, show=show, statuses=_SHOW, page_records=_RECORDS
    )

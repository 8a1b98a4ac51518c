"""Reads many partitions at once into Arrow tables, without a consumer group. Blocking, for one thread.

When a response is in, its batch headers alone tell the next positions, so the next request goes out before the records
are decoded: broker and reader work at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self, overload

import pyarrow as pa

from semel.client.cluster import Cluster
from semel.client.config import FetchConfig
from semel.client.fetch_requests import Chunk, FetchRequests, Reading
from semel.client.fetched import (
    READ_SCHEMA,
    Opened,
    PartitionRecords,
    decode_opened,
    intact_prefix,
    split_off,
    to_read_table,
)
from semel.client.leader_calls import describe
from semel.client.offsets import Edge, edge_offsets, timestamp_offsets
from semel.client.partitions import ByPartition, TopicPartition, by_partition
from semel.client.settings import merge_settings, parse_config
from semel.errors import ConfigError, CorruptRecords, InvalidState, RecordTooLarge, RequestTimedOut
from semel.records import ControlMarker, read_header

__all__ = ["READ_SCHEMA", "Fetcher", "PartitionRecords", "find_marker", "to_read_table"]


@dataclass(frozen=True, slots=True)
class RawRecords:
    """The batches of a partition as they came, none of them unpacked or checked, and the markers between them."""

    partition: TopicPartition
    batches: list[memoryview]
    markers: list[ControlMarker]
    next_offset: int
    high_watermark: int


class Fetcher:
    """
    >>> from semel import Producer
    >>> with Producer(bootstrap_servers=bootstrap) as producer:
    ...     producer.send("greetings", b"hello")
    >>> with Fetcher({"bootstrap.servers": bootstrap}) as fetcher:
    ...     fetcher.assign({("greetings", 0): "earliest"})
    ...     for table in fetcher.read_until(fetcher.end_offsets()):
    ...         table["value"].to_pylist()
    [b'hello']

    A `Cluster` may be given instead of settings. It is then shared and stays open; while a fetch waits for new records,
    other requests to the same broker wait behind it, up to `fetch.max.wait.ms`. Therefore `prefetch`, which leaves a
    request under way between two calls, is on only if the fetcher has a cluster of its own, or on demand.
    """

    def __init__(
        self,
        cluster_or_settings: Cluster | Mapping[str, object] | None = None,
        config: FetchConfig | None = None,
        *,
        include_markers: bool = False,
        prefetch: bool | None = None,
        **more_settings: object,
    ) -> None:
        if isinstance(cluster_or_settings, Cluster):
            self._cluster, self._owns_cluster = cluster_or_settings, False
            self.config = config or FetchConfig()
        else:
            settings = parse_config(merge_settings(cluster_or_settings, more_settings))
            self._cluster, self._owns_cluster = Cluster(settings.client), True
            self.config = config or settings.fetch
        self._prefetch = self._owns_cluster if prefetch is None else prefetch
        self._undecoded: list[Chunk] = []
        self._requests = FetchRequests(self._cluster, self.config, include_markers=include_markers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._owns_cluster:
            self._cluster.close()

    # -- positions -------------------------------------------------------------------------------------------------

    def assign(self, positions: ByPartition[int | Edge]) -> None:
        """Read these partitions from now on, each from the given offset, and no others."""
        self._requests.assign(self._find_offsets(by_partition(positions)))

    def seek(self, topic: str, partition: int, position: int | Edge) -> None:
        """Go on reading an assigned partition at another offset."""
        reading = self._reading(topic, partition)
        reading.move(self._find_offsets({reading.partition: position})[reading.partition])

    @property
    def positions(self) -> dict[TopicPartition, int]:
        """The next offset of each assigned partition: everything before it was handed out or is not visible."""
        return {partition: reading.position for partition, reading in self._requests.readings.items()}

    @overload
    def offsets_for(self, partitions: Iterable[tuple[str, int]], when: Edge) -> dict[TopicPartition, int]: ...

    @overload
    def offsets_for(self, partitions: Iterable[tuple[str, int]], when: int) -> dict[TopicPartition, int | None]: ...

    def offsets_for(
        self, partitions: Iterable[tuple[str, int]], when: Edge | int
    ) -> dict[TopicPartition, int] | dict[TopicPartition, int | None]:
        """Where the partitions begin ("earliest") or end ("latest"), or their first record of a time in milliseconds.

        The end for a `read_committed` reader is the last stable offset. None: there is no record that late (yet).
        """
        named = [TopicPartition(*partition) for partition in partitions]
        if isinstance(when, int):
            return timestamp_offsets(self._cluster, named, when, self.config.isolation)
        return edge_offsets(self._cluster, named, when, self.config.isolation)

    def end_offsets(self) -> dict[TopicPartition, int]:
        """The present end of each assigned partition, for `read_until`."""
        return self.offsets_for(self._requests.readings, "latest")

    def _reading(self, topic: str, partition: int) -> Reading:
        reading = self._requests.readings.get(TopicPartition(topic, partition))
        if reading is None:
            raise InvalidState(
                f"Topic {topic!r} partition {partition} is not assigned to this fetcher: assign() it first."
            )
        return reading

    def _find_offsets(self, positions: Mapping[TopicPartition, int | Edge]) -> dict[TopicPartition, int]:
        found: dict[TopicPartition, int] = {}
        by_edge: dict[Edge, list[TopicPartition]] = {"earliest": [], "latest": []}
        for partition, position in positions.items():
            if isinstance(position, str) and position in by_edge:
                by_edge[position].append(partition)
            elif isinstance(position, int) and position >= 0:
                found[partition] = position
            else:
                raise ConfigError(f'{position!r} is no position: write an offset, "earliest" or "latest".')
        for edge, partitions in by_edge.items():
            found.update(edge_offsets(self._cluster, partitions, edge, self.config.isolation))
        return {partition: found[partition] for partition in positions}

    # -- records ---------------------------------------------------------------------------------------------------

    def fetch(self, timeout_ms: float = 1_000) -> list[PartitionRecords]:
        """The next records of whichever partitions have some; an empty list if none came in time.

        Lost connections and moving leaders are retried for `default.api.timeout.ms`, over several calls if need be.
        """
        deadline = self._cluster.clock() + timeout_ms / 1000
        while True:
            chunks = self._take_undecoded()
            if not chunks:
                chunks = self._requests.wait_chunks(deadline)
                if chunks and self._prefetch:
                    ahead = {chunk.reading.partition: chunk.opened.next_offset for chunk in chunks}
                    self._requests.send(ahead, math.inf)
            fetched = self._decode_slice(chunks)
            if fetched:
                return fetched
            self._requests.raise_postponed()
            if self._cluster.clock() >= deadline:
                return []

    def read(self, timeout_ms: float = 1_000) -> pa.Table:
        """The next records of all partitions as one table, columns as in Spark's Kafka connector (`READ_SCHEMA`)."""
        return to_read_table(self.fetch(timeout_ms))

    def read_until(self, ends: ByPartition[int], *, stall_ms: float | None = None) -> Iterator[pa.Table]:
        """Tables as of `read`, until each of these partitions has reached its end; records from the end on stay unread.

        Markers and aborted records count as reached. Without any progress for `stall_ms` (`default.api.timeout.ms`) it
        gives up with `RequestTimedOut`: the end is not there yet, or an open transaction is in the way.
        """
        for fetched in self.fetch_until(ends, stall_ms=stall_ms):
            if any(records.table.num_rows for records in fetched):
                yield to_read_table(fetched)

    def fetch_until(self, ends: ByPartition[int], *, stall_ms: float | None = None) -> Iterator[list[PartitionRecords]]:
        """What each `fetch` brings on the way, as `read_until` goes it; tables may be empty."""
        wanted = by_partition(ends)
        readings = [self._reading(*named) for named in wanted]
        everything = list(self._requests.readings.values())
        for reading in everything:
            reading.end = wanted.get(reading.partition, reading.position)  # the others rest where they are
        stall_ms = self._cluster.config.api_timeout_ms if stall_ms is None else stall_ms
        try:
            while any(not reading.is_finished for reading in readings):
                fetched = self.fetch(stall_ms)
                if not fetched:
                    raise self._explain_stall(next(r for r in readings if not r.is_finished), stall_ms)
                yield fetched
        finally:
            for reading in everything:
                reading.end = None

    def _explain_stall(self, reading: Reading, stall_ms: float) -> RequestTimedOut:
        [available] = self.offsets_for([reading.partition], "latest").values()
        return RequestTimedOut(
            f"Nothing new in {describe(reading.partition)} for {stall_ms:.0f} ms, at offset {reading.position} on the "
            f"way to {reading.end}; a {self.config.isolation} reader can go up to {available} now. A transaction may "
            "still be open, or the end lies beyond the log; what was handed out so far is complete."
        )

    def _take_undecoded(self) -> list[Chunk]:
        """What an earlier call left, unless its partition was moved or has another end now."""
        chunks, self._undecoded = self._undecoded, []
        return [
            chunk
            for chunk in chunks
            if self._requests.readings.get(chunk.reading.partition) is chunk.reading
            and chunk.reading.position == chunk.opened.window.start
            and chunk.reading.end == chunk.opened.window.end
        ]

    def _decode_slice(self, chunks: Sequence[Chunk]) -> list[PartitionRecords]:
        """Decode so much that what was compressed takes `fetch.max.bytes` and one batch; the rest waits for its turn.

        Otherwise a short answer that unpacks to gigabytes, hostile or not, would take all memory.
        """
        fetched: list[PartitionRecords] = []
        room = self.config.fetch_bytes_max
        for number, chunk in enumerate(chunks):
            records, unpacked_bytes, rest = self._decode(chunk, room)
            room -= unpacked_bytes
            if records is not None:
                self._requests.advance(chunk.reading.partition, records.next_offset, chunk.opened.leader_epoch)
                fetched.append(records)
            if rest is not None or room <= 0:
                self._undecoded = ([] if rest is None else [rest]) + list(chunks[number + 1 :])
                break
        return fetched

    def _decode(self, chunk: Chunk, bytes_max: int) -> tuple[PartitionRecords | None, int, Chunk | None]:
        """Records up to about `bytes_max`, how much they take, and what is left to decode."""
        reading, opened = chunk.reading, chunk.opened
        check_crc, batch_bytes_max = self.config.check_crcs, self.config.decompressed_bytes_max
        rest: Opened | None = None
        try:
            decoded = decode_opened(opened, check_crc=check_crc, batch_bytes_max=batch_bytes_max, bytes_max=bytes_max)
            rest = split_off(opened, decoded.batch_count)
        except (CorruptRecords, RecordTooLarge) as error:
            good = intact_prefix(opened.visible, check_crc=check_crc, batch_bytes_max=batch_bytes_max)
            bad_offset = read_header(opened.visible[good]).base_offset
            if bad_offset <= reading.position:
                self._requests.report_damage(reading, error)
                return None, 0, None
            opened.keep_before(bad_offset, good)
            decoded = decode_opened(opened, check_crc=check_crc, batch_bytes_max=batch_bytes_max)
        records = PartitionRecords(
            *reading.partition,
            decoded.table,
            opened.next_offset,
            chunk.high_watermark,
            chunk.last_stable_offset,
            chunk.log_start_offset,
            tuple(opened.markers),
        )
        return records, decoded.unpacked_bytes, None if rest is None else replace(chunk, opened=rest)

    def fetch_markers(self, timeout_ms: float) -> list[ControlMarker]:
        """Go on as `fetch` does without decoding any record, and return the transaction markers that were passed."""
        chunks = self._requests.wait_chunks(self._cluster.clock() + timeout_ms / 1000)
        for chunk in chunks:
            self._requests.advance(chunk.reading.partition, chunk.opened.next_offset, chunk.opened.leader_epoch)
        return [marker for chunk in chunks for marker in chunk.opened.markers]

    def fetch_raw(self, timeout_ms: float, ends: Mapping[TopicPartition, int] | None = None) -> list[RawRecords]:
        """Go on as `fetch` does without decoding any record. `ends`: partitions that are read up to there for now.

        The next request is under way when this returns.
        """
        for partition, reading in self._requests.readings.items():
            reading.end = None if ends is None else ends.get(partition)
        chunks = self._requests.wait_chunks(self._cluster.clock() + timeout_ms / 1000)
        for chunk in chunks:
            self._requests.advance(chunk.reading.partition, chunk.opened.next_offset, chunk.opened.leader_epoch)
        if chunks and self._prefetch:
            self._requests.send({}, math.inf)
        return [
            RawRecords(
                chunk.reading.partition,
                chunk.opened.visible,
                chunk.opened.markers,
                chunk.opened.next_offset,
                chunk.high_watermark,
            )
            for chunk in chunks
        ]


def find_marker(
    cluster: Cluster,
    topic: str,
    partition: int,
    producer_id: int,
    from_offset: int,
    timeout_ms: float,
    *,
    producer_epoch_min: int = 0,
) -> ControlMarker | None:
    """The first transaction marker of this producer at or after `from_offset`; None if there is none in time.

    It tells how a transaction ended whose records in this partition begin at `from_offset`. Markers of lower epochs are
    passed over: where a leader lost the end of its log, that of an earlier transaction may have been written again.
    """
    config = FetchConfig(isolation="read_uncommitted", partition_bytes_max=1 << 20, wait_ms_max=100)
    deadline = cluster.clock() + timeout_ms / 1000
    with Fetcher(cluster, config, include_markers=True) as fetcher:
        fetcher.assign({(topic, partition): from_offset})
        while True:
            remaining_ms = (deadline - cluster.clock()) * 1000
            for marker in fetcher.fetch_markers(max(0.0, remaining_ms)):
                if marker.producer_id == producer_id and marker.producer_epoch >= producer_epoch_min:
                    return marker
            if remaining_ms <= 0:
                return None

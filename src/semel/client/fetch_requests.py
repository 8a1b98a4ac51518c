"""Fetch requests and their answers: at most one under way to each broker, retried partition by partition.

Fetches are sessionless (KIP-227's session id 0). A session saves naming the partitions again, some thirty bytes each
beside megabytes of records, and costs a slot in the broker's cache and a second copy of the positions to keep in step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from semel.client.cluster import TRANSPORT_ERRORS, Cluster, Leader
from semel.client.config import FetchConfig
from semel.client.connection import Pending
from semel.client.failures import failure
from semel.client.fetched import Opened, Window, open_records
from semel.client.leader_calls import describe
from semel.client.offsets import ISOLATION_LEVELS, edge_offsets, epoch_ends
from semel.client.partitions import TopicPartition
from semel.client.retry import Patience
from semel.client.visibility import AbortedTransaction
from semel.errors import (
    BrokerUnreachable,
    CorruptRecords,
    OffsetOutOfRange,
    RecordTooLarge,
    SemelError,
    TopicRecreated,
    UnknownTopic,
)
from semel.wire import Action, Api, ErrorCode, Refresh, Verdict, verdict

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Reading:
    """A partition that is being read."""

    partition: TopicPartition
    position: int
    """The next offset for the caller; moves only when records are handed out."""
    bytes_max: int
    end: int | None = None
    """Nothing from here on is wanted now."""
    read_replica: int | None = None
    retry_at: float = 0.0
    trouble: Patience | None = None
    """Runs from the first failure to the next success."""
    last_epoch: int = -1
    """The leader epoch of the last batch before the position, if we have read it."""
    leader_epoch: int = -1
    """The leader epoch in which the position is known to be right."""
    topic_id: UUID | None = None
    """Of the topic that the position is in, where brokers have ids."""
    is_suspect: bool = False
    """What came last from this position was damaged; a second time is an error."""

    @property
    def is_finished(self) -> bool:
        return self.end is not None and self.position >= self.end

    def is_in_doubt(self, leader_epoch: int) -> bool:
        """Whether a new leader may lack records that were read from an old one."""
        return self.last_epoch >= 0 and leader_epoch > self.leader_epoch

    def move(self, position: int) -> None:
        """To an offset of the caller's choice."""
        self.position = position
        self.last_epoch = -1
        self.is_suspect = False
        self.read_replica = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A partition's part of a response, before it is decoded."""

    reading: Reading
    opened: Opened
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int


@dataclass(frozen=True, slots=True)
class _Flight:
    """A Fetch under way, and the offset it asked for of each partition."""

    pending: Pending
    asked: Mapping[TopicPartition, int]


class FetchRequests:
    """Keeps requests for all of `readings` under way and sorts out what comes back."""

    def __init__(self, cluster: Cluster, config: FetchConfig, *, include_markers: bool) -> None:
        self.readings: dict[TopicPartition, Reading] = {}
        self.postponed: SemelError | None = None
        """What went wrong with one partition; raised after the records of the others were handed out."""
        self._cluster = cluster
        self._config = config
        self._include_markers = include_markers
        self._flights: dict[int, _Flight] = {}

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self.postponed = None
        before = self.readings
        self.readings = {
            partition: Reading(partition, position, self._config.partition_bytes_max)
            for partition, position in positions.items()
        }
        for partition, reading in self.readings.items():
            # A reader whose assignment grows stays where it is in the others, and in doubt where it was in doubt.
            if partition in before and before[partition].position == reading.position:
                reading.last_epoch = before[partition].last_epoch
                reading.leader_epoch = before[partition].leader_epoch
                reading.topic_id = before[partition].topic_id

    def advance(self, partition: TopicPartition, next_offset: int, leader_epoch: int) -> None:
        """Records up to here are handed out."""
        # To the back of the line: a broker fills a response in the order of the request.
        reading = self.readings[partition] = self.readings.pop(partition)
        reading.position = next_offset
        reading.last_epoch = max(reading.last_epoch, leader_epoch)
        reading.is_suspect = False
        reading.bytes_max = self._config.partition_bytes_max

    def raise_postponed(self) -> None:
        error, self.postponed = self.postponed, None
        if error is not None:
            raise error

    def wait_chunks(self, deadline: float) -> list[Chunk]:
        """Send what can be sent and wait for the first answers; empty if none of them has anything new."""
        self.raise_postponed()
        clock = self._cluster.clock
        self.send({}, deadline)
        retries = [reading.retry_at for reading in self.readings.values() if reading.retry_at > clock()]
        until_ms = max(0.0, (min([deadline, *retries]) - clock()) * 1000)
        if not self._flights:
            self._cluster.sleep(0 if self.postponed else until_ms / 1000)
            return []
        self._cluster.wait_any([flight.pending for flight in self._flights.values()], timeout_ms=until_ms)
        # Of a partition whose leader moved, the old and the new one may both answer with the same records.
        chunks: dict[TopicPartition, Chunk] = {}
        for node in [node for node, flight in self._flights.items() if flight.pending.done]:
            for chunk in self._land(self._flights.pop(node)):
                chunks.setdefault(chunk.reading.partition, chunk)
        return list(chunks.values())

    # -- requests --------------------------------------------------------------------------------------------------

    def send(self, ahead: Mapping[TopicPartition, int], deadline: float) -> None:
        """One Fetch to each broker that has none under way. `ahead`: positions after records not handed out yet."""
        for node, asked in self._due(ahead).items():
            if node in self._flights:
                continue
            try:
                pending = self._cluster.submit(node, Api.FETCH, **self._fields(asked, deadline))
            except TRANSPORT_ERRORS as error:
                for partition in asked:
                    self._retry(self.readings[partition], error, Refresh.LEADER)
            else:
                self._flights[node] = _Flight(pending, asked)

    def _due(self, ahead: Mapping[TopicPartition, int]) -> dict[int, dict[TopicPartition, int]]:
        """The offset to ask for of each partition, by broker."""
        now = self._cluster.clock()
        self._settle_doubts(now)
        due: dict[int, dict[TopicPartition, int]] = {}
        for partition, reading in self.readings.items():
            offset = ahead.get(partition, reading.position)
            if reading.retry_at > now or (reading.end is not None and offset >= reading.end):
                continue
            leader = self._leader(reading)
            node = leader.node if reading.read_replica is None else reading.read_replica
            if node < 0:
                self._retry(reading, _no_leader(partition), Refresh.LEADER)
            elif not reading.is_in_doubt(leader.epoch):
                reading.leader_epoch = leader.epoch
                reading.topic_id = reading.topic_id or self._cluster.topic_id(partition.topic)
                due.setdefault(node, {})[partition] = offset
        return due

    def _leader(self, reading: Reading) -> Leader:
        try:
            return self._cluster.leader(*reading.partition)
        except UnknownTopic as error:
            now = self._cluster.topic_id(reading.partition.topic)
            if reading.topic_id is not None and now not in (None, reading.topic_id):
                raise _recreated(reading) from error  # with fewer partitions than before
            raise

    def _settle_doubts(self, now: float) -> None:
        """Ask new leaders whether they have what was read from their predecessors (KIP-320)."""
        doubts = {
            partition: reading.last_epoch
            for partition, reading in self.readings.items()
            if reading.retry_at <= now and reading.is_in_doubt(self._leader(reading).epoch)
        }
        if not doubts or self.postponed is not None:
            return
        leaders = {partition: self._cluster.leader(*partition).epoch for partition in doubts}
        try:
            ends = epoch_ends(self._cluster, doubts, patience=self._cluster.patience(0))
        except SemelError as error:
            for partition in doubts:
                self._retry(self.readings[partition], error, Refresh.LEADER)
            return
        for partition, end in ends.items():
            reading = self.readings[partition]
            if reading.position <= end:
                reading.leader_epoch = leaders[partition]
            elif self._config.auto_offset_reset == "error" or end < 0:
                self.postponed = _truncated(reading, end)
            elif self._is_recreated(reading):
                self.postponed = _recreated(reading)
            else:
                logger.warning("%s", _truncated(reading, end))
                reading.move(end)

    def _fields(self, asked: Mapping[TopicPartition, int], deadline: float) -> Mapping[str, Any]:
        topics: list[dict[str, Any]] = []
        for (topic, partition), offset in asked.items():
            # Only neighbours share an entry: the order of the partitions is the order in which they are served.
            if not topics or topics[-1]["topic"] != topic:
                topics.append({"topic": topic, "partitions": []})
            topics[-1]["partitions"].append(
                {
                    "partition": partition,
                    "current_leader_epoch": self._cluster.leader(topic, partition).epoch,
                    "fetch_offset": offset,
                    "partition_max_bytes": self.readings[TopicPartition(topic, partition)].bytes_max,
                }
            )
        remaining_ms = max(0.0, (deadline - self._cluster.clock()) * 1000)
        return {
            "replica_id": -1,
            "max_wait": math.ceil(min(self._config.wait_ms_max, remaining_ms)),
            "min_bytes": self._config.fetch_bytes_min,
            "max_bytes": max(self._config.fetch_bytes_max, *(self.readings[named].bytes_max for named in asked)),
            "isolation_level": ISOLATION_LEVELS[self._config.isolation],
            "session_id": 0,
            "session_epoch": -1,
            "topics": topics,
            "forgotten_topics_data": [],
            "rack_id": self._config.client_rack,
        }

    # -- answers ---------------------------------------------------------------------------------------------------

    def _land(self, flight: _Flight) -> Iterator[Chunk]:
        # A partition that was moved by its caller since then asks for another offset now.
        expected = {
            partition: self.readings[partition]
            for partition, offset in flight.asked.items()
            if partition in self.readings and self.readings[partition].position == offset
        }
        try:
            response = flight.pending.result()
        except TRANSPORT_ERRORS as error:
            for reading in expected.values():
                self._retry(reading, error, Refresh.LEADER)
            return
        if getattr(response, "error_code", ErrorCode.none) != ErrorCode.none:
            for reading in expected.values():
                self._refused(reading, response.error_code)
            return
        for topic in response.responses:
            for data in topic.partitions:
                reading = expected.get(TopicPartition(topic.topic, data.partition_index))
                if reading is None:
                    continue
                if data.error_code != ErrorCode.none:
                    self._refused(reading, data.error_code)
                else:
                    yield from self._open(reading, data)

    def _open(self, reading: Reading, data: Any) -> Iterator[Chunk]:
        reading.trouble = None
        replica = getattr(data, "preferred_read_replica", -1)
        if replica >= 0:
            reading.read_replica = replica  # KIP-392: a replica in our rack
        window = Window(
            reading.position,
            reading.end,
            read_committed=self._config.isolation == "read_committed",
            last_stable_offset=data.last_stable_offset,
            include_markers=self._include_markers,
        )
        aborted = [
            AbortedTransaction(entry.producer_id, entry.first_offset) for entry in data.aborted_transactions or ()
        ]
        opened = open_records(data.records or b"", window, aborted)
        if opened.next_offset > reading.position:
            log_start_offset = getattr(data, "log_start_offset", -1)
            yield Chunk(reading, opened, data.high_watermark, data.last_stable_offset, log_start_offset)
        elif opened.damaged is not None:
            self.report_damage(reading, opened.damaged)
        elif opened.is_cut_short:
            reading.bytes_max = min(reading.bytes_max * 2, self._cluster.config.receive_message_bytes_max)

    def report_damage(self, reading: Reading, error: CorruptRecords | RecordTooLarge) -> None:
        """Read the same position once more, since it may be the way and not the disk; the second time is an error."""
        if reading.is_suspect or isinstance(error, RecordTooLarge):
            self.postponed = type(error)(
                f"Topic {reading.partition.topic!r} partition {reading.partition.partition} cannot be read at offset "
                f"{reading.position}: {error} Everything before it was handed out."
            )
        reading.is_suspect = not reading.is_suspect

    def _refused(self, reading: Reading, code: ErrorCode) -> None:
        judged = verdict(code, Api.FETCH)
        error = failure(code, Api.FETCH, f"{describe(reading.partition)} (offset {reading.position})")
        reset = self._config.auto_offset_reset
        if reading.read_replica is not None:
            self._retry(reading, error, Refresh.LEADER, judged)  # a follower may lag behind: the leader's word counts
        elif judged.action is Action.RETRIABLE:
            self._retry(reading, error, judged.refresh, judged)
        elif code == ErrorCode.offset_out_of_range and reset != "error" and self._is_recreated(reading):
            self.postponed = _recreated(reading)
        elif code == ErrorCode.offset_out_of_range and reset != "error":
            found = edge_offsets(self._cluster, [reading.partition], reset, self._config.isolation)[reading.partition]
            logger.warning(
                "%s has no offset %d (any more); by auto.offset.reset=%s it is read from offset %d on. %s",
                describe(reading.partition),
                reading.position,
                reset,
                found,
                f"{found - reading.position} offsets were skipped." if found > reading.position else "",
            )
            reading.move(found)
        else:
            self.postponed = error

    def _is_recreated(self, reading: Reading) -> bool:
        """Whether the topic of this name is another one now: then no offset of the old one says anything."""
        if reading.topic_id is None:
            return False
        self._cluster.refresh_topics([reading.partition.topic])
        before, reading.topic_id = reading.topic_id, self._cluster.topic_id(reading.partition.topic)
        return before != reading.topic_id

    def _retry(self, reading: Reading, error: SemelError, refresh: Refresh, judged: Verdict | None = None) -> None:
        """Leave the partition alone for a moment; the other ones go on."""
        reading.read_replica = None
        if refresh is Refresh.LEADER:
            self._cluster.forget_leaders([reading.partition.topic])
        trouble = reading.trouble = reading.trouble or self._cluster.patience()
        if trouble.is_spent:
            reading.trouble = None
            self.postponed = error
        reading.retry_at = self._cluster.clock() + trouble.next_pause_ms(judged) / 1000


def _truncated(reading: Reading, end: int) -> OffsetOutOfRange:
    where = f"offset {end}" if end >= 0 else "some earlier offset"
    return OffsetOutOfRange(
        f"{describe(reading.partition)} lost records that were read: we are at offset {reading.position}, and a new "
        f"leader has them only up to {where}. From there on it holds others, which were not read: "
        "seek there, and find out what was made of the lost ones."
    )


def _recreated(reading: Reading) -> TopicRecreated:
    return TopicRecreated(
        f"Topic {reading.partition.topic!r} was deleted and created again while it was read; nothing of the new one "
        f"was read yet. Offset {reading.position} was one of the old topic: begin at the earliest one.",
        code=ErrorCode.offset_out_of_range,
    )


def _no_leader(partition: TopicPartition) -> BrokerUnreachable:
    return BrokerUnreachable(
        f"No broker leads {describe(partition)} at present, so it cannot be read; nothing is lost. "
        "Check that the brokers with its replicas run."
    )

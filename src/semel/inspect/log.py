"""Reads the batches of a partition with what became of them, within a bound.

Kafka has no request for headers alone, so a log that is read costs its bytes on the network. Nothing is unpacked: the
headers tell who wrote a batch, and how many records it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from semel.client.cluster import Cluster
from semel.client.config import Isolation
from semel.client.leader_calls import PartitionAnswer, call_leaders, describe
from semel.client.offsets import ISOLATION_LEVELS
from semel.client.partitions import TopicPartition
from semel.client.visibility import AbortedTransaction
from semel.errors import RecordTooLarge
from semel.inspect.outcomes import LoggedBatch, Outcomes
from semel.records import BatchHeader, iter_batches, read_control_batch
from semel.wire import Api

_ANSWER_BYTES: Final = 4 << 20
_WAIT_MS: Final = 500
_EMPTY_ANSWERS_MAX: Final = 3


@dataclass(frozen=True, slots=True)
class Answer:
    """A partition's part of one Fetch response."""

    records: memoryview
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: tuple[AbortedTransaction, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """A batch with its bytes, and those before it that it has decided."""

    batch: LoggedBatch
    data: memoryview
    decided: tuple[LoggedBatch, ...] = ()


def fetch(
    cluster: Cluster,
    partition: TopicPartition,
    offset: int,
    isolation: Isolation,
    *,
    bytes_max: int = _ANSWER_BYTES,
    wait_ms: int = 0,
) -> Answer:
    """One answer. The first batch comes whole, whatever `bytes_max` says."""

    def fields(_: Any) -> dict[str, Any]:
        asked = {
            "partition": partition.partition,
            "current_leader_epoch": cluster.leader(*partition).epoch,
            "fetch_offset": offset,
            "partition_max_bytes": bytes_max,
        }
        return {
            "replica_id": -1,
            "max_wait": wait_ms,
            "min_bytes": 1 if wait_ms else 0,
            "max_bytes": bytes_max,
            "isolation_level": ISOLATION_LEVELS[isolation],
            "session_id": 0,
            "session_epoch": -1,
            "topics": [{"topic": partition.topic, "partitions": [asked]}],
            "forgotten_topics_data": [],
            "rack_id": "",
        }

    def read(response: Any) -> Iterator[PartitionAnswer[Answer]]:
        for topic in response.responses:
            for data in topic.partitions:
                yield PartitionAnswer(TopicPartition(topic.topic, data.partition_index), data.error_code, _answer(data))

    return call_leaders(cluster, Api.FETCH, {partition: None}, fields, read)[partition]


def _answer(data: Any) -> Answer:
    return Answer(
        memoryview(data.records or b""),
        data.high_watermark,
        data.last_stable_offset,
        getattr(data, "log_start_offset", -1),
        tuple(AbortedTransaction(one.producer_id, one.first_offset) for one in data.aborted_transactions or ()),
    )


class LogReader:
    """Walks over a partition from an offset on, as far as it is asked to.

    `position` is the next offset, `bytes_read` what was read so far. Ends and last stable offset are those of the last
    answer.
    """

    def __init__(self, cluster: Cluster, partition: TopicPartition, start: int) -> None:
        self._cluster = cluster
        self.partition = partition
        self.position = start
        self.bytes_read = 0
        self.last_stable_offset = -1
        self.high_watermark = -1
        self.log_start_offset = -1
        self._outcomes = Outcomes()
        self._is_beyond = False
        self._empty_answers = 0
        self._bytes_min = 1

    def look(self) -> None:
        """Learn where the partition ends now, without moving."""
        self._note(fetch(self._cluster, self.partition, self.position, "read_uncommitted", bytes_max=1))

    def read(self, *, end: int | None = None, bytes_max: int = _ANSWER_BYTES, wait_ms: int = _WAIT_MS) -> list[Seen]:
        """The batches of the next answer, up to `end`; none if there is nothing new.

        From the first batch beyond the last stable offset on, markers decide, also if that offset moves on later.
        """
        if self.last_stable_offset < 0:
            self.look()
        self._is_beyond = self._is_beyond or self.position >= self.last_stable_offset
        isolation: Isolation = "read_uncommitted" if self._is_beyond else "read_committed"
        size = max(self._bytes_min, min(_ANSWER_BYTES, bytes_max))
        answer = fetch(self._cluster, self.partition, self.position, isolation, bytes_max=size, wait_ms=wait_ms)
        self._note(answer)
        self.bytes_read += len(answer.records)
        if not self._is_beyond:
            self._outcomes.begin_answer(answer.aborted)
        before = self.position
        taken = self._take_all(answer, end)
        if len(answer.records) and self.position == before:
            self._ask_for_more(size)
        else:
            self._bytes_min = 1
            self._pass_gap(before, end)
        return taken

    def _ask_for_more(self, size: int) -> None:
        """Some brokers cut the first batch too. It must not be taken for a gap."""
        most = self._cluster.config.receive_message_bytes_max
        if size >= most:
            raise RecordTooLarge(
                f"A batch in {describe(self.partition)} at offset {self.position} is over {most} bytes, so it and what "
                "comes after it was not read. Raise receive.message.max.bytes."
            )
        self._bytes_min = min(2 * size, most)

    def _take_all(self, answer: Answer, end: int | None) -> list[Seen]:
        start, taken = self.position, list[Seen]()
        for header, data in iter_batches(answer.records):
            if end is not None and header.base_offset >= end:
                self.position = max(self.position, end)
                break
            if not self._is_beyond and header.base_offset >= answer.last_stable_offset:
                self.position = max(self.position, answer.last_stable_offset)
                break
            seen = self._take(header, data)
            if header.last_offset >= start:
                self.position = header.last_offset + 1
                taken.append(seen)
        return taken

    def _pass_gap(self, before: int, end: int | None) -> None:
        """Compaction may leave nothing up to the end. A broker that reads from remote storage may answer late, too."""
        stop = self.high_watermark if self._is_beyond else self.last_stable_offset
        stop = stop if end is None else min(stop, end)
        self._empty_answers = self._empty_answers + 1 if self.position == before else 0
        if self._empty_answers >= _EMPTY_ANSWERS_MAX and self.position < stop:
            self.position = stop
            self._empty_answers = 0

    def _note(self, answer: Answer) -> None:
        self.high_watermark = answer.high_watermark
        self.last_stable_offset = answer.last_stable_offset
        self.log_start_offset = answer.log_start_offset

    def _take(self, header: BatchHeader, data: memoryview) -> Seen:
        def read_marker():
            return read_control_batch(data)

        if not self._is_beyond:
            return Seen(self._outcomes.take_stable(header, read_marker), data)
        batch, decided = self._outcomes.take_beyond(header, read_marker)
        return Seen(batch, data, tuple(decided))

    @property
    def still_open(self) -> list[LoggedBatch]:
        """What was read and not ended so far."""
        return self._outcomes.still_open

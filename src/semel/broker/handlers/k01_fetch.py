"""Fetch (1), versions 4-12: records from partitions, waited for if there are none yet; sessions from version 7.

Not done: topic ids (version 13), followers and their replicas.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Answer, Encoded, Reply, RequestContext
from semel.broker.fetch_sessions import NO_SESSION, FetchSession, PartitionName, Wanted
from semel.broker.handlers.k02_list_offsets import READ_COMMITTED
from semel.core.refusal import Refused
from semel.errors import CorruptRecords
from semel.records.layout import LENGTH_FIELD_END, read_header
from semel.wire.hot import FetchedPartition, write_fetch_response

if TYPE_CHECKING:
    from semel.broker.state import Broker
    from semel.broker.storage.partition import Partition

_BYTES_MAX_BEFORE_VERSION_3: Final = 2**31 - 1


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    try:
        session = broker.fetch_sessions.session_for(request, context.principal)
    except Refused as refusal:
        pieces = write_fetch_response(context.api_version, context.correlation_id, NO_SESSION, refusal.code, [])
        return Encoded(pieces)
    fetch = _Fetch(broker, context, request, session)
    fetch.collect()
    wait_ms = request.max_wait.total_seconds() * 1000
    if fetch.is_enough or wait_ms <= 0:
        return fetch.answer()
    return fetch.answer_later(wait_ms)


class _Fetch:
    """One request: what has been found for it so far."""

    def __init__(self, broker: Broker, context: RequestContext, request: Any, session: FetchSession) -> None:
        self._broker = broker
        self._context = context
        self._session = session
        self._is_committed = request.isolation_level == READ_COMMITTED
        self._bytes_min: int = request.min_bytes
        self._bytes_max = min(
            getattr(request, "max_bytes", _BYTES_MAX_BEFORE_VERSION_3), broker.settings.fetch_bytes_max
        )
        self._found: dict[PartitionName, FetchedPartition] = {}
        self._bytes = 0
        self._failed = False

    @property
    def is_enough(self) -> bool:
        return self._bytes >= self._bytes_min or self._failed or not self._session.partitions

    def collect(self) -> None:
        self._found.clear()
        self._bytes = 0
        for name, wanted in self._session.partitions.items():
            found = self._read(name, wanted)
            self._found[name] = found
            self._bytes += sum(map(len, found.records))
            self._failed |= found.error_code != 0

    async def answer_later(self, wait_ms: float) -> Answer:
        """Wait until enough is there or the time is over, looking again whenever one of the partitions changes."""
        partitions = [one for one in (self._broker.partition(*name) for name in self._found) if one is not None]
        deadline_ms = self._broker.clock.now_ms() + wait_ms
        while not self.is_enough and (left_ms := deadline_ms - self._broker.clock.now_ms()) > 0:
            if not await self._wait_for_change(partitions, left_ms):
                break
            self.collect()
        return self.answer()

    async def _wait_for_change(self, partitions: list[Partition], wait_ms: float) -> bool:
        """Whether something has changed before the time was over, or the client gone."""
        changed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def wake(*, is_change: bool = True) -> None:
            if not changed.done():
                changed.set_result(is_change)

        def give_up() -> None:
            wake(is_change=False)

        timer = self._broker.clock.call_later(wait_ms, give_up)
        self._context.connection.on_close[give_up] = None
        for partition in partitions:
            partition.watchers[wake] = None
        try:
            return await changed
        finally:
            timer.cancel()
            self._context.connection.on_close.pop(give_up, None)
            for partition in partitions:
                partition.watchers.pop(wake, None)

    def answer(self) -> Encoded:
        topics: dict[str, list[FetchedPartition]] = {}
        for name, found in self._found.items():
            wanted = self._session.partitions.get(name)
            if wanted is None:
                continue
            told = (found.high_watermark, found.last_stable_offset, found.log_start_offset)
            if self._session.is_incremental and not found.records and not found.error_code and told == wanted.told:
                continue
            # An error is told again and again, until it is gone.
            wanted.told = None if found.error_code else told
            topics.setdefault(name[0], []).append(found)
            if found.records:
                self._session.partitions.move_to_end(name)
        return Encoded(
            write_fetch_response(
                self._context.api_version, self._context.correlation_id, self._session.session_id, 0, [*topics.items()]
            )
        )

    def _read(self, name: PartitionName, wanted: Wanted) -> FetchedPartition:
        topic, index = name
        try:
            if not self._broker.authorizer.allows(self._context, Operation.READ, ResourceType.TOPIC, topic):
                raise Refused(ErrorCode.topic_authorization_failed, topic)
            partition = self._broker.partition(topic, index)
            if partition is None:
                raise Refused(ErrorCode.unknown_topic_or_partition, topic)
            partition.log.leader_epochs.check_current(wanted.leader_epoch)
            return self._read_partition(partition, wanted)
        except Refused as refusal:
            return FetchedPartition(index, refusal.code)
        except CorruptRecords as error:
            self._broker.note_storage_error(error)
            return FetchedPartition(index, ErrorCode.kafka_storage_error)

    def _read_partition(self, partition: Partition, wanted: Wanted) -> FetchedPartition:
        log = partition.log
        if not log.log_start_offset <= wanted.fetch_offset <= log.log_end_offset:
            raise Refused(ErrorCode.offset_out_of_range, f"{wanted.fetch_offset}")
        end_offset = log.last_stable_offset if self._is_committed else log.high_watermark
        left = self._bytes_max - self._bytes
        data = partition.read(
            wanted.fetch_offset,
            bytes_max=max(0, min(left, wanted.bytes_max)),
            end_offset=end_offset,
            # The first batch of an answer is never too large, or the reader could not get past it.
            at_least_one=self._bytes == 0,
        )
        return FetchedPartition(
            partition.index,
            0,
            log.high_watermark,
            log.last_stable_offset,
            log.log_start_offset,
            self._aborted(partition, wanted.fetch_offset, data) if self._is_committed else None,
            [data] if data else (),
        )

    def _aborted(self, partition: Partition, offset: int, data: bytes | memoryview) -> list[tuple[int, int]]:
        """Those with records in `data`, which ends somewhere below the last stable offset."""
        log = partition.log
        if not data or not log.aborted_transactions(offset, log.last_stable_offset):
            return []
        entries = log.aborted_transactions(offset, next_offset(data))
        return [(entry.producer_id, entry.first_offset) for entry in entries]


def next_offset(batches: bytes | memoryview) -> int:
    """The offset behind the last of these whole batches."""
    position = last = 0
    while position < len(batches):
        last = position
        position += LENGTH_FIELD_END + int.from_bytes(batches[position + 8 : position + LENGTH_FIELD_END], "big")
    return read_header(batches, last).last_offset + 1

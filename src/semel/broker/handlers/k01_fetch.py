"""Fetch (1), versions 4-12: records from partitions, waited for if there are none yet; sessions from version 7.

Not done: topic ids (version 13), followers and their replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Answer, Encoded, Reply, RequestContext
from semel.broker.fetch_sessions import NO_SESSION, FetchSession, PartitionName, Wanted
from semel.broker.handlers.k02_list_offsets import READ_COMMITTED
from semel.broker.pacing import ENTRIES_AT_ONCE, Pace, Slices, finish
from semel.broker.storage.failures import StorageError
from semel.core.refusal import Refused
from semel.errors import CorruptRecords
from semel.records.layout import LENGTH_FIELD_END, read_header
from semel.wire.hot import FetchedPartition, write_fetch_response

if TYPE_CHECKING:
    from semel.broker.state import Broker
    from semel.broker.storage.partition import Partition

_BYTES_MAX_BEFORE_VERSION_3: Final = 2**31 - 1
_WAITED_FOR_MAX: Final = 1 << 20
_BYTES_PER_STEP: Final = 32 << 10
_BYTES_AT_ONCE: Final = 256 << 10
"""What is more than this is read in its turn among the long requests."""
_ONE_BYTES_AT_ONCE: Final = 4 << 20
"""A batch that is larger is read in another thread."""
_FOUND: Final = object()


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    try:
        session = broker.fetch_sessions.session_for(request, context.principal)
    except Refused as refusal:
        pieces = write_fetch_response(context.api_version, context.correlation_id, NO_SESSION, refusal.code, [])
        return Encoded(pieces)
    fetch = _Fetch(broker, context, request, session)
    wait_ms = request.max_wait.total_seconds() * 1000
    collecting = fetch.collect()
    # What is found within the first slice, and is enough, is answered without a task.
    is_found = next(collecting, _FOUND) is _FOUND
    if is_found and not fetch.is_cut_short and (fetch.is_enough or wait_ms <= 0):
        return fetch.answer()
    return fetch.answer_later(collecting, wait_ms)


class _Fetch:
    """One request: what has been found for it so far."""

    def __init__(self, broker: Broker, context: RequestContext, request: Any, session: FetchSession) -> None:
        self._broker = broker
        self._context = context
        self._session = session
        self._is_committed = request.isolation_level == READ_COMMITTED
        self._whole_bytes_max = min(
            getattr(request, "max_bytes", _BYTES_MAX_BEFORE_VERSION_3),
            broker.settings.fetch_bytes_max,
            broker.held_memory.answer_bytes_max(),
        )
        # Who waits for more than fits into an answer would wait for ever. And while it waits, all that is there already
        # is read again whenever a record comes: a megabyte is as much as is worth waiting for.
        self._bytes_min: int = min(request.min_bytes, self._whole_bytes_max, _WAITED_FOR_MAX)
        self._bytes_max = min(self._whole_bytes_max, _BYTES_AT_ONCE)
        self._found: dict[PartitionName, FetchedPartition] = {}
        self._bytes = 0
        self._failed = False

    @property
    def is_enough(self) -> bool:
        return self._bytes >= self._bytes_min or self._failed or not self._session.partitions

    @property
    def is_cut_short(self) -> bool:
        """Whether there may be more than was read at once. More than half: the next batch may just not have fitted."""
        return self._bytes_max < self._whole_bytes_max and self._bytes_max // 2 < self._bytes < self._whole_bytes_max

    def collect(self) -> Slices[None]:
        self._found.clear()
        self._bytes = 0
        pace = Pace()
        for name, wanted in list(self._session.partitions.items()):
            found = self._read(name, wanted)
            if self._is_large(found, wanted) and (partition := self._broker.partition(*name)) is not None:
                found = yield from self._read_large(partition, wanted, found)
            self._found[name] = found
            found_bytes = sum(map(len, found.records))
            self._bytes += found_bytes
            self._failed |= found.error_code != 0
            if pace.is_over(1 + found_bytes // _BYTES_PER_STEP):
                yield

    async def answer_later(self, collecting: Slices[None], wait_ms: float) -> Answer:
        """Wait until enough is there or the time is over, looking again whenever one of the partitions changes."""
        if self.is_cut_short:
            self._bytes_max, collecting = self._whole_bytes_max, self.collect()
        await finish(collecting, self._broker.lane)
        if self.is_enough or wait_ms <= 0:
            return await self._answer_aside()
        partitions = [one for one in (self._broker.partition(*name) for name in self._found) if one is not None]
        deadline_ms = self._broker.clock.now_ms() + wait_ms
        while not self.is_enough and (left_ms := deadline_ms - self._broker.clock.now_ms()) > 0:
            has_changed = self._is_outdated(partitions)
            self._found.clear()  # nobody holds records while waiting for more
            if not has_changed:
                has_changed = await self._wait_for_change(partitions, left_ms)
            if self._context.connection.is_closed:
                return None
            await finish(self.collect(), self._broker.lane)
            if not has_changed:
                break
        return await self._answer_aside()

    def _is_outdated(self, partitions: list[Partition]) -> bool:
        """Whether a partition has changed since it was read: others had their turns while the rest was read."""
        found = (self._found[partition.topic, partition.index] for partition in partitions)
        return any(
            not one.error_code and (one.high_watermark, one.last_stable_offset) != _ends(partition)
            for partition, one in zip(partitions, found, strict=True)
        )

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
        return Encoded(self._written(self._told()))

    async def _answer_aside(self) -> Answer:
        """Thousands of partitions take long to write."""
        topics = self._told()
        if len(self._found) <= ENTRIES_AT_ONCE:
            return Encoded(self._written(topics))
        return Encoded(await self._broker.durability.compute_long_aside(lambda: self._written(topics)))

    def _written(self, topics: list[tuple[str, list[FetchedPartition]]]) -> Sequence[bytes | memoryview]:
        return write_fetch_response(
            self._context.api_version, self._context.correlation_id, self._session.session_id, 0, topics
        )

    def _told(self) -> list[tuple[str, list[FetchedPartition]]]:
        """What the reader is to be told of its partitions; in a session, only what is new."""
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
        return [*topics.items()]

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

    def _is_large(self, found: FetchedPartition, wanted: Wanted) -> bool:
        """Whether nothing was read though there may be something: then the first batch has many megabytes."""
        if self._bytes or found.records or found.error_code:
            return False
        return wanted.fetch_offset < (found.last_stable_offset if self._is_committed else found.high_watermark)

    def _read_large(self, partition: Partition, wanted: Wanted, found: FetchedPartition) -> Slices[FetchedPartition]:
        connection = self._context.connection
        end_offset = found.last_stable_offset if self._is_committed else found.high_watermark
        try:
            batch = partition.large_batch(wanted.fetch_offset, end_offset)
            if batch is None:
                return found
            connection.note_working(batch.size)
            if connection.is_closed:  # it was too much
                batch.close()
                return found
            data = yield from self._broker.durability.move_aside(batch.read)
        except (CorruptRecords, StorageError) as error:
            self._broker.note_storage_error(error)
            return FetchedPartition(found.index, ErrorCode.kafka_storage_error)
        aborted = self._aborted(partition, wanted.fetch_offset, data) if self._is_committed else None
        return replace(found, aborted=aborted, records=[data])

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
            one_bytes_max=_ONE_BYTES_AT_ONCE,
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


def _ends(partition: Partition) -> tuple[int, int]:
    return partition.high_watermark, partition.last_stable_offset


def next_offset(batches: bytes | memoryview) -> int:
    """The offset behind the last of these whole batches."""
    position = last = 0
    while position < len(batches):
        last = position
        position += LENGTH_FIELD_END + int.from_bytes(batches[position + 8 : position + LENGTH_FIELD_END], "big")
    return read_header(batches, last).last_offset + 1

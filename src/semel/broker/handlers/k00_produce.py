"""Produce (0), versions 3-12: batches into partitions. Version 12 is transaction protocol 2.

A batch is judged by its header and its checksum and stored as it came, without a look at the records in it, unless its
topic is compacted (keys are needed then) or asks for another compression.
Not done: the old message formats (versions 0-2) and topic ids (version 13).
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.batch_intake import (
    Checked,
    check_batch,
    check_form,
    check_records,
    needs_records,
    recompressed,
    takes_long,
)
from semel.broker.context import Answer, Encoded, Reply, RequestContext
from semel.broker.pacing import Pace, Slices, finish
from semel.broker.storage.failures import StorageError
from semel.broker.storage.record_walk import are_codecs_loaded, load_codecs
from semel.broker.transaction_runtime import CONSUMER_OFFSETS, TRANSACTION_STATE
from semel.core.refusal import Refused
from semel.core.transaction_metadata import PROTOCOL_2
from semel.errors import CorruptRecords, WireError
from semel.records.layout import HEADER_BYTES, BatchHeader, read_header
from semel.wire.hot import (
    ProducedPartition,
    ProducePartition,
    ProduceRequest,
    TooManyEntries,
    read_produce_request,
    write_produce_response,
)

if TYPE_CHECKING:
    from semel.broker.state import Broker
    from semel.broker.storage.log_file import StagedFile
    from semel.broker.storage.partition import Partition

_PROTOCOL_2_SINCE: Final = 12
_ABORTABLE_KNOWN_SINCE: Final = 11
_ENTRIES_READ_AT_ONCE: Final = 1_000
_STEPS_AT_ONCE: Final = 8
"""Each batch may begin a new segment."""
_BYTES_PER_STEP: Final = 512 << 10
STAGED_BYTES_MIN: Final = 4 << 20
"""To write more than this would hold the loop for long."""
_Answers = list[tuple[str, list[ProducedPartition]]]
_INTERNAL: Final = frozenset({CONSUMER_OFFSETS, TRANSACTION_STATE})

# What a producer can do about a coordinator that is busy or away is to send the batch again.
_TRY_AGAIN: Final = frozenset(
    {
        ErrorCode.concurrent_transactions,
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.not_coordinator,
    }
)


def handle(broker: Broker, context: RequestContext, frame: bytearray) -> Reply:
    try:
        request = read_produce_request(memoryview(frame), context.api_version, entries_max=_ENTRIES_READ_AT_ONCE)
    except TooManyEntries:
        return _read_and_answer(broker, context, frame)
    return _store_and_answer(broker, context, request)


async def _read_and_answer(broker: Broker, context: RequestContext, frame: bytearray) -> Answer:
    """The same for a request whose entries take long to read."""
    request = await broker.durability.compute_long_aside(
        lambda: read_produce_request(memoryview(frame), context.api_version)
    )
    return await _awaited(_store_and_answer(broker, context, request))


def _store_and_answer(broker: Broker, context: RequestContext, request: ProduceRequest) -> Reply:
    production = _Production(broker, context, request)
    if large := production.large_batches():
        return _check_and_answer(broker, context, production, large)
    work = production.carry_out()
    try:
        next(work)
    except StopIteration as end:
        return _answer(broker, context, production, end.value)
    return _store_more_and_answer(broker, context, production, work)


async def _check_and_answer(
    broker: Broker, context: RequestContext, production: _Production, large: list[tuple[str, ProducePartition]]
) -> Answer:
    """Look through large batches without keeping others waiting, and store each before the next is unpacked."""
    are_large = {id(one) for _, one in large}
    answers: _Answers = []
    for topic in production.request.topics:
        stored: list[ProducedPartition] = []
        answers.append((topic.name, stored))
        for one in topic.partitions:
            await broker.lane.wait_turn()
            if id(one) in are_large:
                await production.check_aside(topic.name, one)
                await production.stage_aside(topic.name, one)
            stored.append(production.store(topic.name, one))
    return await _awaited(_answer(broker, context, production, answers))


async def _store_more_and_answer(
    broker: Broker, context: RequestContext, production: _Production, work: Slices[_Answers]
) -> Answer:
    return await _awaited(_answer(broker, context, production, await finish(work, broker.lane)))


async def _awaited(reply: Reply) -> Answer:
    return await reply if isinstance(reply, Awaitable) else reply


def _answer(broker: Broker, context: RequestContext, production: _Production, answers: _Answers) -> Reply:
    request = production.request
    if request.acks == 0:
        if any(one.error_code for _, partitions in answers for one in partitions):
            # The client asked for no answer: a closed connection is the only way to tell it.
            raise WireError("it produced with acks=0 and the records were refused")
        return None
    encoded = Encoded([write_produce_response(context.api_version, context.correlation_id, answers)])
    if production.written and request.transactional_id and broker.transactions.is_two_phase(request.transactional_id):
        return _answer_when_prepared(broker, request.transactional_id, encoded)
    if broker.acknowledges_after_sync and production.written:
        return _answer_when_durable(broker, production.written, encoded)
    return encoded


async def _answer_when_durable(broker: Broker, partitions: list[Partition], answer: Encoded) -> Answer:
    await broker.durability.wait_acknowledged(partitions)
    return answer


async def _answer_when_prepared(broker: Broker, transactional_id: str, answer: Encoded) -> Answer:
    await broker.transactions.wait_prepared(transactional_id)
    return answer


class _Production:
    """One request on its way into the partitions."""

    def __init__(self, broker: Broker, context: RequestContext, request: ProduceRequest) -> None:
        self._broker = broker
        self._context = context
        self.request = request
        self._checked: dict[int, Checked | Refused | StorageError] = {}
        """Batches that were looked through beforehand, by the identity of their places in the request."""
        self._staged: dict[int, tuple[Partition, StagedFile]] = {}
        """Those that were written beforehand, but for their headers."""
        self._now_ms = broker.clock.now_ms()
        self._speaks_protocol_2 = (
            context.api_version >= _PROTOCOL_2_SINCE and broker.settings.transaction_version >= PROTOCOL_2
        )
        self.written: list[Partition] = []

    def carry_out(self) -> Slices[_Answers]:
        topics = self.request.topics
        count = sum(len(topic.partitions) for topic in topics)
        if count == 1 or (count <= _STEPS_AT_ONCE and self.request.transactional_id is None and self._is_small()):
            return [(topic.name, [self.store(topic.name, one) for one in topic.partitions]) for topic in topics]
        pace = Pace(_STEPS_AT_ONCE)
        answers: _Answers = [(topic.name, []) for topic in self.request.topics]
        batches = [
            (topic.name, one, stored)
            for topic, (_, stored) in zip(self.request.topics, answers, strict=True)
            for one in topic.partitions
        ]
        for number, (topic, one, stored) in enumerate(batches):
            if number % _STEPS_AT_ONCE == 0:
                self._join_together([(name, other) for name, other, _ in batches[number : number + _STEPS_AT_ONCE]])
            stored.append(self.store(topic, one))
            if pace.is_over(1 + len(one.records or b"") // _BYTES_PER_STEP) and number + 1 < len(batches):
                yield
        return answers

    def _is_small(self) -> bool:
        return all(
            len(one.records or b"") <= _BYTES_PER_STEP for topic in self.request.topics for one in topic.partitions
        )

    def _join_together(self, batches: Sequence[tuple[str, ProducePartition]]) -> None:
        """Take the partitions of several batches into their transaction with one record of it.

        Only to save work: `store` asks for each of them again, and tells the client of a refusal.
        """
        if not self._speaks_protocol_2 or self.request.transactional_id is None or len(batches) == 1:
            return
        names: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for topic, one in batches:
            try:
                self._writable_partition(topic, one.index)
                header = read_header(one.records or b"")
            except (Refused, CorruptRecords):
                continue
            if header.is_transactional:
                names.setdefault((header.producer_id, header.producer_epoch), []).append((topic, one.index))
        for (producer_id, producer_epoch), partitions in names.items():
            try:
                self._check_transactional_id()
                self._broker.transactions.add_partitions(
                    self.request.transactional_id, producer_id, producer_epoch, partitions, client_version=2
                )
            except Refused:
                return

    def large_batches(self) -> list[tuple[str, ProducePartition]]:
        """Those that are too much for one turn of the loop."""
        large: list[tuple[str, ProducePartition]] = []
        for topic in self.request.topics:
            if topic.name not in self._broker.topics:
                continue
            settings = self._broker.topic_settings(topic.name)
            for one in topic.partitions:
                if one.records is not None and takes_long(one.records, settings):
                    large.append((topic.name, one))
        return large

    async def check_aside(self, topic: str, one: ProducePartition) -> None:
        broker = self._broker
        try:
            self._writable_partition(topic, one.index)
            settings = broker.topic_settings(topic)
            version = self._context.api_version
            checked = await broker.durability.compute_aside(lambda: check_form(one.records, settings, version))
            if needs_records(settings):
                if checked[1].compression != "none" and not are_codecs_loaded():
                    await broker.durability.compute_aside(load_codecs)
                connection = self._context.connection

                def take_memory(held_bytes: int) -> None:
                    connection.take_working(held_bytes, ErrorCode.not_enough_replicas)  # producers try again

                await finish(check_records(checked, settings, take_memory), broker.lane)
                connection.note_working(0)
                checked = await broker.durability.compute_long_aside(lambda: recompressed(checked, settings))
            self._checked[id(one)] = checked
        except Refused as refusal:
            self._checked[id(one)] = refusal

    async def stage_aside(self, topic: str, one: ProducePartition) -> None:
        """Let another thread write a batch of many megabytes. `store` then takes what it has written."""
        checked = self._checked.get(id(one))
        if not isinstance(checked, tuple) or len(checked[0]) <= STAGED_BYTES_MIN:
            return
        batch, header = checked
        try:
            partition = self._writable_partition(topic, one.index)
            staged = partition.stage(
                header, now_ms=self._now_ms, protocol_2=self._speaks_protocol_2 and header.is_transactional
            )
            if staged is not None:
                body = memoryview(batch)[HEADER_BYTES:]
                write = self._broker.durability.move_aside(lambda: staged.write(body, HEADER_BYTES))
                await finish(write, self._broker.lane)
                self._staged[id(one)] = partition, staged
        except (Refused, StorageError) as error:
            self._checked[id(one)] = error

    def _check(self, topic: str, one: ProducePartition) -> Checked:
        checked = self._checked.pop(id(one), None)
        if isinstance(checked, Exception):
            raise checked
        return checked or check_batch(one.records, self._broker.topic_settings(topic), self._context.api_version)

    def store(self, topic: str, one: ProducePartition) -> ProducedPartition:
        if not self._staged:
            return self._store(topic, one)
        staged_in, staged = self._staged.pop(id(one), (None, None))
        try:
            return self._store(topic, one, staged_in, staged)
        finally:
            if staged is not None:
                staged.discard()  # unless it has become a segment

    def _store(
        self, topic: str, one: ProducePartition, staged_in: Partition | None = None, staged: StagedFile | None = None
    ) -> ProducedPartition:
        index = one.index
        try:
            partition = self._writable_partition(topic, index)
            batch, header = self._check(topic, one)
            protocol_2 = self._speaks_protocol_2 and header.is_transactional
            if header.is_transactional:
                self._join_transaction(partition, header)
            # A partition of the same name may have come in the place of the one that it was written for.
            staged = staged if staged_in is partition else None
            stored = partition.append(batch, header, now_ms=self._now_ms, protocol_2=protocol_2, staged=staged)
        except Refused as refusal:
            self._broker.metrics.count_refusal(refusal.code)
            return ProducedPartition(index, refusal.code, error_message=refusal.reason)
        except (StorageError, CorruptRecords) as error:
            self._broker.note_storage_error(error)
            return ProducedPartition(index, ErrorCode.kafka_storage_error, error_message=str(error))
        if stored.is_duplicate:
            self._broker.metrics.duplicates_refused += 1
        else:
            self._broker.metrics.count_appended(header.record_count, len(batch))
        self.written.append(partition)
        return ProducedPartition(
            index, 0, stored.base_offset, stored.log_append_time_ms, partition.log.log_start_offset
        )

    def _writable_partition(self, topic: str, index: int) -> Partition:
        if self.request.acks not in (-1, 0, 1):
            raise Refused(ErrorCode.invalid_required_acks, "acks must be -1, 0 or 1")
        if not self._broker.authorizer.allows(self._context, Operation.WRITE, ResourceType.TOPIC, topic):
            raise Refused(ErrorCode.topic_authorization_failed, topic)
        partition = self._broker.partition(topic, index)
        if partition is None:
            raise Refused(ErrorCode.unknown_topic_or_partition, f"there is no partition {topic}-{index}")
        if topic in _INTERNAL:
            raise Refused(ErrorCode.invalid_topic_exception, f"{topic} is written by the broker alone")
        return partition

    def _check_transactional_id(self) -> str:
        transactional_id = self.request.transactional_id
        if transactional_id is None or not self._broker.authorizer.allows(
            self._context, Operation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id
        ):
            raise Refused(ErrorCode.transactional_id_authorization_failed, str(transactional_id))
        return transactional_id

    def _join_transaction(self, partition: Partition, header: BatchHeader) -> None:
        """The batch must belong to the open transaction of its producer, or becomes part of it (protocol 2)."""
        transactional_id = self._check_transactional_id()
        name = (partition.topic, partition.index)
        identity = (transactional_id, header.producer_id, header.producer_epoch)
        try:
            if self._speaks_protocol_2:
                self._broker.transactions.add_partitions(*identity, [name], client_version=2)
            elif (
                self._broker.settings.transaction_partition_verification
                and partition.log.producer_checks_for_transaction(header.producer_id, header.producer_epoch) is None
            ):
                abortable = self._context.api_version >= _ABORTABLE_KNOWN_SINCE
                codes = self._broker.transactions.verify_partitions(
                    *identity,
                    [name],
                    code_if_missing=ErrorCode.transaction_abortable if abortable else ErrorCode.invalid_txn_state,
                )
                if codes[name] is not ErrorCode.none:
                    raise Refused(codes[name], f"{name[0]}-{name[1]} was not added to the transaction")
        except Refused as refusal:
            if refusal.code in _TRY_AGAIN:
                raise Refused(ErrorCode.not_enough_replicas, refusal.reason) from refusal
            if refusal.code is ErrorCode.producer_fenced:
                raise Refused(ErrorCode.invalid_producer_epoch, refusal.reason) from refusal
            raise

"""Produce (0), versions 3-12: batches into partitions. Version 12 is transaction protocol 2.

A batch is judged by its header and its checksum and stored as it came, without a look at the records in it, unless its
topic is compacted (keys are needed then) or asks for another compression.
Not done: the old message formats (versions 0-2) and topic ids (version 13).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.batch_intake import check_batch
from semel.broker.context import Answer, Encoded, Reply, RequestContext
from semel.broker.storage.failures import StorageError
from semel.broker.transaction_runtime import CONSUMER_OFFSETS, TRANSACTION_STATE
from semel.core.refusal import Refused
from semel.core.transaction_metadata import PROTOCOL_2
from semel.errors import CorruptRecords, WireError
from semel.records.layout import BatchHeader
from semel.wire.hot import ProducedPartition, ProduceRequest, read_produce_request, write_produce_response

if TYPE_CHECKING:
    from semel.broker.state import Broker
    from semel.broker.storage.partition import Partition

_PROTOCOL_2_SINCE: Final = 12
_ABORTABLE_KNOWN_SINCE: Final = 11
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
    request = read_produce_request(memoryview(frame), context.api_version)
    production = _Production(broker, context, request)
    answers = production.carry_out()
    if request.acks == 0:
        if any(one.error_code for _, partitions in answers for one in partitions):
            # The client asked for no answer: a closed connection is the only way to tell it.
            raise WireError("it produced with acks=0 and the records were refused")
        return None
    encoded = Encoded([write_produce_response(context.api_version, context.correlation_id, answers)])
    if broker.acknowledges_after_sync and production.written:
        return _answer_when_durable(broker, production.written, encoded)
    return encoded


async def _answer_when_durable(broker: Broker, partitions: list[Partition], answer: Encoded) -> Answer:
    await broker.durability.wait_acknowledged(partitions)
    return answer


class _Production:
    """One request on its way into the partitions."""

    def __init__(self, broker: Broker, context: RequestContext, request: ProduceRequest) -> None:
        self._broker = broker
        self._context = context
        self._request = request
        self._now_ms = broker.clock.now_ms()
        self._speaks_protocol_2 = (
            context.api_version >= _PROTOCOL_2_SINCE and broker.settings.transaction_version >= PROTOCOL_2
        )
        self.written: list[Partition] = []

    def carry_out(self) -> list[tuple[str, list[ProducedPartition]]]:
        return [
            (topic.name, [self._store(topic.name, one.index, one.records) for one in topic.partitions])
            for topic in self._request.topics
        ]

    def _store(self, topic: str, index: int, records: memoryview | None) -> ProducedPartition:
        try:
            partition = self._writable_partition(topic, index)
            batch, header = check_batch(records, self._broker.topic_settings(topic), self._context.api_version)
            protocol_2 = self._speaks_protocol_2 and header.is_transactional
            if header.is_transactional:
                self._join_transaction(partition, header)
            stored = partition.append(batch, header, now_ms=self._now_ms, protocol_2=protocol_2)
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
        if self._request.acks not in (-1, 0, 1):
            raise Refused(ErrorCode.invalid_required_acks, "acks must be -1, 0 or 1")
        if not self._broker.authorizer.allows(self._context, Operation.WRITE, ResourceType.TOPIC, topic):
            raise Refused(ErrorCode.topic_authorization_failed, topic)
        partition = self._broker.partition(topic, index)
        if partition is None:
            raise Refused(ErrorCode.unknown_topic_or_partition, f"there is no partition {topic}-{index}")
        if topic in _INTERNAL:
            raise Refused(ErrorCode.invalid_topic_exception, f"{topic} is written by the broker alone")
        return partition

    def _join_transaction(self, partition: Partition, header: BatchHeader) -> None:
        """The batch must belong to the open transaction of its producer, or becomes part of it (protocol 2)."""
        transactional_id = self._request.transactional_id
        if transactional_id is None or not self._broker.authorizer.allows(
            self._context, Operation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id
        ):
            raise Refused(ErrorCode.transactional_id_authorization_failed, str(transactional_id))
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

"""What a transactional id did lately, from the coordinator's own log (`__transaction_state`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from semel.client.cluster import Cluster
from semel.client.offsets import edge_offsets
from semel.client.partitions import TopicPartition
from semel.core.coordinator_hash import coordinator_partition
from semel.core.transaction_metadata import TransactionMetadata
from semel.core.transaction_records import decode_transaction
from semel.inspect.log import LogReader
from semel.records.reference import decode_batch

STATE_TOPIC: Final = "__transaction_state"
_OFFSETS_BACK: Final = 20_000
_BYTES_MAX: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class Transition:
    """A change that the coordinator has logged. `state` is Kafka's word, or "Forgotten" for an expired id."""

    offset: int
    at_ms: int
    state: str
    producer_id: int
    producer_epoch: int
    partitions: tuple[TopicPartition, ...]


def recent_transitions(cluster: Cluster, transactional_id: str, *, limit: int = 20) -> list[Transition]:
    """The last changes of this id, oldest first, as far as compaction has left them.

    Reads the last 20,000 records of one partition. Raises `NotAuthorized` or `UnknownTopic` where that partition cannot
    be read.
    """
    count = len(cluster.leaders(STATE_TOPIC))
    named = TopicPartition(STATE_TOPIC, coordinator_partition(transactional_id, count))
    [start] = edge_offsets(cluster, [named], "earliest").values()
    [end] = edge_offsets(cluster, [named], "latest", "read_uncommitted").values()
    reader = LogReader(cluster, named, max(start, end - _OFFSETS_BACK))
    found: list[Transition] = []
    while reader.position < end and reader.bytes_read < _BYTES_MAX:
        for seen in reader.read(end=end):
            for record in [] if seen.batch.status == "marker" else decode_batch(seen.data)[1]:
                decoded = None if record.key is None else decode_transaction(record.key, record.value)
                if decoded is None or decoded.transactional_id != transactional_id:
                    continue
                if isinstance(decoded, TransactionMetadata):
                    found.append(_transition(record.offset, decoded))
                else:
                    found.append(Transition(record.offset, record.timestamp_ms, "Forgotten", -1, -1, ()))
    return found[-limit:]


def _transition(offset: int, metadata: TransactionMetadata) -> Transition:
    partitions = tuple(TopicPartition(*named) for named in sorted(metadata.partitions))

    return Transition(
        offset,
        metadata.last_update_ms,
        metadata.status.title,
        metadata.producer_id,
        metadata.producer_epoch,
        partitions,
    )

"""One transaction written by many processes.

Kafka lets several processes write under one producer id and epoch, as long as each partition has one writer with
contiguous sequences. The owner of the transaction (`Producer`) opens it, hands out a `SharedTransaction`, and alone
commits or aborts; each `SharedWriter` writes to partitions that no other writer touches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import pyarrow as pa

from semel.client.cluster import Cluster
from semel.client.ownership import ProducerIdentity
from semel.client.partitions import TopicPartition
from semel.client.routing import encode_rows
from semel.client.sender import Sender, Stored
from semel.client.settings import parse_config
from semel.client.transactions import TransactionCalls
from semel.records import EncodedBatch


@dataclass(frozen=True, slots=True)
class SharedTransaction:
    """What another process needs to write inside an open transaction. It can be pickled."""

    transactional_id: str
    identity: ProducerIdentity
    protocol: int
    transaction_timeout_ms: int


class SharedWriter:
    """Writes to partitions of its own inside somebody else's transaction.

    >>> import pyarrow as pa
    >>> from semel import Producer
    >>> with Producer(bootstrap_servers=bootstrap, transactional_id="shared") as owner, owner.transaction():
    ...     with SharedWriter(owner.share(), bootstrap_servers=bootstrap) as writer:  # in any other process
    ...         writer.send_table("orders", 0, pa.table({"value": [b"1", b"2"]}))
    ...         owner.adopt(writer.flush())

    A `Cluster` may be given, which is then shared and stays open: a process that writes in many transactions, one after
    the other, connects once.
    """

    def __init__(
        self,
        shared: SharedTransaction,
        settings: Mapping[str, object] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        cluster: Cluster | None = None,
        **more_settings: object,
    ) -> None:
        config = parse_config({**(settings or {}), **more_settings, "transactional.id": shared.transactional_id})
        self.config = replace(config.producer, transaction_timeout_ms=shared.transaction_timeout_ms)
        self.shared = shared
        self._owns_cluster = cluster is None
        self.cluster = cluster or Cluster(config.client, clock=clock, sleep=sleep)
        self._calls = TransactionCalls(
            self.cluster, shared.transactional_id, shared.transaction_timeout_ms, shared.protocol
        )
        self._sender = Sender(
            self.cluster, self.config, identity=shared.identity, before_first_write=self._add_partitions
        )
        self._sender.protocol = shared.protocol

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Close the connections, unless they are somebody else's.

        What was not flushed is dropped: the owner must then abort, or another writer must go on after it.
        """
        if self._owns_cluster:
            self.cluster.close()
        else:
            self._sender.discard(patience_ms=0)

    def send_table(self, topic: str, partition: int, table: pa.Table, *, first_sequence: int | None = None) -> None:
        """Encode a table for one partition and send it."""
        batches = encode_rows(table, self.config, int(time.time() * 1000))
        for batch in batches:
            self.send_encoded(topic, partition, batch, first_sequence=first_sequence)
            first_sequence = None

    def send_encoded(
        self, topic: str, partition: int, batch: EncodedBatch, *, first_sequence: int | None = None
    ) -> None:
        """Send a batch that was encoded before, perhaps elsewhere; it is stamped with this transaction's identity.

        `first_sequence` is for a writer that goes on where an earlier attempt stopped; otherwise a partition starts at
        0.
        """
        self._sender.enqueue(topic, partition, batch, sequence=first_sequence)
        self._sender.nudge()

    def flush(self) -> list[Stored]:
        """Wait until everything is acknowledged; raises if the transaction can no longer be committed."""
        self._sender.drain()
        stored, self._sender.stored = self._sender.stored, []
        return stored

    def _add_partitions(self, partitions: Collection[TopicPartition]) -> None:
        self._calls.add_partitions(self.shared.identity, partitions)

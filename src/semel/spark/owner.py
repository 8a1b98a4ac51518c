"""The driver's side of a pipeline's transactions: who owns them, what was committed last, and the end of each.

One `PipelineOwner` holds the pipeline's `transactional.id`. A new one fences every older one, on whichever machine.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.partitions import TopicPartition
from semel.client.producer import Outcome, Producer
from semel.client.sender import Stored
from semel.client.settings import parse_config
from semel.client.shared import SharedTransaction, SharedWriter
from semel.client.transaction_state import State
from semel.errors import CommitUnknown, Fenced, NotAuthorized, TransactionAborted
from semel.spark import failpoints
from semel.spark.blobs import Piece
from semel.spark.ledger import Entry, Ledger
from semel.spark.options import SinkOptions
from semel.wire import ErrorCode

MUCH_BYTES = 4 * 1024 * 1024
"""From here on a second connection is worth a thread. Tests make it less."""


class PipelineFenced(Fenced):
    """Another run of the same pipeline has taken over."""


def fenced(name: str) -> PipelineFenced:
    return PipelineFenced(
        f"Another run of pipeline {name!r} has taken over, so this one stops here: what it had not committed is "
        "aborted, and nothing is lost or repeated. Run one at a time, or give each its own name.",
        code=ErrorCode.producer_fenced,
        is_fatal=True,
    )


class PipelineOwner:
    """Owns the transactions of a pipeline (`key` is its name) or of one job (`key` is name/job_id)."""

    def __init__(self, options: SinkOptions, key: str) -> None:
        self._options = options
        self._reach("before_ledger")
        make_cluster = failpoints.WatchedCluster if os.environ.get(failpoints.VARIABLE) else Cluster
        self._producer = Producer({**options.settings, "transactional.id": key}, make_cluster=make_cluster)
        # Nobody tells a sink that its query has ended: the connections go with the last reference to it.
        weakref.finalize(self, self._producer.cluster.close)
        self._cluster_beside: Cluster | None = None
        if isinstance(self._producer.cluster, failpoints.WatchedCluster):
            self._producer.cluster.pipeline = options.name
        try:
            self._ledger = Ledger(self._producer.cluster, options.ledger, key)
            self._ledger.ensure()
            self.committed: Entry | None = self._ledger.read()
        except BaseException:
            self.close()
            raise
        self._topics: set[str] = set()

    def close(self) -> None:
        self._producer.cluster.close()
        if self._cluster_beside is not None:
            self._cluster_beside.close()

    def _explain(self, error: Fenced) -> Fenced:
        # An id that its coordinator has forgotten after a week of silence was taken over by nobody.
        return error if error.code == ErrorCode.invalid_producer_id_mapping else fenced(self._options.name)

    def _reach(self, point: str) -> None:
        failpoints.reach(point, self._options.name)

    @property
    def cluster(self) -> Cluster:
        return self._producer.cluster

    @property
    def is_open(self) -> bool:
        """Whether a transaction was begun and has not ended."""
        return self._producer.state in (State.OPEN, State.DOOMED)

    def begin(self) -> SharedTransaction:
        """Open a transaction for the write tasks; one that could not be aborted before is aborted now."""
        self.abort()
        try:
            self._producer.begin()
            return self._producer.share()
        except Fenced as error:
            raise self._explain(error) from error

    def write(self, pieces: Collection[Piece]) -> list[Stored]:
        """Write these blobs in the open transaction; returns when all of them are stored.

        A broker works on one request of a connection at a time, so much data goes over two of them.
        """
        mine, others = share_out(pieces)
        try:
            # It waits for its thread, whatever happens here: nothing may be on its way when the transaction is ended.
            with ThreadPoolExecutor(1) as beside:
                other = beside.submit(self._write_beside, self._producer.share(), others) if others else None
                for piece in mine:
                    self._reach("before_produce")
                    self._producer.send_encoded(*piece.partition, piece.batch)
                stored = self._producer.flush()
            if other is not None:
                stored += other.result()
        except Fenced as error:
            raise self._explain(error) from error
        self._reach("after_produce")
        return stored

    def _write_beside(self, shared: SharedTransaction, pieces: Collection[Piece]) -> list[Stored]:
        if self._cluster_beside is None:
            self._cluster_beside = Cluster(parse_config(self._options.settings).client)
            weakref.finalize(self, self._cluster_beside.close)
        with SharedWriter(shared, self._options.settings, cluster=self._cluster_beside) as writer:
            for piece in pieces:
                self._reach("before_produce")
                writer.send_encoded(*piece.partition, piece.batch)
            return writer.flush()

    def settle(self, stored: Collection[Stored], entry: Entry, offsets: Mapping[TopicPartition, int]) -> None:
        """Everything is written: add the ledger's record and the input offsets, and commit.

        Returns when it is committed, whatever happened to answers on the way; raises if it is aborted or must be.
        """
        try:
            self._producer.adopt(stored)
            self._reach("after_last_produce")
            value = self._ledger.record(entry, self._producer.identity)
            self._producer.send(self._ledger.topic, value, key=self._ledger.key, partition=self._ledger.partition)
            self._producer.flush()
            self._reach("after_ledger_record")
            here = self._of_this_cluster(offsets)
            if here:
                self._producer.send_offsets(here, self._options.group or self._options.name)
            self._reach("after_offsets")
            self._commit()
        except Fenced as error:
            raise self._explain(error) from error
        self._reach("after_end_answered")
        self.committed = replace(
            entry,
            producer_id=self._producer.identity.producer_id,
            producer_epoch=self._producer.identity.producer_epoch,
        )

    def _commit(self) -> None:
        try:
            self._producer.commit()
        except CommitUnknown:
            if self._producer.resolve() is Outcome.ABORTED:
                raise TransactionAborted(
                    "The answer to the commit was lost, and the log says that the transaction was aborted.",
                    code=ErrorCode.transaction_abortable,
                ) from None

    def abort(self) -> None:
        """Leave no trace of the open transaction. Raises `Fenced` if another run has taken over."""
        try:
            if self.is_open:
                self._producer.abort()
            elif self._producer.state is State.DEAD:
                self._producer.begin()  # raises what it died of
        except Fenced as error:
            raise self._explain(error) from error

    def _of_this_cluster(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Input of another cluster cannot be in a transaction of this one."""
        if not {named.topic for named in offsets} <= self._topics:
            self._topics = set(Admin(self._producer.cluster).list_topics(include_internal=True))
        return {named: offset for named, offset in offsets.items() if named.topic in self._topics}

    def partition_count(self, topic: str) -> int:
        return len(self._producer.cluster.leaders(topic))

    def check_writable(self, topic: str) -> None:
        """Find out before the first row is computed that a topic is missing, or closed to this user."""
        if not Admin(self._producer.cluster).may_write(topic):
            raise NotAuthorized(
                f"This user may not write to topic {topic!r}; nothing was computed or written. Grant WRITE on it.",
                code=ErrorCode.topic_authorization_failed,
            )


def share_out(pieces: Collection[Piece]) -> tuple[list[Piece], list[Piece]]:
    """The pieces in two parts of about the same size, each partition in one of them; if they are few, all in the first.

    >>> from semel.records import EncodedBatch
    >>> pieces = [Piece(TopicPartition("out", index), EncodedBatch(memoryview(bytes(size)), 1))
    ...           for index, size in ((0, 2_000_000), (1, 3_000_000), (0, 2_000_000), (2, 2_000_000))]
    >>> [[piece.partition.partition for piece in part] for part in share_out(pieces)]
    [[0, 0], [1, 2]]
    """
    sizes: Counter[TopicPartition] = Counter()
    for piece in pieces:
        sizes[piece.partition] += len(piece.batch.data)
    if sizes.total() < MUCH_BYTES:
        return list(pieces), []
    loads, is_second = [0, 0], dict[TopicPartition, bool]()
    for partition, size in sizes.most_common():
        is_second[partition] = loads[1] < loads[0]
        loads[is_second[partition]] += size
    return (
        [piece for piece in pieces if not is_second[piece.partition]],
        [piece for piece in pieces if is_second[piece.partition]],
    )

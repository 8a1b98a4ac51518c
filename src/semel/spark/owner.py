"""The driver's side of a pipeline's transactions: who owns them, what was committed last, and the end of each.

One `PipelineOwner` holds the pipeline's `transactional.id`. A new one fences every older one, on whichever machine.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.ownership import ProducerIdentity
from semel.client.partitions import TopicPartition
from semel.client.producer import Outcome, Producer
from semel.client.sender import Stored
from semel.client.settings import parse_config
from semel.client.shared import SharedTransaction, SharedWriter
from semel.client.transaction_state import State
from semel.errors import CommitUnknown, Fenced, KafkaError, NotAuthorized, TransactionAborted
from semel.spark import failpoints
from semel.spark.blobs import Piece
from semel.spark.lag import Lag
from semel.spark.ledger import Entry, Ledger, query_key, sign
from semel.spark.options import SinkOptions
from semel.wire import ErrorCode

MUCH_BYTES = 4 * 1024 * 1024
"""From here on a second connection is worth a thread. Tests make it less."""

JOBS_KEPT_DAYS: Final = 400
"""How long the ledger remembers a job: longer than a year, so that last year's job of the same day is still known."""
_FORGOTTEN_AT_ONCE: Final = 100


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
    """Owns the transactions of a pipeline (`key` is its name) or of one job (`key` is name/job_id).

    `others` are names that the same query had before. Any run that still uses them is fenced, so that no
    two runs of one query can both commit. `resumed` is the identity that this run left in another process.
    """

    def __init__(
        self,
        options: SinkOptions,
        key: str,
        others: Collection[str] = (),
        resumed: ProducerIdentity | None = None,
    ) -> None:
        self._options = options
        self.lag = Lag(options)
        self._reach("before_ledger")
        make_cluster = failpoints.WatchedCluster if os.environ.get(failpoints.VARIABLE) else Cluster
        self._producer = Producer(
            {**options.settings, "transactional.id": key}, make_cluster=make_cluster, resumed=resumed
        )
        # Nobody tells a sink that its query has ended: the connections go with the last reference to it.
        weakref.finalize(self, self._producer.cluster.close)
        self._cluster_beside: Cluster | None = None
        if isinstance(self._producer.cluster, failpoints.WatchedCluster):
            self._producer.cluster.pipeline = options.name
        self._of_queries: dict[str, Entry | None] = {}
        try:
            for other in sorted(others):
                self._fence(other)
            self._ledger = Ledger(self._producer.cluster, options.ledger)
            self._ledger.ensure()
            self.committed: Entry | None = self._ledger.read(key)
            """What the pipeline or job committed last."""
        except BaseException:
            self.close()
            raise
        self._key = key

    def committed_of(self, query: str) -> Entry | None:
        """What a query committed last, also if it did so under another name.

        The query's own record comes first: the record of this name may be older, if the query had another name since.
        """
        if query not in self._of_queries:
            mine = self._ledger.read(query_key(query))
            if mine is None and self.committed is not None and self.committed.query == query:
                mine = self.committed  # from a release that had one record for each pipeline
            self._of_queries[query] = mine
        return self._of_queries[query]

    def _fence(self, other: str) -> None:
        try:
            with Producer({**self._options.settings, "transactional.id": other}):
                return
        except NotAuthorized as error:
            raise NotAuthorized(
                f"This query ran as pipeline {other!r} before, and this user may not use that transactional id, so a "
                f"run under the old name could not be stopped. Nothing was written. Grant WRITE on it, or keep "
                f"name={other!r}.",
                code=error.code,
            ) from error

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
    def transactional_id(self) -> str:
        return self._key

    @property
    def cluster(self) -> Cluster:
        return self._producer.cluster

    @property
    def identity(self) -> ProducerIdentity:
        return self._producer.identity

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
        """Everything is written: add the ledger's records and the input offsets, and commit.

        Returns when it is committed, whatever happened to answers on the way; raises if it is aborted or must be.
        """
        try:
            self._producer.adopt(stored)
            self._reach("after_last_produce")
            signed = sign(entry, self._producer.identity)
            self._send_entry(self._key, signed)
            if entry.query:
                self._send_entry(query_key(entry.query), signed)
            else:
                self._forget_old_jobs(signed)
            self._producer.flush()
            self._reach("after_ledger_record")
            if offsets and self._options.group is not None:
                self._send_offsets(offsets, self._options.group)
            self._reach("after_offsets")
            self._commit()
        except Fenced as error:
            raise self._explain(error) from error
        self._reach("after_end_answered")
        self.committed = signed
        self._of_queries[entry.query] = signed

    def _send_entry(self, key: str, entry: Entry | None) -> None:
        place = self._ledger.place(key)
        value = None if entry is None else entry.encode()
        self._producer.send(place.topic, value, key=key.encode(), partition=place.partition)

    def _forget_old_jobs(self, entry: Entry) -> None:
        """The ledger would grow for ever with jobs that nobody runs again."""
        oldest_ms = entry.at_ms - JOBS_KEPT_DAYS * 24 * 3600 * 1000
        for key in self._ledger.jobs_before(self._key, self._options.name, oldest_ms)[:_FORGOTTEN_AT_ONCE]:
            self._send_entry(key, None)

    def _send_offsets(self, offsets: Mapping[TopicPartition, int], group: str) -> None:
        try:
            self._producer.send_offsets(offsets, group)
        except KafkaError as error:
            raise self.lag.explain(error) from error

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

    def partition_count(self, topic: str) -> int:
        return len(self._producer.cluster.leaders(topic))


def check_writable(cluster: Cluster, topic: str) -> None:
    """Find out before the first row is computed that a topic is missing, or closed to this user."""
    if not Admin(cluster).may_write(topic):
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

"""The ledger: a compacted topic that says which micro-batch or job of a pipeline was committed last.

Its record is written inside the transaction that it speaks of, so it is there exactly if the transaction is. Group
offsets could not serve: they expire after a week of silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.config import FetchConfig
from semel.client.fetcher import Fetcher
from semel.client.offsets import edge_offsets
from semel.client.ownership import ProducerIdentity
from semel.client.partitions import TopicPartition
from semel.errors import CommitUnknown, ConfigError, KafkaError, NotAuthorized, RequestTimedOut
from semel.records import ControlMarker, partitions_for_keys
from semel.wire import ErrorCode

PARTITIONS: Final = 16
"""Where a pipeline's record lies follows from its name and this number, however many partitions the topic has."""

TOPIC_CONFIG: Final[Mapping[str, str]] = {
    "cleanup.policy": "compact",
    # A driver reads its partition from the beginning when it starts, so it is kept short.
    "segment.ms": "3600000",
    "segment.bytes": "16777216",
    "min.cleanable.dirty.ratio": "0.1",
}
_READ_TIMEOUT_MS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Entry:
    """What was committed. For a stream `batch` and `offsets` say what, for a job its key does."""

    query: str = ""
    """The id in the query's checkpoint: with another checkpoint the numbers of batches begin anew."""
    batch: int = -1
    offsets: str = ""
    """A digest of the input that the batch consists of."""
    records: int = 0
    at_ms: int = 0
    producer_id: int = -1
    producer_epoch: int = -1

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, value: bytes) -> Entry:
        """
        >>> Entry.decode(Entry(query="q", batch=3).encode()).batch
        3
        """
        known = json.loads(value)
        return cls(**{name: known[name] for name in cls.__dataclass_fields__ if name in known})


class Ledger:
    """The ledger's topic, and the place in it of one pipeline or job."""

    def __init__(self, cluster: Cluster, topic: str, key: str) -> None:
        self._cluster = cluster
        self.topic = topic
        self.key = key.encode()
        self.partition = int(partitions_for_keys(pa.array([self.key]), PARTITIONS)[0])

    def ensure(self) -> None:
        """Create the topic if it is not there, and refuse one that would forget."""
        admin = Admin(self._cluster)
        if self.topic not in self._cluster.list_topics():
            self._create(admin)
        count = len(self._cluster.leaders(self.topic))
        if count < PARTITIONS:
            raise ConfigError(
                f"The ledger topic {self.topic!r} has {count} partitions and needs {PARTITIONS}; nothing was written. "
                "Name another one by ledger=, or delete it if no pipeline uses it."
            )
        try:
            policy = admin.describe_configs("topic", self.topic, ["cleanup.policy"])["cleanup.policy"].value
        except NotAuthorized:
            return  # whoever may not look at it has somebody who does
        if policy != "compact":
            raise ConfigError(
                f"The ledger topic {self.topic!r} has cleanup.policy={policy} and would forget what was committed; "
                "nothing was written. Set it to compact, or name another topic by ledger=."
            )

    def _create(self, admin: Admin) -> None:
        try:
            admin.create_topics(self.topic, partitions=PARTITIONS, config=TOPIC_CONFIG)
        except KafkaError as error:
            if error.code != ErrorCode.topic_already_exists:  # another pipeline was faster
                raise

    def read(self) -> Entry | None:
        """What was committed last, or None. Only for the owner of the pipeline, and when it has no transaction open.

        Up to the last stable offset a reader of committed records sees what counts. Behind it, where another pipeline's
        open transaction may hold that back, the markers of our own producers decide.
        """
        named = TopicPartition(self.topic, self.partition)
        [stable_end] = edge_offsets(self._cluster, [named], "latest", "read_committed").values()
        [end] = edge_offsets(self._cluster, [named], "latest", "read_uncommitted").values()
        found = None
        for _, value in self._records("read_committed", "earliest", stable_end)[0]:
            found = Entry.decode(value)
        if end > stable_end:
            records, markers = self._records("read_uncommitted", stable_end, end)
            for offset, value in records:
                entry = Entry.decode(value)
                if self._is_committed(offset, entry, markers):
                    found = entry
        return found

    def _is_committed(self, offset: int, entry: Entry, markers: list[ControlMarker]) -> bool:
        for marker in markers:
            if marker.producer_id == entry.producer_id and marker.offset > offset:
                return marker.kind == "commit"
        raise CommitUnknown(
            f"The ledger topic {self.topic!r} has a record of {self.key.decode()!r} at offset {offset} whose "
            "transaction has no end in the log: whether it counts cannot be told. Nothing was written; start again, "
            "and look for a hanging transaction if it stays so."
        )

    def _records(
        self, isolation: Any, start: int | Any, end: int
    ) -> tuple[list[tuple[int, bytes]], list[ControlMarker]]:
        records: list[tuple[int, bytes]] = []
        markers: list[ControlMarker] = []
        config = FetchConfig(isolation=isolation, wait_ms_max=100)
        named = TopicPartition(self.topic, self.partition)
        with Fetcher(self._cluster, config, include_markers=True) as fetcher:
            fetcher.assign({named: start})
            patience = self._cluster.patience()
            while fetcher.positions[named] < end:
                fetched = fetcher.fetch(_READ_TIMEOUT_MS)
                for part in fetched:
                    markers += part.markers
                    records += _of_key(part.table, self.key)
                if not fetched and patience.is_spent:
                    raise RequestTimedOut(
                        f"The ledger topic {self.topic!r} could not be read to its end ({end}) in time; nothing was "
                        "written. Start again when the broker answers."
                    )
        return records, markers

    def record(self, entry: Entry, identity: ProducerIdentity) -> bytes:
        """The value to write inside a transaction of this producer."""
        signed = replace(entry, producer_id=identity.producer_id, producer_epoch=identity.producer_epoch)
        return signed.encode()


def _of_key(table: pa.Table, key: bytes) -> list[tuple[int, bytes]]:
    mine = table.filter(pc.call_function("equal", [table.column("key"), pa.scalar(key, pa.binary())]))
    offsets, values = mine.column("offset").to_pylist(), mine.column("value").to_pylist()
    return [(offset, value) for offset, value in zip(offsets, values, strict=True) if value is not None]

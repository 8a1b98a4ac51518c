"""The ledger: a compacted topic that says which micro-batch or job of a pipeline was committed last.

Its record is written inside the transaction that it speaks of, so it is there exactly if the transaction is. Group
offsets could not serve: they expire after a week of silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import pyarrow as pa

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.config import FetchConfig
from semel.client.fetcher import Fetcher
from semel.client.offsets import edge_offsets
from semel.client.ownership import ProducerIdentity
from semel.client.partitions import TopicPartition
from semel.errors import CommitUnknown, ConfigError, KafkaError, NotAuthorized, RequestTimedOut
from semel.records import ControlMarker, partitions_for_keys
from semel.spark.input_offsets import InputEnd
from semel.spark.progress import log_event
from semel.wire import ErrorCode

PARTITIONS: Final = 16
"""Where a record lies follows from its key and this number, however many partitions the topic has."""

_NEEDED: Final[Mapping[str, str]] = {"cleanup.policy": "compact"}
_WANTED: Final[Mapping[str, str]] = {
    # A driver reads its partition from the beginning when it starts, so it is kept short.
    "segment.ms": "3600000",
    "segment.bytes": "16777216",
    "min.cleanable.dirty.ratio": "0.1",
}
_READ_TIMEOUT_MS: Final = 1_000


def query_key(query: str) -> str:
    """The key of a query's own record. No pipeline has it: their names hold no `/`, and a job's is `name/job_id`."""
    return f"/query/{query}"


@dataclass(frozen=True, slots=True)
class Entry:
    """What was committed. For a stream `batch` and `offsets` say what, for a job its key does."""

    query: str = ""
    """The id in the query's checkpoint: with another checkpoint the numbers of batches begin again at 0."""
    batch: int = -1
    offsets: str = ""
    """A digest of the input that the batch consists of."""
    outputs: list[str] | None = None
    """The outputs that were written. None is from a release that wrote one output and did not name it."""
    ends: list[InputEnd] = field(default_factory=list[InputEnd])
    """Where the batch's input from Kafka ends, so that a new checkpoint can begin there."""
    pipeline: str = ""
    table: str = ""
    """Of a sink into a database, its own table; outputs may go to others too."""
    records: int = 0
    at_ms: int = 0
    producer_id: int = -1
    producer_epoch: int = -1

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, value: bytes) -> Entry:
        """Fields that a later release may have added are ignored.

        >>> Entry.decode(Entry(query="q", batch=3).encode()).batch
        3
        """
        known = json.loads(value)
        fields = {name: known[name] for name in cls.__dataclass_fields__ if name in known}
        return cls(**{**fields, "ends": [InputEnd(**end) for end in fields.get("ends", [])]})


class Ledger:
    """The ledger's topic."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster = cluster
        self.topic = topic

    def place(self, key: str) -> TopicPartition:
        """The partition that holds the record of `key`."""
        return TopicPartition(self.topic, int(partitions_for_keys(pa.array([key.encode()]), PARTITIONS)[0]))

    def ensure(self) -> None:
        """Create the topic if it is not there, and refuse one that would forget."""
        admin = Admin(self._cluster)
        if not self.exists():
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
            return  # a cluster that forbids to look at settings has somebody who sets them
        if policy != "compact":
            raise ConfigError(
                f"The ledger topic {self.topic!r} has cleanup.policy={policy} and would forget what was committed; "
                "nothing was written. Set it to compact, or name another topic by ledger=."
            )

    def exists(self) -> bool:
        return self.topic in self._cluster.list_topics()

    def _create(self, admin: Admin) -> None:
        try:
            admin.create_topics(self.topic, partitions=PARTITIONS, config=_NEEDED)
        except KafkaError as error:
            if error.code != ErrorCode.topic_already_exists:  # another pipeline was faster
                raise
        for name, value in _WANTED.items():
            # Managed clusters refuse some of these. Without them the topic only takes longer to read.
            try:
                admin.alter_configs("topic", self.topic, {name: value})
            except KafkaError as error:
                log_event("ledger setting refused", topic=self.topic, setting=f"{name}={value}", error=str(error))

    def read(self, key: str, *, is_owner: bool = True) -> Entry | None:
        """What was committed last under `key`, or None.

        Up to the last stable offset a reader of committed records sees what counts. Beyond it, where another pipeline's
        open transaction may hold that back, the markers of the producer that wrote the record decide. A record whose
        transaction is open does not count, but its owner, which has none open, must not go on before that is certain.
        """
        place = self.place(key)
        [stable_end] = edge_offsets(self._cluster, [place], "latest", "read_committed").values()
        [end] = edge_offsets(self._cluster, [place], "latest", "read_uncommitted").values()
        records, _ = self._records(place, "read_committed", "earliest", stable_end)
        value = records[key][-1][1] if key in records else b""
        found = Entry.decode(value) if value else None
        if end > stable_end:
            records, markers = self._records(place, "read_uncommitted", stable_end, end)
            for offset, value in records.get(key, []):
                entry = Entry.decode(value)
                outcome = _outcome(offset, entry, markers)
                if outcome is None and is_owner:
                    raise CommitUnknown(
                        f"The ledger topic {self.topic!r} has a record of {key!r} at offset {offset} whose transaction "
                        "has no end in the log: whether it counts cannot be told yet. Nothing was written. Start again "
                        "after transaction.timeout.ms, and look for a hanging transaction if it stays so."
                    )
                if outcome == "commit":
                    found = entry
        return found

    def jobs_before(self, key: str, pipeline: str, at_ms: int) -> list[str]:
        """The keys of a pipeline's jobs that were committed before `at_ms`, of those beside the record of `key`."""
        place = self.place(key)
        [stable_end] = edge_offsets(self._cluster, [place], "latest", "read_committed").values()
        records, _ = self._records(place, "read_committed", "earliest", stable_end)
        newest = {name: found[-1][1] for name, found in records.items() if name.startswith(f"{pipeline}/")}
        return [name for name, value in newest.items() if value and 0 < Entry.decode(value).at_ms < at_ms]

    def _records(
        self, place: TopicPartition, isolation: Any, start: int | Any, end: int
    ) -> tuple[dict[str, list[tuple[int, bytes]]], list[ControlMarker]]:
        """By key, offsets and values in their order; an empty value stands for a deleted record."""
        records: dict[str, list[tuple[int, bytes]]] = {}
        markers: list[ControlMarker] = []
        config = FetchConfig(isolation=isolation, wait_ms_max=100)
        with Fetcher(self._cluster, config, include_markers=True) as fetcher:
            fetcher.assign({place: start})
            patience = self._cluster.patience()
            while fetcher.positions[place] < end:
                fetched = fetcher.fetch(_READ_TIMEOUT_MS)
                for part in fetched:
                    markers += part.markers
                    columns = [part.table.column(name).to_pylist() for name in ("key", "offset", "value")]
                    for key, offset, value in zip(*columns, strict=True):
                        records.setdefault((key or b"").decode(errors="replace"), []).append((offset, value or b""))
                if not fetched and patience.is_spent:
                    raise RequestTimedOut(
                        f"The ledger topic {self.topic!r} could not be read to its end ({end}) in time; nothing was "
                        "written. Start again when the broker answers."
                    )
        return records, markers


def _outcome(offset: int, entry: Entry, markers: list[ControlMarker]) -> str | None:
    """How the transaction of a record ended; None if it is open."""
    later = (marker for marker in markers if marker.producer_id == entry.producer_id and marker.offset > offset)
    marker = next(later, None)
    return None if marker is None else marker.kind


def sign(entry: Entry, identity: ProducerIdentity) -> Entry:
    """The entry as it is written inside a transaction of this producer."""
    return replace(entry, producer_id=identity.producer_id, producer_epoch=identity.producer_epoch)

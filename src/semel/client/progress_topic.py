"""A compacted topic that says what was committed last under a key. The Spark ledger and the relays use it.

A record is written inside the transaction that it speaks of, so it is there exactly if the transaction is. Group
offsets could not serve: they expire after a week of silence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import pyarrow as pa

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.config import FetchConfig
from semel.client.fetcher import Fetcher
from semel.client.offsets import edge_offsets
from semel.client.partitions import TopicPartition
from semel.errors import CommitUnknown, ConfigError, KafkaError, NotAuthorized, RequestTimedOut
from semel.records import ControlMarker, partitions_for_keys
from semel.wire import ErrorCode

PARTITIONS: Final = 16
"""Where a record lies follows from its key and this number, however many partitions the topic has."""

_NEEDED: Final[Mapping[str, str]] = {"cleanup.policy": "compact"}
_WANTED: Final[Mapping[str, str]] = {
    # A reader reads its partition from the beginning when it starts, so it is kept short.
    "segment.ms": "3600000",
    "segment.bytes": "16777216",
    "min.cleanable.dirty.ratio": "0.1",
}
_READ_TIMEOUT_MS: Final = 1_000
_LOG: Final = logging.getLogger("semel.client")


class ProgressTopic:
    """`kind` and `option` are for messages: "ledger topic", and the option by which a user names another one."""

    def __init__(self, cluster: Cluster, topic: str, *, kind: str, option: str) -> None:
        self._cluster = cluster
        self.topic = topic
        self._kind = kind
        self._option = option

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
                f"The {self._kind} {self.topic!r} has {count} partitions and needs {PARTITIONS}; nothing was written. "
                f"Name another one by {self._option}, or delete it if no pipeline uses it."
            )
        try:
            policy = admin.describe_configs("topic", self.topic, ["cleanup.policy"])["cleanup.policy"].value
        except NotAuthorized:
            return  # a cluster that forbids to look at settings has somebody who sets them
        if policy != "compact":
            raise ConfigError(
                f"The {self._kind} {self.topic!r} has cleanup.policy={policy} and would forget what was committed; "
                f"nothing was written. Set it to compact, or name another topic by {self._option}."
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
                self._note_refused(f"{name}={value}", error)

    def _note_refused(self, setting: str, error: KafkaError) -> None:
        _LOG.info("The cluster refused %s for the %s %r: %s", setting, self._kind, self.topic, error)

    def read_value(self, key: str, producer_of: Callable[[bytes], int], *, is_owner: bool = True) -> bytes | None:
        """What was committed last under `key`, or None. `producer_of` finds the producer id that a value names.

        Up to the last stable offset a reader of committed records sees what counts. Beyond it, where another pipeline's
        open transaction may hold that back, the markers of the producer that wrote the record decide. A record whose
        transaction is open does not count, but its owner, which has none open, must not go on before that is certain.
        """
        place = self.place(key)
        [stable_end] = edge_offsets(self._cluster, [place], "latest", "read_committed").values()
        [end] = edge_offsets(self._cluster, [place], "latest", "read_uncommitted").values()
        records, _ = self.records(place, "read_committed", "earliest", stable_end)
        found = records[key][-1][1] if key in records else b""
        if end > stable_end:
            records, markers = self.records(place, "read_uncommitted", stable_end, end)
            for offset, value in records.get(key, []):
                outcome = _outcome(offset, producer_of(value), markers)
                if outcome is None and is_owner:
                    raise CommitUnknown(
                        f"The {self._kind} {self.topic!r} has a record of {key!r} at offset {offset} whose transaction "
                        "has no end in the log: whether it counts cannot be told yet. Nothing was written. Start again "
                        "after transaction.timeout.ms, and look for a hanging transaction if it stays so."
                    )
                if outcome == "commit":
                    found = value
        return found or None

    def committed(self, place: TopicPartition) -> dict[str, list[tuple[int, bytes]]]:
        """The records of a partition up to its last stable offset, by key."""
        [stable_end] = edge_offsets(self._cluster, [place], "latest", "read_committed").values()
        return self.records(place, "read_committed", "earliest", stable_end)[0]

    def records(
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
                        f"The {self._kind} {self.topic!r} could not be read to its end ({end}) in time; nothing was "
                        "written. Start again when the broker answers."
                    )
        return records, markers


def _outcome(offset: int, producer_id: int, markers: list[ControlMarker]) -> str | None:
    """How the transaction of a record ended; None if it is open."""
    later = (marker for marker in markers if marker.producer_id == producer_id and marker.offset > offset)
    marker = next(later, None)
    return None if marker is None else marker.kind

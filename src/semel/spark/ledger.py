"""The ledger: a compacted topic that says which micro-batch or job of a pipeline was committed last.

How it is kept and read is in `client/progress_topic.py`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace

from semel.client.cluster import Cluster
from semel.client.ownership import ProducerIdentity
from semel.client.progress_topic import ProgressTopic
from semel.errors import KafkaError
from semel.spark.input_offsets import InputEnd
from semel.spark.progress import log_event


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


class Ledger(ProgressTopic):
    """The ledger's topic."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        super().__init__(cluster, topic, kind="ledger topic", option="ledger=")

    def read(self, key: str, *, is_owner: bool = True) -> Entry | None:
        """What was committed last under `key`, or None."""
        value = self.read_value(key, lambda value: Entry.decode(value).producer_id, is_owner=is_owner)
        return None if value is None else Entry.decode(value)

    def _note_refused(self, setting: str, error: KafkaError) -> None:
        log_event("ledger setting refused", topic=self.topic, setting=setting, error=str(error))

    def jobs_before(self, key: str, pipeline: str, at_ms: int) -> list[str]:
        """The keys of a pipeline's jobs that were committed before `at_ms`, of those beside the record of `key`."""
        records = self.committed(self.place(key))
        newest = {name: found[-1][1] for name, found in records.items() if name.startswith(f"{pipeline}/")}
        return [name for name, value in newest.items() if value and 0 < Entry.decode(value).at_ms < at_ms]


def sign(entry: Entry, identity: ProducerIdentity) -> Entry:
    """The entry as it is written inside a transaction of this producer."""
    return replace(entry, producer_id=identity.producer_id, producer_epoch=identity.producer_epoch)

"""Ways to copy records from one topic to another exactly once: Semel's session, and confluent-kafka in several tunings.

The job is the same for all: read, put the value into upper case, write, and commit the positions in one transaction of
about 50,000 records.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Consumer, Message
from confluent_kafka import Producer as ConfluentProducer

from semel.bench.client import LARGE_BATCHES, QUICK_FETCHES, new_topic, settings_line
from semel.client.producer import Outcome, Producer
from semel.session.session import Session

TRANSACTION_RECORDS: Final = 50_000

Shape = Literal["equal", "ragged"]
SHAPES: Final[Mapping[Shape, str]] = {
    "equal": "8 B keys, 100 B values",
    "ragged": "keys of 4 to 20 B, values of 20 to 400 B",
}


@dataclass(frozen=True, slots=True)
class Tuning:
    """How confluent-kafka is set and used. `portion` is how many messages one call of `consume` asks for."""

    name: str
    portion: int = 10_000
    is_batched: bool = False
    """Write with `produce_batch`, one call for a portion, instead of one `produce` for each record."""
    reading: Mapping[str, int] = field(default_factory=dict[str, int])
    writing: Mapping[str, int] = field(default_factory=dict[str, int])

    def settings(self) -> str:
        """One line for people."""
        call = "produce_batch" if self.is_batched else "produce"
        return f"consume({self.portion}), {call}, {settings_line({**self.reading, **self.writing})}"


DEFAULTS: Final = Tuning("defaults", portion=10_000)
_DEEP_QUEUE: Final = {
    "fetch.message.max.bytes": 8_388_608,
    "queued.max.messages.kbytes": 1_000_000,
    "queued.min.messages": 1_000_000,
}
_ROOM: Final = {"queue.buffering.max.messages": 1_000_000}
_MIDDLING_BATCHES: Final = {"linger.ms": 20, "batch.size": 262_144, "batch.num.messages": 100_000} | _ROOM
TUNINGS: Final = (
    Tuning("quick fetches", 5_000, reading=QUICK_FETCHES, writing=_MIDDLING_BATCHES),
    Tuning("quick fetches, large batches", 5_000, reading=QUICK_FETCHES, writing=LARGE_BATCHES),
    Tuning("quick fetches, produce_batch", 5_000, True, QUICK_FETCHES, _MIDDLING_BATCHES),
    Tuning("deep queue", 10_000, reading=_DEEP_QUEUE, writing=LARGE_BATCHES),
)


def fill(bootstrap: str, topic: str, records: int, shape: Shape) -> None:
    """Write the input. Ragged records are the same in every run."""
    rng = random.Random(16)
    with Producer(bootstrap_servers=bootstrap) as producer:
        for first in range(0, records, TRANSACTION_RECORDS):
            numbers = range(first, min(first + TRANSACTION_RECORDS, records))
            if shape == "equal":
                keys, values = [b"%08d" % n for n in numbers], [b"%0100x" % (n * 2_654_435_761) for n in numbers]
            else:
                keys = [b"%0*d" % (rng.randint(4, 20), n) for n in numbers]
                values = [b"%0*x" % (rng.randint(20, 400), n * 2_654_435_761) for n in numbers]
            producer.send_table(topic, pa.table({"key": keys, "value": values}))
        producer.flush()


def copy_by_session(bootstrap: str, source: str, records: int) -> tuple[float, str]:
    """The seconds that it took, and the topic that it wrote."""
    target, name = new_topic(bootstrap, "session-out"), f"bench-{time.time_ns()}"
    with Session(
        bootstrap=bootstrap, group=name, topics=[source], name=name, transaction_records_max=TRANSACTION_RECORDS
    ) as session:
        done, started = 0, 0.0
        while done < records:
            with session.transaction() as transaction:
                if transaction.is_empty:
                    continue
                started = started or time.perf_counter()
                transaction.send_table(target, _upper(transaction.table))
            if transaction.outcome is Outcome.COMMITTED:
                done += transaction.table.num_rows
        return time.perf_counter() - started, target


def copy_by_confluent(bootstrap: str, source: str, records: int, tuning: Tuning) -> tuple[float, str]:
    """The same by confluent-kafka."""
    target, name = new_topic(bootstrap, "confluent-out"), f"bench-{time.time_ns()}"
    reading: dict[str, Any] = {
        "bootstrap.servers": bootstrap,
        "group.id": name,
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        **tuning.reading,
    }
    consumer = Consumer(reading)
    producer = ConfluentProducer({"bootstrap.servers": bootstrap, "transactional.id": name, **tuning.writing})
    producer.init_transactions()
    consumer.subscribe([source])
    try:
        done, started = 0, 0.0
        while done < records:
            messages = consumer.consume(min(tuning.portion, records - done), timeout=1)
            if not messages:
                continue
            started = started or time.perf_counter()
            producer.begin_transaction()
            count = 0
            while messages:
                _write(producer, target, messages, tuning)
                count += len(messages)
                wanted = min(TRANSACTION_RECORDS, records - done) - count
                messages = consumer.consume(min(wanted, tuning.portion), timeout=1) if wanted > 0 else []
            position = consumer.position(consumer.assignment())
            producer.send_offsets_to_transaction(position, consumer.consumer_group_metadata())
            producer.commit_transaction()
            done += count
        return time.perf_counter() - started, target
    finally:
        consumer.close()


def _write(producer: ConfluentProducer, target: str, messages: list[Message], tuning: Tuning) -> None:
    if tuning.is_batched:
        batch = [{"value": cast(bytes, one.value()).upper(), "key": one.key()} for one in messages]
        queued = cast(Any, producer).produce_batch(target, batch)
        if queued != len(batch):
            raise BufferError(f"confluent-kafka took {queued:,} of {len(batch):,} records")
        return
    produce = producer.produce
    for one in messages:
        produce(target, cast(bytes, one.value()).upper(), one.key())


def _upper(table: pa.Table) -> pa.Table:
    values = pc.call_function("ascii_upper", [table.column("value").cast(pa.string())])
    return pa.table({"key": table.column("key"), "value": values.cast(pa.binary())})

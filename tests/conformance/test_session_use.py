"""Sessions in ordinary use, on every broker: topics that change under them, slow work, and records that fail."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions
from confluent_kafka.cimpl import NewTopic as TopicToCreate
from observer import values_of
from targets import KafkaUnderTest, NewTopic

from semel.client.membership import Membership
from semel.session.runner import run
from semel.session.session import Session
from semel.session.transaction import Row

WAIT_S = 60.0


class Scene:
    def __init__(self, kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
        self.bootstrap = kafka.bootstrap
        self.source, self.target, self.dead = new_topic(1), new_topic(1), new_topic(1)
        self.group = f"{self.source}-group"
        self.admin = AdminClient({"bootstrap.servers": self.bootstrap})

    @property
    def options(self) -> dict[str, Any]:
        return {
            "bootstrap": self.bootstrap,
            "group": self.group,
            "topics": [self.source],
            "name": self.group,
            "fetch_max_wait_ms": 50,
        }

    def session(self, **more: Any) -> Session:
        return Session(**self.options, **more)

    def write(self, numbers: range, partition: int = 0) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap})
        # A broker may not have heard of a partition that the controller has just added: librdkafka drops its records.
        wait_until(
            lambda: partition in producer.list_topics(self.source, timeout=30).topics[self.source].partitions,
            f"partition {partition}",
        )
        failed: list[str] = []
        for number in numbers:
            producer.produce(
                self.source,
                str(number),
                partition=partition,
                on_delivery=lambda error, _: failed.append(str(error)) if error is not None else None,
            )
        assert producer.flush(30) == 0
        assert not failed

    def recreate(self) -> None:
        for future in self.admin.delete_topics([self.source]).values():
            future.result()

        def is_made() -> bool:
            try:
                for future in self.admin.create_topics([TopicToCreate(self.source, 1, 1)]).values():
                    future.result()
            except Exception:
                return False  # the old one is not quite gone
            return True

        wait_until(is_made, "the new topic")

    def copied(self) -> Counter[int]:
        return Counter(int(value) for value in values_of(self.bootstrap, self.target))


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"not after {WAIT_S:g} s: {what}"


def copy_until(session: Session, scene: Scene, expected: Counter[int]) -> None:
    def turn() -> bool:
        with session.transaction(200) as transaction:
            if not transaction.is_empty:
                transaction.send_table(scene.target, transaction.table)
        return session.committed_count > 0 and transaction.is_empty and scene.copied() == expected

    wait_until(turn, f"{sum(expected.values())} records")


@pytest.mark.needs("has_topic_ids")  # without them the new topic cannot be told from the old one
@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_a_topic_that_is_created_again_under_a_session_is_read_from_its_beginning(
    kafka: KafkaUnderTest, new_topic: NewTopic, reset: str
) -> None:
    """With more records than the old one had, it would have gone on in the middle."""
    scene = Scene(kafka, new_topic)
    scene.write(range(10))
    with scene.session() as session:
        copy_until(session, scene, Counter(range(10)))
    with scene.session(auto_offset_reset=reset) as session:
        scene.write(range(10, 20))
        copy_until(session, scene, Counter(range(20)))
        scene.recreate()
        scene.write(range(100, 150))
        copy_until(session, scene, Counter([*range(20), *range(100, 150)]))


def test_a_partition_that_is_added_is_read_from_its_beginning(
    kafka: KafkaUnderTest, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the group began at the end: what was written before it noticed the partition was lost."""
    monkeypatch.setitem(Membership.__init__.__kwdefaults__ or {}, "look_at_topics_s", 1.0)
    scene = Scene(kafka, new_topic)
    scene.write(range(10))
    with scene.session(auto_offset_reset="latest") as session:
        copy_until(session, scene, Counter())
        for future in scene.admin.create_partitions([NewPartitions(scene.source, 2)]).values():
            future.result()
        scene.write(range(10, 20), partition=1)
        copy_until(session, scene, Counter(range(10, 20)))


def test_work_that_takes_too_long_gets_smaller_portions(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """D9: brokers differ in when they abort a transaction that is too old, and in what they answer then."""
    scene = Scene(kafka, new_topic)
    scene.write(range(40))
    with scene.session(transaction_timeout_ms=3_000) as session:
        done = 0
        while done < 40:
            with session.transaction(10_000) as transaction:
                for index in range(transaction.table.num_rows):
                    transaction.send_table(scene.target, transaction.table.slice(index, 1))
                    time.sleep(0.4)
            done = session.committed_count and sum(scene.copied().values())
            assert session.aborted_count < 4, "a livelock"
        assert session.committed_count > 1
    assert scene.copied() == Counter(range(40))


@pytest.mark.parametrize("by", ["row", "table"])
def test_a_record_that_cannot_be_written_becomes_one_dead_letter(
    kafka: KafkaUnderTest, new_topic: NewTopic, by: Any
) -> None:
    """D8: a function that fails, and a record that is too large for the broker."""
    scene = Scene(kafka, new_topic)
    scene.write(range(12))

    def work(row: Row) -> bytes:
        number = int(row.value or b"")
        if number == 3:
            raise ValueError(number)
        return b"x" * 2_000_000 if number == 7 else str(number).encode()

    def work_on_table(table: Any) -> Any:
        values = [work(Row("", 0, 0, 0, None, value)) for value in table["value"].to_pylist()]
        place = table.schema.get_field_index("value")
        return table.set_column(place, table.schema.field("value"), [values])

    # The client would let it pass: the broker refuses it.
    report = run(
        work if by == "row" else work_on_table,
        by=by,
        to=scene.target,
        dead_letter=scene.dead,
        idle_ms=1_000,
        max_request_size=4_000_000,
        **scene.options,
    )
    assert (report.records, report.dead_letters) == (12, 2)
    assert values_of(scene.bootstrap, scene.dead) == [b"3", b"7"]
    assert scene.copied() == Counter(number for number in range(12) if number not in (3, 7))

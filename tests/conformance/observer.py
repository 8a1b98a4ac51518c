"""What a topic and a group hold, as another client sees them: the judge of every claim made by Semel's own client."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import cast

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

_POLL_S = 0.5


def records_of(bootstrap: str, topic: str, partitions: int, *, committed: bool = True) -> dict[int, list[bytes]]:
    """Every value in every partition, in order, up to the end of what this isolation level may see."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"observer-of-{topic}",
            "isolation.level": "read_committed" if committed else "read_uncommitted",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
        found: dict[int, list[bytes]] = {partition: [] for partition in range(partitions)}
        at_end: set[int] = set()
        deadline = time.monotonic() + 60
        while len(at_end) < partitions:
            assert time.monotonic() < deadline, f"{topic} did not come to an end: {at_end} of {partitions}"
            message = consumer.poll(_POLL_S)
            if message is None:
                continue
            partition = cast(int, message.partition())
            if (error := message.error()) is None:
                found[partition].append(cast(bytes, message.value()))
            elif error.code() == KafkaError._PARTITION_EOF:  # any other is not the end: it passes, or the deadline does
                at_end.add(partition)
        return found
    finally:
        consumer.close()


def values_of(bootstrap: str, topic: str, partitions: int = 1, *, committed: bool = True) -> list[bytes]:
    """The values of all partitions, sorted."""
    return sorted(
        value for values in records_of(bootstrap, topic, partitions, committed=committed).values() for value in values
    )


def committed_offsets(bootstrap: str, group: str, partitions: Mapping[str, int]) -> dict[tuple[str, int], int]:
    """The group's committed offsets for `{topic: partition count}`, those that are set; waits for pending ones."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "isolation.level": "read_committed"})
    asked = [TopicPartition(topic, index) for topic, count in partitions.items() for index in range(count)]
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                answers = consumer.committed(asked, timeout=10)
                if failed := next((answer for answer in answers if answer.error), None):
                    raise KafkaException(failed.error)
                break
            except KafkaException:
                if time.monotonic() > deadline:
                    raise
        return {(answer.topic, answer.partition): answer.offset for answer in answers if answer.offset >= 0}
    finally:
        consumer.close()


def wait_until_settled(bootstrap: str, topic: str, partitions: int) -> None:
    """Wait until no transaction is open: the last stable offset has reached the end."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "observer", "isolation.level": "read_uncommitted"})
    committed = Consumer({"bootstrap.servers": bootstrap, "group.id": "observer", "isolation.level": "read_committed"})
    try:
        deadline = time.monotonic() + 60
        for partition in range(partitions):
            where = TopicPartition(topic, partition)
            while (end := _end(consumer, where)) is None or end != _end(committed, where):
                assert time.monotonic() < deadline, f"{topic}-{partition}: a transaction stayed open"
                time.sleep(0.01)
    finally:
        consumer.close()
        committed.close()


def _end(consumer: Consumer, where: TopicPartition) -> int | None:
    """The end of a partition, or None while it cannot be told: its leader may be on the move, or a broker busy."""
    try:
        return consumer.get_watermark_offsets(where, timeout=10)[1]
    except KafkaException as error:
        print(f"the observer asks again for the end of {where.topic}-{where.partition}: {error}")
        return None

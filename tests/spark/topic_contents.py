"""What topics and groups hold after a run of the sink, as librdkafka sees it."""

from __future__ import annotations

import time
from typing import NamedTuple, cast

from confluent_kafka import Consumer, KafkaError, TopicPartition


class Seen(NamedTuple):
    """One record."""

    partition: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


def contents(bootstrap: str, topic: str, *, committed: bool = True) -> list[Seen]:
    """Every record of a topic, partition by partition, up to the end of what this isolation level may see."""
    isolation = "read_committed" if committed else "read_uncommitted"
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"judge-of-{topic}",
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    try:
        partitions = sorted(consumer.list_topics(topic, 30).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        found: list[Seen] = []
        ended: set[int] = set()
        deadline = time.monotonic() + 60
        while len(ended) < len(partitions):
            assert time.monotonic() < deadline, f"{topic} did not come to an end"
            message = consumer.poll(0.5)
            if message is None:
                continue
            partition = cast(int, message.partition())
            if (error := message.error()) is not None:
                if error.code() == KafkaError._PARTITION_EOF:  # any other passes, or the deadline does
                    ended.add(partition)
            else:
                headers = tuple(cast("list[tuple[str, bytes | None]]", message.headers() or []))
                found.append(Seen(partition, message.key(), message.value(), headers))
        return sorted(found, key=lambda seen: seen.partition)
    finally:
        consumer.close()


def values(bootstrap: str, topic: str, *, committed: bool = True) -> list[bytes]:
    return sorted(seen.value or b"" for seen in contents(bootstrap, topic, committed=committed))


def group_offsets(bootstrap: str, group: str, topic: str, partitions: int) -> dict[int, int]:
    """The committed offsets of a group, those that are set."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    try:
        asked = [TopicPartition(topic, partition) for partition in range(partitions)]
        return {item.partition: item.offset for item in consumer.committed(asked, timeout=30) if item.offset >= 0}
    finally:
        consumer.close()

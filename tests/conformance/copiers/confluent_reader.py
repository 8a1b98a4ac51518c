"""Reads a topic as a member of a group with confluent-kafka and commits what it has read; see `member.py`."""

from __future__ import annotations

import time
from typing import Any, cast

from confluent_kafka import Consumer, KafkaException, TopicPartition
from member import POLL_S, Member, Settings

TIMEOUT_S = 30.0


def consumer_config(settings: Settings) -> dict[str, Any]:
    config: dict[str, Any] = {
        "bootstrap.servers": settings.bootstrap,
        "group.id": settings.group,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "allow.auto.create.topics": True,
        "topic.metadata.refresh.interval.ms": 500,
        "group.protocol": "classic",
    }
    if settings.instance_id:
        config["group.instance.id"] = settings.instance_id
    if settings.protocol == "consumer":
        return {**config, "group.protocol": "consumer"}
    strategy = {"eager": "range", "cooperative": "cooperative-sticky"}[settings.protocol]
    times = {"session.timeout.ms": settings.session_timeout_ms, "heartbeat.interval.ms": 500}
    return {**config, **times, "partition.assignment.strategy": strategy}


def read(consumer: Consumer, member: Member) -> None:
    values: list[str] = []
    ends: dict[int, TopicPartition] = {}
    deadline = time.monotonic() + POLL_S
    while (left := deadline - time.monotonic()) > 0:
        message = consumer.poll(left)
        if message is not None and message.error() is None:
            values.append(cast(bytes, message.value()).decode())
            topic, partition, offset = message.topic(), cast(int, message.partition()), cast(int, message.offset())
            ends[partition] = TopicPartition(cast(str, topic), partition, offset + 1)
    if not values:
        return
    try:
        # By name, because the client would leave out what it has committed before, as after a step back.
        consumer.commit(offsets=list(ends.values()), asynchronous=False)
        member.report("read", *values)
    except KafkaException as failure:  # refused in a rebalance: whoever owns the partitions next reads them again
        member.report("failed", failure)


def seek(consumer: Consumer, member: Member, timestamp_ms: int) -> None:
    asked = [TopicPartition(one.topic, one.partition, timestamp_ms) for one in consumer.assignment()]
    found = sorted(consumer.offsets_for_times(asked, TIMEOUT_S), key=lambda one: one.partition)
    for one in found:
        consumer.seek(one)
    member.report("sought", *(f"{one.partition}:{one.offset}" for one in found))


def main() -> None:
    settings = Settings.from_arguments()
    member = Member(settings)
    member.wait_join()
    consumer = Consumer(consumer_config(settings))

    def reported(event: str) -> Any:
        return lambda _, partitions: member.report(event, *sorted(one.partition for one in partitions))

    revoked = reported("revoked")
    consumer.subscribe([settings.source], on_assign=reported("assigned"), on_revoke=revoked, on_lost=revoked)
    try:
        while not member.is_leaving:
            read(consumer, member)
            if (timestamp_ms := member.time_to_seek()) is not None:
                seek(consumer, member, timestamp_ms)
    finally:
        consumer.close()


if __name__ == "__main__":
    main()

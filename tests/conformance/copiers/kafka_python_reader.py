"""Reads a topic as a member of a group with kafka-python and commits what it has read; see `member.py`."""

from __future__ import annotations

from typing import Any

import kafka.errors
from kafka import ConsumerRebalanceListener, KafkaConsumer
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.coordinator.assignors.range import RangePartitionAssignor
from member import Member, Settings

# This client loses its assignment when the time of a poll runs out between the answer to its SyncGroup and the next
# step: long enough for a rebalance to fit in.
POLL_MS = 2_000
ASSIGNORS = {"eager": RangePartitionAssignor, "cooperative": CooperativeStickyAssignor}


class Listener(ConsumerRebalanceListener):
    def __init__(self, member: Member) -> None:
        self._member = member

    def on_partitions_assigned(self, assigned: Any) -> None:
        self._member.report("assigned", *sorted(one.partition for one in assigned))

    def on_partitions_revoked(self, revoked: Any) -> None:
        self._member.report("revoked", *sorted(one.partition for one in revoked))


def read(consumer: KafkaConsumer, member: Member) -> None:
    records = consumer.poll(POLL_MS)
    if not records:
        return
    try:
        consumer.commit()
        member.report("read", *(record.value.decode() for batch in records.values() for record in batch))
    except kafka.errors.KafkaError as failure:  # refused in a rebalance: the next owner reads them again
        member.report("failed", repr(failure))


def seek(consumer: Any, member: Member, timestamp_ms: int) -> None:
    found = consumer.offsets_for_times(dict.fromkeys(consumer.assignment(), timestamp_ms))
    for where, at in found.items():
        consumer.seek(where, at.offset)
    member.report("sought", *(f"{where.partition}:{at.offset}" for where, at in sorted(found.items())))


def main() -> None:
    settings = Settings.from_arguments()
    member = Member(settings)
    member.wait_join()
    consumer = KafkaConsumer(
        bootstrap_servers=settings.bootstrap,
        group_id=settings.group,
        group_instance_id=settings.instance_id or None,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        session_timeout_ms=settings.session_timeout_ms,
        heartbeat_interval_ms=500,
        metadata_max_age_ms=500,
        partition_assignment_strategy=(ASSIGNORS[settings.protocol],),
    )
    consumer.subscribe([settings.source], listener=Listener(member))
    try:
        while not member.is_leaving:
            read(consumer, member)
            if (timestamp_ms := member.time_to_seek()) is not None:
                seek(consumer, member, timestamp_ms)
    finally:
        consumer.close(autocommit=False)


if __name__ == "__main__":
    main()

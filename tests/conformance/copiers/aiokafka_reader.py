"""Reads a topic as a member of a group with aiokafka and commits what it has read; see `member.py`."""

from __future__ import annotations

import asyncio
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import KafkaError
from member import POLL_S, Member, Settings

RebalanceListener: Any = ConsumerRebalanceListener  # its callbacks may be coroutines, which its types do not say


class Listener(RebalanceListener):
    def __init__(self, member: Member) -> None:
        self._member = member

    async def on_partitions_assigned(self, assigned: Any) -> None:
        self._member.report("assigned", *sorted(one.partition for one in assigned))

    async def on_partitions_revoked(self, revoked: Any) -> None:
        self._member.report("revoked", *sorted(one.partition for one in revoked))


async def read(consumer: AIOKafkaConsumer, member: Member) -> None:
    records = await consumer.getmany(timeout_ms=int(POLL_S * 1000))
    if not records:
        return
    try:
        await consumer.commit({where: batch[-1].offset + 1 for where, batch in records.items()})
        member.report("read", *((record.value or b"").decode() for batch in records.values() for record in batch))
    except KafkaError as failure:  # refused in a rebalance: whoever owns the partitions next reads them again
        member.report("failed", repr(failure))


async def seek(consumer: AIOKafkaConsumer, member: Member, timestamp_ms: int) -> None:
    found = await consumer.offsets_for_times(dict.fromkeys(consumer.assignment(), timestamp_ms))
    for where, at in found.items():
        consumer.seek(where, at.offset)
    member.report("sought", *(f"{where.partition}:{at.offset}" for where, at in sorted(found.items())))


async def main() -> None:
    settings = Settings.from_arguments()
    member = Member(settings)
    await asyncio.to_thread(member.wait_join)
    consumer = AIOKafkaConsumer(
        bootstrap_servers=settings.bootstrap,
        group_id=settings.group,
        group_instance_id=settings.instance_id or None,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        session_timeout_ms=settings.session_timeout_ms,
        heartbeat_interval_ms=500,
        metadata_max_age_ms=500,
        partition_assignment_strategy=(RangePartitionAssignor,),
    )
    consumer.subscribe([settings.source], listener=Listener(member))
    await consumer.start()
    try:
        while not member.is_leaving:
            await read(consumer, member)
            if (timestamp_ms := member.time_to_seek()) is not None:
                await seek(consumer, member, timestamp_ms)
    finally:
        await consumer.stop()


if __name__ == "__main__":
    asyncio.run(main())

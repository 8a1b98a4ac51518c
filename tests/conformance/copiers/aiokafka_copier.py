"""Copies a topic in transactions with aiokafka; see `member.py` for how it is run.

aiokafka does not tell the broker which member of the group commits (it has no KIP-447), so a late commit of a former
owner is not refused by the group. The older way is used: each input partition has a transactional id of its own, and
its new owner starts a producer with it, which ends whatever the former owner left, before it asks where to begin.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import KafkaError
from member import POLL_S, Member, Settings

RebalanceListener: Any = ConsumerRebalanceListener  # its callbacks may be coroutines, which its types do not say


class Owned:
    """A partition of ours: its producer, and the offset that its next transaction begins at."""

    def __init__(self, producer: AIOKafkaProducer, position: int) -> None:
        self.producer = producer
        self.position = position


class Copier(RebalanceListener):
    def __init__(self, settings: Settings, member: Member) -> None:
        self._settings = settings
        self._member = member
        self._owned: dict[TopicPartition, Owned] = {}
        self._busy = asyncio.Lock()
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=settings.bootstrap,
            group_id=settings.group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            isolation_level="read_committed",
            session_timeout_ms=settings.session_timeout_ms,
            heartbeat_interval_ms=500,
            partition_assignment_strategy=(RangePartitionAssignor,),
        )

    async def run(self) -> None:
        self._consumer.subscribe([self._settings.source], listener=self)
        await self._consumer.start()
        try:
            while not self._member.is_leaving:
                found = await self._consumer.getmany(
                    timeout_ms=int(POLL_S * 1000), max_records=self._settings.transaction_records
                )
                for where, records in found.items():
                    async with self._busy:
                        await self._copy(where, records)
        finally:
            await self._consumer.stop()
            await self._release()

    async def on_partitions_revoked(self, revoked: Any) -> None:
        async with self._busy:  # a transaction that runs is finished first; the group waits for it
            self._member.report("revoked", *sorted(one.partition for one in revoked))
            await self._release()

    async def on_partitions_assigned(self, assigned: Any) -> None:
        async with self._busy:
            self._member.report("assigned", *sorted(one.partition for one in assigned))
            for where in sorted(assigned):
                await self._take(where)

    async def _take(self, where: TopicPartition) -> None:
        """In this order: the former owner's last transaction is over once this producer has started."""
        producer = AIOKafkaProducer(
            bootstrap_servers=self._settings.bootstrap,
            transactional_id=f"{self._settings.group}-{where.partition}",
            linger_ms=5,
        )
        await producer.start()
        position = await self._consumer.committed(where) or 0
        self._consumer.seek(where, position)
        self._owned[where] = Owned(producer, position)

    async def _release(self) -> None:
        for owned in self._owned.values():
            await owned.producer.stop()
        self._owned.clear()

    async def _copy(self, where: TopicPartition, records: list[Any]) -> None:
        owned = self._owned.get(where)
        if owned is None:
            return
        if records[0].offset != owned.position:  # fetched before the partition was taken over
            self._consumer.seek(where, owned.position)
            return
        producer, count, end = owned.producer, len(records), records[-1].offset + 1
        try:
            await producer.begin_transaction()
            for record in records:
                await producer.send(self._settings.target, value=record.value, key=record.key)
            await producer.send_offsets_to_transaction({where: end}, self._settings.group)
            if self._member.wants_abort():
                await producer.flush()  # or the records would be dropped here instead of aborted there
                await producer.abort_transaction()
                self._member.report("aborted", count)
                self._consumer.seek(where, owned.position)
                return
            await producer.commit_transaction()
            owned.position = end
            self._member.report("committed", count)
        except KafkaError as failure:
            self._member.report("failed", repr(failure))
            del self._owned[where]
            await producer.stop()
            await self._take(where)


async def copy() -> None:
    settings = Settings.from_arguments()
    member = Member(settings)
    await asyncio.to_thread(member.wait_join)
    await Copier(settings, member).run()


if __name__ == "__main__":
    asyncio.run(copy())

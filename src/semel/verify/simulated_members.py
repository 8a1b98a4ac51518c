"""Members of a group that copy a topic exactly once: consume, produce and commit the offsets in one transaction.

Two kinds of membership, classic and KIP-848, behind one face: who am I, in which generation, and what is mine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from kio.schema.errors import ErrorCode

from semel.verify.simulated_clients import Batch, GivenUp, Refusal, TransactionalProducer
from semel.verify.simulated_network import Lost
from semel.verify.simulated_readers import Fetching, visible_records
from semel.verify.simulation_ledger import TopicPartition, Transaction
from semel.wire.api import Api

SESSION_TIMEOUT_MS = 2_500
_HEARTBEAT_MS = 600
_NO_MEMBER_ANY_MORE = (ErrorCode.fenced_member_epoch, ErrorCode.unknown_member_id, ErrorCode.group_id_not_found)
_RECORDS_MAX = 6


class Membership:
    """A place in a group. `partitions` is what the member may work on, `is_new` that it has changed lately."""

    def __init__(self, client: Copier, group_id: str, topic: str) -> None:
        self.client = client
        self.group_id = group_id
        self.topic = topic
        self.member_id = ""
        self.generation_id = -1
        self.partitions: list[TopicPartition] = []
        self.is_new = False
        self._last_beat_ms = 0.0

    async def keep(self) -> None:
        """Join if this is no member, and let the group know that it lives."""
        raise NotImplementedError

    def forget(self) -> None:
        self.member_id = ""
        self._lose()

    def _lose(self) -> None:
        self.generation_id = -1
        self.partitions = []
        self.is_new = True

    def _is_due(self) -> bool:
        if self.client.world.elapsed_ms() - self._last_beat_ms < _HEARTBEAT_MS:
            return False
        self._last_beat_ms = self.client.world.elapsed_ms()
        return True

    def _own(self, partitions: list[TopicPartition]) -> None:
        client = self.client
        if partitions != self.partitions:
            self.partitions, self.is_new = partitions, True
        client.world.note(f"{client.name} has {partitions} of {self.group_id} in {self.generation_id}")
        client.world.ledger.claim_partitions(self.group_id, self.generation_id, partitions, self.member_id)


class ClassicMembership(Membership):
    """JoinGroup, SyncGroup, Heartbeat: the leader assigns."""

    async def keep(self) -> None:
        if self.generation_id >= 0:
            if not self._is_due():
                return
            answer = await self._ask(Api.HEARTBEAT, generation_id=self.generation_id)
            if answer.error_code is ErrorCode.none:
                return
            if answer.error_code is not ErrorCode.rebalance_in_progress:
                self.member_id = ""
            self._lose()
        await self._join()

    async def _join(self) -> None:
        joined = await self._ask(
            Api.JOIN_GROUP,
            timeout_ms=4 * SESSION_TIMEOUT_MS,
            session_timeout=SESSION_TIMEOUT_MS,
            rebalance_timeout=SESSION_TIMEOUT_MS,
            protocol_type="consumer",
            protocols=[{"name": "range", "metadata": _subscription(self.topic)}],
        )
        self.member_id = joined.member_id
        if joined.error_code is not ErrorCode.none:
            if joined.error_code is not ErrorCode.member_id_required:
                self.member_id = ""
            return
        assignments = _spread([member.member_id for member in joined.members], self.client.input_partitions)
        synced = await self._ask(
            Api.SYNC_GROUP,
            timeout_ms=4 * SESSION_TIMEOUT_MS,
            generation_id=joined.generation_id,
            assignments=[
                {"member_id": member_id, "assignment": json.dumps(indexes).encode()}
                for member_id, indexes in assignments.items()
            ],
        )
        if synced.error_code is ErrorCode.none:
            self.generation_id = joined.generation_id
            self._last_beat_ms = self.client.world.elapsed_ms()
            self.is_new = True
            self._own([(self.topic, index) for index in json.loads(bytes(synced.assignment) or b"[]")])
        elif synced.error_code is not ErrorCode.rebalance_in_progress:
            self.member_id = ""

    async def _ask(self, api: Api, **fields: Any) -> Any:
        return await self.client.call(api, group_id=self.group_id, member_id=self.member_id, **fields)


class ConsumerMembership(Membership):
    """ConsumerGroupHeartbeat (KIP-848): the coordinator assigns, and waits until what it takes away is given back."""

    def __init__(self, client: Copier, group_id: str, topic: str) -> None:
        super().__init__(client, group_id, topic)
        self._reported: list[TopicPartition] | None = None

    async def keep(self) -> None:
        is_joining = self.generation_id < 0
        if not (is_joining or self._is_due() or self._reported != self.partitions):
            return
        if is_joining and self.client.version_of(Api.CONSUMER_GROUP_HEARTBEAT) >= 1 and not self.member_id:
            self.member_id = str(UUID(int=self.client.chance.getrandbits(128), version=4))
        topic_id = self.client.topic_id(self.topic)
        owned = [index for _, index in self.partitions]
        answer = await self.client.call(
            Api.CONSUMER_GROUP_HEARTBEAT,
            group_id=self.group_id,
            member_id=self.member_id,
            member_epoch=0 if is_joining else self.generation_id,
            rebalance_timeout=SESSION_TIMEOUT_MS,
            subscribed_topic_names=[self.topic],
            topic_partitions=[] if is_joining or not owned else [{"topic_id": topic_id, "partitions": owned}],
        )
        if answer.error_code is not ErrorCode.none:
            if answer.error_code in _NO_MEMBER_ANY_MORE:
                self.forget()
            return
        self.member_id = answer.member_id
        self._reported = list(self.partitions)
        self.generation_id = answer.member_epoch
        if answer.assignment is not None:
            self._own(
                [
                    (self.topic, index)
                    for topic in answer.assignment.topic_partitions
                    if topic.topic_id == topic_id
                    for index in sorted(topic.partitions)
                ]
            )


class Copier(TransactionalProducer, Fetching):
    """Copies the input topic to an output topic, each record once, whatever happens to it and to others."""

    def __init__(
        self,
        world: Any,
        name: str,
        seed: int,
        group_id: str,
        input_partitions: Sequence[TopicPartition],
        output_partitions: Sequence[TopicPartition],
        *,
        is_classic: bool,
    ) -> None:
        super().__init__(world, name, seed, name, output_partitions, 0)
        self.input_partitions = [index for _, index in input_partitions]
        self.is_committed = True
        self._outputs = output_partitions
        self._world = world
        self._group_id = group_id
        kind = ClassicMembership if is_classic else ConsumerMembership
        self._membership: Membership = kind(self, group_id, input_partitions[0][0])
        self._positions: dict[TopicPartition, int] | None = None
        self._stalls_left = 2
        # Generations came with version 3 (KIP-447), stable offsets with 7: without them nobody copies exactly once.
        self.version_of(Api.TXN_OFFSET_COMMIT, lowest=3)
        self.version_of(Api.OFFSET_FETCH, lowest=7)
        # Without leader epochs (KIP-320) a position from before a power cut points behind records that came later.
        self.version_of(Api.FETCH, lowest=9)
        self.version_of(Api.METADATA, lowest=7)

    def topic_id(self, topic: str) -> UUID:
        return self._world.topic_ids[topic]

    async def run(self) -> None:
        await self.pause(1000)
        while not self._world.is_copied(self._group_id):
            await self.pause(120)
            try:
                await self._step()
            except Lost:
                await self.pause(50)
            except (Refusal, GivenUp) as failure:
                self.world.note(f"{self.name} begins anew: {failure!r}")
                self.identity = None
                self._positions = None
            if self.chance.random() < (0 if self.world.is_healing else 0.02):
                await self._vanish()

    async def _vanish(self) -> None:
        """The process ends without a word; the next one is a new member."""
        self.world.note(f"{self.name} vanishes")
        self.die()
        self.identity = self._positions = None
        self._membership.forget()
        await self.pause(self.chance.choice((100, 2 * SESSION_TIMEOUT_MS)))

    async def _stall(self) -> None:
        """For so long nothing is heard of it that the group may give its partitions to another."""
        if self._stalls_left and self.chance.random() < 0.15:
            self._stalls_left -= 1
            self.world.note(f"{self.name} stalls")
            await self.pause(1.4 * SESSION_TIMEOUT_MS)

    async def _step(self) -> None:
        membership = self._membership
        await membership.keep()
        if membership.is_new:
            membership.is_new, self._positions = False, None
        if not membership.partitions:
            return
        if self.identity is None or self._raises_epoch:
            await self.ensure_identity()
        if self._positions is None:
            self.leader_epoch = await self._current_leader_epoch()
            self._positions = await self._committed_positions()
        if self._positions is None:
            return
        generation, records = membership.generation_id, await self._next_records(self._positions)
        if self.is_fenced:
            self._positions = None
            return
        if records and membership.generation_id == generation:
            committed = await self.transact(lambda transaction: self._copy(transaction, records))
            if not committed:
                self._positions = None

    async def _current_leader_epoch(self) -> int:
        answer = await self.call(
            Api.METADATA,
            topics=[{"topic_id": None, "name": self._membership.topic}],
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=False,
        )
        return answer.topics[0].partitions[0].leader_epoch

    async def _committed_positions(self) -> dict[TopicPartition, int] | None:
        membership = self._membership
        topics = [{"name": membership.topic, "partition_indexes": [index for _, index in membership.partitions]}]
        group: dict[str, Any] = {"group_id": self._group_id, "topics": topics}
        if isinstance(membership, ConsumerMembership):
            member = {"member_id": membership.member_id, "member_epoch": membership.generation_id}
            group.update(member)
        answer = await self.call(Api.OFFSET_FETCH, **group, groups=[group], require_stable=True)
        answered = answer.groups[0] if hasattr(answer, "groups") else answer
        positions: dict[TopicPartition, int] = {}
        if answered.error_code is not ErrorCode.none:
            return None
        for topic in answered.topics:
            for one in topic.partitions:
                if one.error_code is not ErrorCode.none:
                    return None
                positions[topic.name, one.partition_index] = max(one.committed_offset, 0)
        return positions

    async def _next_records(self, positions: dict[TopicPartition, int]) -> dict[TopicPartition, list[tuple[int, str]]]:
        found: dict[TopicPartition, list[tuple[int, str]]] = {}
        for where, partition in await self.fetch(dict(positions)):
            records, next_position = visible_records(partition, positions[where], is_committed=True)
            if records:
                found[where] = records[:_RECORDS_MAX]
            else:
                positions[where] = next_position
        return found

    async def _copy(self, transaction: Transaction, records: dict[TopicPartition, list[tuple[int, str]]]) -> None:
        outputs = {where: self.chance.choice(self._outputs) for where in records}
        await self.add_partitions(list(dict.fromkeys(outputs.values())))
        batches: list[Batch] = []
        number = 0
        for where, found in records.items():
            values = [f"{transaction.key}/{number + place}={value}" for place, (_, value) in enumerate(found)]
            number += len(found)
            batches.append(self.new_batch(outputs[where], values))
        await self.write(transaction, batches)
        await self._stall()
        offsets = {where: found[-1][0] + 1 for where, found in records.items()}
        membership = self._membership
        await self.commit_offsets(
            transaction,
            self._group_id,
            offsets,
            member_id=membership.member_id,
            generation_id=membership.generation_id,
        )
        await self._stall()
        assert self._positions is not None
        self._positions.update(offsets)


def copied_value(value: str) -> str:
    """The input of a copy.

    >>> copied_value("copier.3/0=payer.1/2")
    'payer.1/2'
    """
    return value.partition("=")[2]


def _spread(member_ids: list[str], partitions: Sequence[int]) -> dict[str, list[int]]:
    shares: dict[str, list[int]] = {member_id: [] for member_id in sorted(member_ids)}
    for number, partition in enumerate(partitions):
        if shares:
            shares[sorted(shares)[number % len(shares)]].append(partition)
    return shares


def _subscription(topic: str) -> bytes:
    """Version 0 of the consumer protocol's subscription."""
    name = topic.encode()
    return b"\0\0" + (1).to_bytes(4, "big") + len(name).to_bytes(2, "big") + name + b"\xff\xff\xff\xff"

"""Starts a broker on what a crash left of the scenario's disk, and holds it against what the client was promised."""

from __future__ import annotations

import asyncio
from typing import Any

from broker_disk_scenario import (
    GROUP,
    TOPICS,
    TRANSACTION_TIMEOUT_MS,
    Host,
    Producing,
    Promises,
    TopicPartition,
    code_of,
)
from kio.schema.errors import ErrorCode

from semel.broker.durability import Fsync
from semel.testing.simulated_disk import SimulatedDisk
from semel.verify.simulated_readers import visible_records
from semel.verify.virtual_time import VirtualTimeLoop
from semel.wire.api import Api

_THERE_ALREADY = {
    Api.CREATE_TOPICS: ErrorCode.topic_already_exists,
    Api.DELETE_TOPICS: ErrorCode.unknown_topic_or_partition,
}


def check(
    disk: SimulatedDisk,
    promises: Promises,
    *,
    fsync: Fsync,
    protocol: int,
    power_cut: bool,
    resends: bool = False,
    ahead_ms: int = 0,
    goes_on: bool = True,
) -> None:
    """`resends`: the client that had no answer sends its request again, as every client does.

    `ahead_ms`: by so much the clock is ahead of the beginning of the scenario. By 0 it was set back.
    `goes_on`: the next transaction is tried as well.
    """
    loop = VirtualTimeLoop()
    host = Host(loop, disk, fsync=fsync, protocol=protocol, boot="second" if power_cut else "first", ahead_ms=ahead_ms)
    checking = _Check(host, promises, power_cut=power_cut, fsync=fsync)
    try:
        loop.run_until_complete(checking.run(resends=resends, goes_on=goes_on))
    finally:
        loop.close()


class _Check:
    def __init__(self, host: Host, promises: Promises, *, power_cut: bool, fsync: Fsync) -> None:
        self._host = host
        self._promises = promises
        self._keeps_plain = not power_cut or fsync is Fsync.ALWAYS
        self._keeps_committed = not power_cut or fsync is not Fsync.NEVER
        self._power_cut = power_cut

    async def run(self, *, resends: bool, goes_on: bool) -> None:
        host = self._host
        await host.start()
        for partition in host.broker.all_partitions():
            assert partition.failure is None, partition.failure
        if resends and self._promises.pending is not None:
            await self._resend()
        await asyncio.sleep(TRANSACTION_TIMEOUT_MS / 1000 + 0.3)
        self._check_topics()
        for partition in host.broker.all_partitions():
            assert partition.last_stable_offset == partition.log_end_offset, (partition.topic, partition.index)
        seen = await self._read_all()
        self._check_plain(seen)
        self._check_transactions(seen)
        await self._check_offsets(seen)
        if goes_on:
            await self._go_on(seen)
        assert host.broker.metrics.unexpected_errors == 0
        assert host.broker.metrics.storage_errors == 0
        assert not host.fatal
        await host.broker.stop()

    async def _resend(self) -> None:
        assert self._promises.pending is not None
        api, version, fields = self._promises.pending
        code = ErrorCode.concurrent_transactions
        for _ in range(100):
            code = code_of(api, await self._host.ask(api, version, fields))
            if code is not ErrorCode.concurrent_transactions:
                break
            await asyncio.sleep(0.05)
        is_done = code in (ErrorCode.none, _THERE_ALREADY.get(api))
        # With the power go open transactions and what was not synced, and every transactional id gets a new owner.
        assert is_done or self._power_cut, (api.name, code.name)
        if api is Api.END_TXN and is_done:
            last = self._promises.transactions[-1]
            last.state = "committed" if last.wants_commit else "aborted"
        elif api is Api.PRODUCE and fields["transactional_id"] is None and is_done:
            self._promises.acknowledged |= set(self._promises.plain)

    def _check_topics(self) -> None:
        for name, state in self._promises.topics.items():
            topic = self._host.broker.topics.get(name)
            if state in ("there", "gone"):
                assert (topic is not None) is (state == "there"), (name, state)
            if topic is not None:
                assert topic.partition_count == TOPICS[name]

    async def _read_all(self) -> dict[TopicPartition, list[str]]:
        """What a reader of committed records gets, by Fetch requests."""
        seen: dict[TopicPartition, list[str]] = {}
        for name, count in TOPICS.items():
            if self._host.broker.topics.get(name) is None:
                continue
            for index in range(count):
                seen[name, index] = await self._read((name, index))
        return seen

    async def _read(self, where: TopicPartition) -> list[str]:
        values: list[str] = []
        position = 0
        while True:
            answer: Any = await self._host.ask(
                Api.FETCH,
                11,
                {
                    "replica_id": -1,
                    "max_wait": 0,
                    "min_bytes": 0,
                    "max_bytes": 1 << 20,
                    "isolation_level": 1,
                    "session_id": 0,
                    "session_epoch": -1,
                    "topics": [
                        {
                            "topic": where[0],
                            "partitions": [
                                {"partition": where[1], "fetch_offset": position, "partition_max_bytes": 1 << 20}
                            ],
                        }
                    ],
                    "forgotten_topics_data": [],
                    "rack_id": "",
                },
            )
            partition = answer.responses[0].partitions[0]
            assert partition.error_code is ErrorCode.none, partition.error_code
            records, following = visible_records(partition, position, is_committed=True)
            values += [value for _, value in records]
            if following == position:
                assert position >= partition.last_stable_offset, "a reader stands still before the end"
                return values
            position = following

    def _check_plain(self, seen: dict[TopicPartition, list[str]]) -> None:
        tried = {**self._promises.plain}
        for transaction in self._promises.transactions:
            tried.update(transaction.values)
        for where, values in seen.items():
            assert len(values) == len(set(values)), f"twice in {where}: {values}"
            for value in values:
                assert tried[value] == where
        for value, where in self._promises.plain.items():
            if where[0] == "compacted" or where not in seen:
                continue
            assert value in seen[where] or value not in self._promises.acknowledged or not self._keeps_plain, value
        last = [value for value, where in self._promises.plain.items() if where[0] == "compacted"]
        newest = max((n for n, value in enumerate(last) if value in self._promises.acknowledged), default=-1)
        if newest >= 0 and self._keeps_plain:
            assert any(value in seen["compacted", 0] for value in last[newest:]), "the last value of the key is gone"

    def _check_transactions(self, seen: dict[TopicPartition, list[str]]) -> None:
        if not self._keeps_committed:
            return  # without any sync a power cut may leave the end of one transaction and the beginning of another
        for transaction in self._promises.transactions:
            there = [value in seen.get(where, ()) for value, where in transaction.values.items()]
            if transaction.state == "committed":
                assert all(there), f"committed, and lost: {transaction} {there}"
            elif transaction.state == "ending" and transaction.wants_commit:
                assert len(set(there)) == 1, f"half a transaction: {transaction} {there}"
            else:
                assert not any(there), f"not committed, and seen: {transaction} {there}"

    async def _check_offsets(self, seen: dict[TopicPartition, list[str]]) -> None:
        """The group stands where the last transaction left it that is visible."""
        if not self._keeps_committed:
            return
        expected = -1
        for transaction in self._promises.transactions:
            is_visible = bool(transaction.values) and all(
                value in seen.get(where, ()) for value, where in transaction.values.items()
            )
            if transaction.position is not None and is_visible:
                expected = transaction.position
        position = await self._position()
        assert position == expected, f"the group stands at {position}, not at {expected}"

    async def _position(self) -> int:
        answer: Any = await self._host.ask(
            Api.OFFSET_FETCH,
            7,
            {"group_id": GROUP, "topics": [{"name": "a", "partition_indexes": [0]}], "require_stable": True},
        )
        one = answer.topics[0].partitions[0]
        assert one.error_code is ErrorCode.none
        return one.committed_offset

    async def _go_on(self, seen: dict[TopicPartition, list[str]]) -> None:
        """The next transaction works, and the old records are still there after it."""
        if not {("a", 0), ("b", 0)} <= seen.keys():
            return
        promises = Promises()
        writer = Producing(self._host, promises, transactional=True)
        await writer.begin_life()
        writer.begin()
        await writer.produce({"next/0": ("a", 0), "next/1": ("b", 0)})
        await writer.commit_offset(1000)
        await writer.end(committed=True)
        for where, value in ((("a", 0), "next/0"), (("b", 0), "next/1")):
            assert await self._read(where) == [*seen[where], value]
        assert await self._position() == 1000

"""A producer that sends exactly what a test tells it to, and asks for no more."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from raw import NOT_READY, RawClient, settled

from semel.records.layout import next_sequence
from semel.records.reference import Record, encode_batch
from semel.wire import Api, ErrorCode

GROUP: Final = 0
TRANSACTION: Final = 1
TRANSACTION_STATE: Final = "__transaction_state"

Where = tuple[str, int]


class Identity(NamedTuple):
    producer_id: int
    producer_epoch: int


NOBODY: Final = Identity(-1, -1)


def find_coordinator(raw: RawClient, kind: int, key: str) -> Any:
    version = raw.version(Api.FIND_COORDINATOR, highest=3)
    return settled(lambda: raw.call(Api.FIND_COORDINATOR, version, key=key, key_type=kind))


def init_producer_id(
    raw: RawClient,
    transactional_id: str | None,
    *,
    age: str = "newest",
    version: int | None = None,
    timeout_ms: int = 60_000,
    identity: Identity = NOBODY,
) -> Any:
    """The answer, once the coordinator is there and what was open before is ended."""
    if transactional_id is not None:
        find_coordinator(raw, TRANSACTION, transactional_id)
    return settled(
        lambda: raw.call(
            Api.INIT_PRODUCER_ID,
            raw.version(Api.INIT_PRODUCER_ID, age) if version is None else version,
            transactional_id=transactional_id,
            transaction_timeout=timeout_ms,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
        )
    )


@dataclass
class RawProducer:
    """Counts sequences like a client, unless told otherwise. `age` and `protocol` choose its requests' versions."""

    raw: RawClient
    transactional_id: str | None = None
    identity: Identity = NOBODY
    age: str = "newest"
    protocol: int = 1
    next_sequences: dict[Where, int] = field(default_factory=dict[Where, int])

    def begin(self, *, timeout_ms: int = 60_000) -> RawProducer:
        """Take an identity: a new one, or that of the transactional id with the next epoch."""
        answer = init_producer_id(self.raw, self.transactional_id, age=self.age, timeout_ms=timeout_ms)
        assert answer.error_code is ErrorCode.none, answer
        self.become(Identity(answer.producer_id, answer.producer_epoch))
        return self

    def become(self, identity: Identity) -> None:
        self.identity = identity
        self.next_sequences.clear()

    def version(self, api: Api) -> int:
        return self.raw.version(api, self.age, protocol=self.protocol)

    def produce(
        self,
        topic: str,
        *values: bytes,
        partition: int = 0,
        sequence: int | None = None,
        identity: Identity | None = None,
        version: int | None = None,
        transactional: bool | None = None,
    ) -> Any:
        """The partition's answer to one batch."""
        where = (topic, partition)
        batch = self.batch(
            values,
            sequence=self.next_sequences.get(where, 0) if sequence is None else sequence,
            identity=identity or self.identity,
            transactional=transactional,
        )
        answer = self.send_batch(topic, partition, batch, version=version)
        if answer.error_code is ErrorCode.none and sequence is None:
            self.next_sequences[where] = next_sequence(self.next_sequences.get(where, 0), len(values))
        return answer

    def batch(
        self, values: Sequence[bytes], *, sequence: int, identity: Identity, transactional: bool | None = None
    ) -> bytes:
        now_ms = time.time_ns() // 1_000_000
        return encode_batch(
            [Record(number, now_ms, None, value) for number, value in enumerate(values)],
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            base_sequence=sequence,
            transactional=self.transactional_id is not None if transactional is None else transactional,
        )

    def send_batch(self, topic: str, partition: int, batch: bytes, *, version: int | None = None) -> Any:
        def ask() -> Any:
            answer = self.raw.call(
                Api.PRODUCE,
                self.version(Api.PRODUCE) if version is None else version,
                transactional_id=self.transactional_id,
                acks=-1,
                timeout=10_000,
                topic_data=[{"name": topic, "partition_data": [{"index": partition, "records": batch}]}],
            )
            return answer.responses[0].partition_responses[0]

        return settled(ask)

    def write(self, topic: str, *values: bytes, partition: int = 0) -> int:
        """Into the transaction, as the protocol wants it; the offset of the first."""
        if self.protocol == 1:
            assert self.settled_add_partitions((topic, partition)) is ErrorCode.none
        # Protocol 2 begins its transaction with this request, so that here is where the last one's markers are felt.
        busy = NOT_READY | {ErrorCode.not_enough_replicas}
        deadline = time.monotonic() + 30
        while (answer := self.produce(topic, *values, partition=partition)).error_code in busy:
            assert time.monotonic() < deadline, answer
        assert answer.error_code is ErrorCode.none, answer
        return answer.base_offset

    def settled_add_partitions(self, *partitions: Where) -> ErrorCode:
        return settled(lambda: self.add_partitions(*partitions), lambda code: code)

    def add_partitions(
        self, *partitions: Where, identity: Identity | None = None, version: int | None = None
    ) -> ErrorCode:
        identity = identity or self.identity
        answer = self.raw.call(
            Api.ADD_PARTITIONS_TO_TXN,
            self.version(Api.ADD_PARTITIONS_TO_TXN) if version is None else version,
            v3_and_below_transactional_id=self.transactional_id,
            v3_and_below_producer_id=identity.producer_id,
            v3_and_below_producer_epoch=identity.producer_epoch,
            v3_and_below_topics=[{"name": topic, "partitions": [index]} for topic, index in partitions],
        )
        codes = {
            one.partition_error_code
            for topic in answer.results_by_topic_v3_and_below
            for one in topic.results_by_partition
        }
        assert len(codes) == 1, codes
        return codes.pop()

    def add_offsets(self, group: str, *, identity: Identity | None = None, version: int | None = None) -> ErrorCode:
        identity = identity or self.identity
        return settled(
            lambda: self.raw.call(
                Api.ADD_OFFSETS_TO_TXN,
                self.version(Api.ADD_OFFSETS_TO_TXN) if version is None else version,
                transactional_id=self.transactional_id,
                producer_id=identity.producer_id,
                producer_epoch=identity.producer_epoch,
                group_id=group,
            )
        ).error_code

    def commit_offsets(
        self,
        group: str,
        offsets: Mapping[Where, int],
        *,
        identity: Identity | None = None,
        version: int | None = None,
        **member: Any,
    ) -> ErrorCode:
        """TxnOffsetCommit; `member` is generation_id, member_id and group_instance_id. One code for all partitions."""
        identity = identity or self.identity
        find_coordinator(self.raw, GROUP, group)

        def ask() -> Any:
            return self.raw.call(
                Api.TXN_OFFSET_COMMIT,
                self.version(Api.TXN_OFFSET_COMMIT) if version is None else version,
                transactional_id=self.transactional_id,
                group_id=group,
                producer_id=identity.producer_id,
                producer_epoch=identity.producer_epoch,
                topics=offsets_by_topic(offsets),
                **member,
            )

        return settled(lambda: common_code(ask()), lambda code: code)

    def end(
        self, committed: bool, *, identity: Identity | None = None, version: int | None = None, wait: bool = True
    ) -> Any:
        """The answer of EndTxn; with `wait` the one after the markers. On protocol 2 a success changes the identity."""
        asker = identity or self.identity

        def ask() -> Any:
            return self.raw.call(
                Api.END_TXN,
                self.version(Api.END_TXN) if version is None else version,
                transactional_id=self.transactional_id,
                producer_id=asker.producer_id,
                producer_epoch=asker.producer_epoch,
                committed=committed,
            )

        answer = settled(ask) if wait else ask()
        if answer.error_code is ErrorCode.none and identity is None and self.protocol == 2:
            self.become(Identity(answer.producer_id, answer.producer_epoch))
        return answer

    def commit(self) -> None:
        self._end_and_wait(True)

    def abort(self) -> None:
        self._end_and_wait(False)

    def _end_and_wait(self, committed: bool) -> None:
        """A repeat is answered only when the markers are written, and then like the first."""
        ended = self.identity
        answer = self.end(committed)
        assert answer.error_code is ErrorCode.none, answer
        again = self.end(committed, identity=ended)
        assert again == answer


def offsets_by_topic(offsets: Mapping[Where, int]) -> list[dict[str, Any]]:
    topics: dict[str, list[dict[str, Any]]] = {}
    for (topic, index), offset in offsets.items():
        topics.setdefault(topic, []).append(
            {
                "partition_index": index,
                "committed_offset": offset,
                "committed_leader_epoch": -1,
                "committed_metadata": f"at {offset}",
            }
        )
    return [{"name": topic, "partitions": partitions} for topic, partitions in topics.items()]


def common_code(answer: Any) -> ErrorCode:
    """Of an answer with a code per partition, where all must have the same."""
    codes = {one.error_code for topic in answer.topics for one in topic.partitions}
    assert len(codes) == 1, answer
    return codes.pop()

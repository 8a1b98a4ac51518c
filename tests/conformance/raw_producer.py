"""A producer that sends exactly what a test tells it to, and what the partitions and groups hold then."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from raw import NOT_READY, RawClient, settled

from semel.records.layout import iter_batches, next_sequence
from semel.records.reference import Record, decode_batch, encode_batch
from semel.wire import Api, ErrorCode

GROUP: Final = 0
TRANSACTION: Final = 1
LATEST: Final = -1
READ_COMMITTED: Final = 1
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


def end_offset(raw: RawClient, topic: str, partition: int = 0, *, committed: bool = False, age: str = "newest") -> int:
    """The end of the log, or the last stable offset, by ListOffsets."""
    answer = raw.call(
        Api.LIST_OFFSETS,
        raw.version(Api.LIST_OFFSETS, age, lowest=2),
        replica_id=-1,
        isolation_level=int(committed),
        topics=[
            {
                "name": topic,
                "partitions": [{"partition_index": partition, "current_leader_epoch": -1, "timestamp": LATEST}],
            }
        ],
    )
    found = answer.topics[0].partitions[0]
    assert found.error_code is ErrorCode.none, found
    return found.offset


def has_leader(raw: RawClient, topic: str, partition: int) -> bool:
    """Whether the broker leads the partition and knows that the topic exists; after its start that takes a moment."""
    return fetch(raw, topic, partition).error_code is ErrorCode.none


def fetch(
    raw: RawClient,
    topic: str,
    partition: int = 0,
    *,
    offset: int = 0,
    committed: bool = False,
    version: int | None = None,
    bytes_max: int = 1 << 20,
) -> Any:
    """The partition's answer to one Fetch that does not wait."""
    answer = raw.call(
        Api.FETCH,
        raw.version(Api.FETCH) if version is None else version,
        replica_id=-1,
        max_wait=0,
        min_bytes=0,
        max_bytes=bytes_max,
        isolation_level=int(committed),
        session_id=0,
        session_epoch=-1,
        topics=[
            {
                "topic": topic,
                "partitions": [
                    {
                        "partition": partition,
                        "current_leader_epoch": -1,
                        "fetch_offset": offset,
                        "last_fetched_epoch": -1,
                        "log_start_offset": -1,
                        "partition_max_bytes": bytes_max,
                    }
                ],
            }
        ],
        forgotten_topics_data=[],
        rack_id="",
    )
    return answer.responses[0].partitions[0]


@dataclass(frozen=True, slots=True)
class Stored:
    """One record as it lies in the log."""

    offset: int
    value: bytes | None
    key: bytes | None
    producer_id: int
    producer_epoch: int
    is_control: bool


def stored_in(fetched: Any) -> list[Stored]:
    return [
        Stored(record.offset, record.value, record.key, header.producer_id, header.producer_epoch, header.is_control)
        for header, batch in iter_batches(fetched.records or b"")
        for record in decode_batch(batch)[1]
    ]


def everything_in(raw: RawClient, topic: str, partition: int = 0) -> list[Stored]:
    """All records and markers, also of open and aborted transactions."""
    return stored_in(fetch(raw, topic, partition))


def visible_in(raw: RawClient, topic: str, partition: int = 0, *, version: int | None = None) -> list[bytes | None]:
    """What a reader of committed records shows: it drops by the aborted list, marker by marker."""
    fetched = fetch(raw, topic, partition, committed=True, version=version)
    starts = sorted((one.first_offset, one.producer_id) for one in fetched.aborted_transactions or ())
    dropping: set[int] = set()
    seen: list[bytes | None] = []
    for record in stored_in(fetched):
        while starts and starts[0][0] <= record.offset:
            dropping.add(starts.pop(0)[1])
        if record.is_control:
            if is_abort(record):
                dropping.discard(record.producer_id)
        elif record.producer_id not in dropping:
            seen.append(record.value)
    return seen


def is_abort(marker: Stored) -> bool:
    """A control record's key is its version and its type: 0 is an abort, 1 a commit."""
    assert marker.key is not None
    return int.from_bytes(marker.key[2:4], "big") == 0


def committed_offset(
    raw: RawClient,
    group: str,
    topic: str,
    partition: int = 0,
    *,
    require_stable: bool = True,
    version: int | None = None,
) -> tuple[ErrorCode, int]:
    """OffsetFetch of one partition: its code and the offset, -1 for none."""
    version = raw.version(Api.OFFSET_FETCH) if version is None else version
    topics = [{"name": topic, "partition_indexes": [partition]}]

    def ask() -> Any:
        if version >= 8:
            groups = [{"group_id": group, "member_id": None, "member_epoch": -1, "topics": topics}]
            return raw.call(Api.OFFSET_FETCH, version, groups=groups, require_stable=require_stable).groups[0]
        return raw.call(Api.OFFSET_FETCH, version, group_id=group, topics=topics, require_stable=require_stable)

    answer = settled(ask, lambda answer: getattr(answer, "error_code", ErrorCode.none))
    found = answer.topics[0].partitions[0]
    return found.error_code, found.committed_offset

"""What partitions and groups hold, by single requests: records, markers, ends of logs, committed offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from raw import RawClient, settled, wait_until

from semel.records.layout import iter_batches
from semel.records.reference import decode_batch
from semel.wire import Api, ErrorCode

LATEST: Final = -1


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


def settled_offset(raw: RawClient, group: str, topic: str, partition: int = 0, *, version: int | None = None) -> int:
    """The committed offset once no transaction's is pending: Kafka takes them up a moment after their marker."""
    found = (ErrorCode.unstable_offset_commit, -1)

    def is_stable() -> bool:
        nonlocal found
        found = committed_offset(raw, group, topic, partition)
        return found[0] is not ErrorCode.unstable_offset_commit

    wait_until(is_stable, "stable offsets")
    if version is not None:
        found = committed_offset(raw, group, topic, partition, version=version)
    assert found[0] is ErrorCode.none, found
    return found[1]

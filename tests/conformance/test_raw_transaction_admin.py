"""What an operator asks about transactions, request by request, and where the coordinator keeps an id."""

from __future__ import annotations

import time
from typing import Any

import pytest
from raw import RawClient, settled
from raw_producer import GROUP, TRANSACTION, TRANSACTION_STATE, RawProducer, find_coordinator
from raw_reading import end_offset, everything_in, fetch, is_abort, stored_in, visible_in
from targets import NewTopic

from semel.core.coordinator_hash import coordinator_partition
from semel.wire import Api, ErrorCode

STATE_PARTITIONS = 4
"""What the targets' brokers are started with."""

admin = pytest.mark.needs("has_transaction_admin")


def list_ids(raw: RawClient, **filters: Any) -> set[str]:
    version = raw.version(Api.LIST_TRANSACTIONS)
    fields = {"state_filters": [], "producer_id_filters": [], "duration_filter": -1, "transactional_id_pattern": None}
    answer = settled(lambda: raw.call(Api.LIST_TRANSACTIONS, version, **{**fields, **filters}))
    assert answer.error_code is ErrorCode.none, answer
    return {one.transactional_id for one in answer.transaction_states}


def describe(raw: RawClient, transactional_id: str) -> Any:
    answer = raw.call(Api.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[transactional_id])
    return answer.transaction_states[0]


def active_producers(raw: RawClient, topic: str, partition: int = 0) -> dict[int, Any]:
    answer = raw.call(Api.DESCRIBE_PRODUCERS, 0, topics=[{"name": topic, "partition_indexes": [partition]}])
    found = answer.topics[0].partitions[0]
    assert found.error_code is ErrorCode.none, found
    return {one.producer_id: one for one in found.active_producers}


@admin
def test_transactions_are_listed_by_state_and_producer(raw: RawClient, new_topic: NewTopic) -> None:
    """B8: each filter by itself, both together, and a state that does not exist is given back."""
    topic = new_topic()
    open_one = RawProducer(raw, f"{topic}-open").begin()
    ended, fresh = RawProducer(raw, f"{topic}-ended").begin(), RawProducer(raw, f"{topic}-fresh").begin()
    open_one.write(topic, b"x")
    ended.write(topic, b"y")
    ended.abort()
    own = {f"{topic}-open", f"{topic}-ended", f"{topic}-fresh"}
    assert list_ids(raw) >= own
    assert list_ids(raw, state_filters=["Ongoing"]) & own == {f"{topic}-open"}
    assert list_ids(raw, state_filters=["CompleteAbort", "Empty"]) & own == {f"{topic}-ended", f"{topic}-fresh"}
    ids = [open_one.identity.producer_id, fresh.identity.producer_id]
    assert list_ids(raw, producer_id_filters=ids) == {f"{topic}-open", f"{topic}-fresh"}
    assert list_ids(raw, producer_id_filters=ids, state_filters=["Ongoing"]) == {f"{topic}-open"}
    answer = raw.call(
        Api.LIST_TRANSACTIONS,
        0,
        state_filters=["Ongoing", "Nonsense"],
        producer_id_filters=[open_one.identity.producer_id],
    )
    assert answer.unknown_state_filters == ("Nonsense",)
    assert [(one.transactional_id, one.transaction_state) for one in answer.transaction_states] == [
        (f"{topic}-open", "Ongoing")
    ]
    open_one.abort()


@admin
def test_transactions_are_listed_by_age_and_name(raw: RawClient, new_topic: NewTopic) -> None:
    """B8: what has been open for long (version 1), and by a pattern for the whole name (version 2)."""
    version = raw.version(Api.LIST_TRANSACTIONS)
    topic = new_topic()
    open_one = RawProducer(raw, f"{topic}-open").begin()
    open_one.write(topic, b"x")
    if version >= 1:
        ongoing = {"state_filters": ["Ongoing"]}
        assert f"{topic}-open" not in list_ids(raw, **ongoing, duration_filter=600_000)
        assert f"{topic}-open" in list_ids(raw, **ongoing, duration_filter=0)
    if version >= 2:
        assert list_ids(raw, transactional_id_pattern=f"{topic}-.*") == {f"{topic}-open"}
        assert list_ids(raw, transactional_id_pattern=topic) == set()
        answer = raw.call(
            Api.LIST_TRANSACTIONS,
            2,
            state_filters=[],
            producer_id_filters=[],
            duration_filter=-1,
            transactional_id_pattern="(",
        )
        assert answer.error_code is ErrorCode.invalid_regular_expression
    open_one.abort()


@admin
def test_a_transaction_is_described_from_its_begin_to_its_end(raw: RawClient, new_topic: NewTopic) -> None:
    """B8: owner, state, time-out, start and partitions; an id that nobody has is TRANSACTIONAL_ID_NOT_FOUND."""
    topic = new_topic(partitions=2)
    producer = RawProducer(raw, topic).begin(timeout_ms=45_000)
    fresh = describe(raw, topic)
    assert (fresh.error_code, fresh.transaction_state, fresh.topics) == (ErrorCode.none, "Empty", ())
    assert fresh.transaction_start_time_ms == -1
    begun_ms = time.time_ns() // 1_000_000
    producer.write(topic, b"x", partition=1)
    is_open = describe(raw, topic)
    assert (is_open.transaction_state, is_open.producer_id, is_open.producer_epoch) == ("Ongoing", *producer.identity)
    assert [(one.topic, one.partitions) for one in is_open.topics] == [(topic, (1,))]
    assert is_open.transaction_timeout.total_seconds() == 45
    assert abs(is_open.transaction_start_time_ms - begun_ms) < 10_000
    producer.commit()
    ended = describe(raw, topic)
    assert (ended.transaction_state, ended.topics) == ("CompleteCommit", ())
    assert describe(raw, f"{topic}-unknown").error_code is ErrorCode.transactional_id_not_found


@admin
def test_producers_of_a_partition_are_described(raw: RawClient, new_topic: NewTopic) -> None:
    """B8: sequence, epoch and where the open transaction begins, for those with a transaction and without."""
    topic = new_topic()
    plain, open_one = RawProducer(raw).begin(), RawProducer(raw, topic).begin()
    plain.produce(topic, b"a", b"b")
    open_one.write(topic, b"c")
    found = active_producers(raw, topic)
    assert found.keys() == {plain.identity.producer_id, open_one.identity.producer_id}
    first, second = found[plain.identity.producer_id], found[open_one.identity.producer_id]
    assert (first.producer_epoch, first.last_sequence, first.current_txn_start_offset) == (0, 1, -1)
    assert (second.producer_epoch, second.last_sequence, second.current_txn_start_offset) == (0, 0, 2)
    assert (first.coordinator_epoch, second.coordinator_epoch) == (-1, -1)
    open_one.commit()
    after = active_producers(raw, topic)[open_one.identity.producer_id]
    assert (after.current_txn_start_offset, after.coordinator_epoch, after.last_sequence) == (-1, 0, 0)
    answer = raw.call(Api.DESCRIBE_PRODUCERS, 0, topics=[{"name": f"{topic}-missing", "partition_indexes": [0]}])
    assert answer.topics[0].partitions[0].error_code is ErrorCode.unknown_topic_or_partition


@admin
def test_a_hanging_transaction_is_ended_by_a_marker_written_by_hand(raw: RawClient, new_topic: NewTopic) -> None:
    """B8: WriteTxnMarkers with the producer's own epoch aborts it in the partition and lets readers go on."""
    topic = new_topic()
    producer = RawProducer(raw, topic).begin()
    producer.write(topic, b"hangs")
    RawProducer(raw).begin().produce(topic, b"waits behind it")
    assert end_offset(raw, topic, committed=True) == 0

    def write_marker(epoch: int, *, name: str = topic) -> ErrorCode:
        answer = raw.call(
            Api.WRITE_TXN_MARKERS,
            1,
            markers=[
                {
                    "producer_id": producer.identity.producer_id,
                    "producer_epoch": epoch,
                    "transaction_result": False,
                    "topics": [{"name": name, "partition_indexes": [0]}],
                    "coordinator_epoch": 0,
                }
            ],
        )
        (marker,) = answer.markers
        return marker.topics[0].partitions[0].error_code

    assert write_marker(0, name=f"{topic}-missing") is ErrorCode.unknown_topic_or_partition
    assert write_marker(producer.identity.producer_epoch) is ErrorCode.none
    assert end_offset(raw, topic, committed=True) == 3
    assert [is_abort(one) for one in everything_in(raw, topic) if one.is_control] == [True]
    assert visible_in(raw, topic) == [b"waits behind it"]
    assert active_producers(raw, topic)[producer.identity.producer_id].current_txn_start_offset == -1


@pytest.mark.parametrize("version", [0, 1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("kind", [GROUP, TRANSACTION], ids=["group", "transaction"])
def test_the_coordinator_is_told_in_every_version(raw: RawClient, new_topic: NewTopic, version: int, kind: int) -> None:
    """B9: node, host and port; from version 4 for several keys at once."""
    version = min(version, raw.version(Api.FIND_COORDINATOR))
    kind = kind if version >= 1 else GROUP
    keys = [new_topic(), new_topic()]
    if version < 4:
        found = [
            settled(lambda key=key: raw.call(Api.FIND_COORDINATOR, version, key=key, key_type=kind)) for key in keys
        ]
    else:
        answer = settled(
            lambda: raw.call(Api.FIND_COORDINATOR, version, coordinator_keys=keys, key_type=kind),
            lambda answer: answer.coordinators[0].error_code,
        )
        found = answer.coordinators
        assert [one.key for one in found] == keys
    assert {one.error_code for one in found} == {ErrorCode.none}
    nodes = raw.call(Api.METADATA, 1, topics=[]).brokers
    assert {(one.node_id, one.host, one.port) for one in found} == {
        (node.node_id, node.host, node.port) for node in nodes
    }


@pytest.mark.needs("has_features")
def test_a_kind_of_coordinator_that_does_not_exist_is_an_invalid_request(raw: RawClient) -> None:
    """B9: key type 9 is nothing; Kafka before 2.7 answers with an unknown server error."""
    version = raw.version(Api.FIND_COORDINATOR, highest=3)
    answer = raw.call(Api.FIND_COORDINATOR, version, key="x", key_type=9)
    assert answer.error_code is ErrorCode.invalid_request
    assert answer.node_id == -1


@pytest.mark.parametrize("suffix", ["", "-é", "-𐍈"], ids=["ascii", "two bytes", "surrogates"])
def test_an_id_is_kept_in_the_partition_of_its_java_hash(raw: RawClient, new_topic: NewTopic, suffix: str) -> None:
    """B9: the internal topic's record for the id is in one partition, by the hash of its name."""
    name = new_topic() + suffix
    find_coordinator(raw, TRANSACTION, name)
    ends = [end_offset(raw, TRANSACTION_STATE, partition) for partition in range(STATE_PARTITIONS)]
    RawProducer(raw, name).begin()
    length = len(name.encode()).to_bytes(2, "big")
    key = b"\x00\x00" + length + name.encode()
    holders = [
        partition
        for partition, end in enumerate(ends)
        if any(one.key == key for one in stored_in(fetch(raw, TRANSACTION_STATE, partition, offset=end)))
    ]
    assert holders == [coordinator_partition(name, STATE_PARTITIONS)]

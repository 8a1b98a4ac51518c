"""Transactions, request by request, on both protocols: what is written, when it is seen, and what an end answers."""

from __future__ import annotations

import time

import pytest
from raw import AGES, RawClient, connect, wait_until
from raw_producer import Identity, RawProducer, init_producer_id
from raw_reading import committed_offset, end_offset, everything_in, fetch, is_abort, settled_offset, visible_in
from targets import KafkaUnderTest, NewTopic, Target

from semel.testing.exchange import create_topic
from semel.wire import Api, ErrorCode

LAST_EPOCH = 32_766
"""The highest epoch a producer gets; the one after it makes the coordinator hand out a new producer id."""

ages = pytest.mark.parametrize("age", AGES)
protocols = pytest.mark.parametrize("protocol", [1, 2])
only_protocol_2 = pytest.mark.parametrize("protocol", [2])
outcomes = pytest.mark.parametrize("committed", [True, False], ids=["commit", "abort"])


@outcomes
@protocols
@ages
def test_topics_partitions_and_offsets_end_together(
    raw: RawClient, new_topic: NewTopic, age: str, protocol: int, committed: bool
) -> None:
    """B1: two topics, three partitions and a group's offsets, in one transaction: all or nothing of it is seen."""
    left, right = new_topic(partitions=2), new_topic()
    group = f"{left}-group"
    producer = RawProducer(raw, left, age=age, protocol=protocol).begin()
    for topic, partition in ((left, 0), (left, 1), (right, 0)):
        producer.write(topic, b"a", b"b", partition=partition)
        assert visible_in(raw, topic, partition) == []
    if protocol == 1:
        assert producer.add_offsets(group) is ErrorCode.none
    assert producer.commit_offsets(group, {(left, 0): 7, (right, 0): 8}) is ErrorCode.none
    producer.commit() if committed else producer.abort()
    for topic, partition in ((left, 0), (left, 1), (right, 0)):
        assert visible_in(raw, topic, partition) == ([b"a", b"b"] if committed else [])
        assert [one.value for one in everything_in(raw, topic, partition)][:2] == [b"a", b"b"]
    assert settled_offset(raw, group, left) == (7 if committed else -1)
    assert settled_offset(raw, group, right) == (8 if committed else -1)


def test_partitions_are_added_all_or_none(raw: RawClient, new_topic: NewTopic) -> None:
    """B1: with one that does not exist, the others are told that they were not added."""
    topic = new_topic()
    producer = RawProducer(raw, topic).begin()
    answer = raw.call(
        Api.ADD_PARTITIONS_TO_TXN,
        producer.version(Api.ADD_PARTITIONS_TO_TXN),
        v3_and_below_transactional_id=topic,
        v3_and_below_producer_id=producer.identity.producer_id,
        v3_and_below_producer_epoch=producer.identity.producer_epoch,
        v3_and_below_topics=[{"name": topic, "partitions": [0]}, {"name": f"{topic}-missing", "partitions": [0]}],
    )
    codes = {one.name: one.results_by_partition[0].partition_error_code for one in answer.results_by_topic_v3_and_below}
    assert codes == {
        topic: ErrorCode.operation_not_attempted,
        f"{topic}-missing": ErrorCode.unknown_topic_or_partition,
    }
    assert producer.end(True).error_code is ErrorCode.invalid_txn_state


@ages
@pytest.mark.parametrize("timeout_ms", [0, -1, 900_001], ids=["zero", "negative", "above the maximum"])
def test_a_timeout_out_of_range_is_refused(raw: RawClient, new_topic: NewTopic, age: str, timeout_ms: int) -> None:
    """B5: transaction.timeout.ms must be positive and at most transaction.max.timeout.ms."""
    answer = init_producer_id(raw, new_topic(), age=age, timeout_ms=timeout_ms)
    assert answer.error_code is ErrorCode.invalid_transaction_timeout
    assert (answer.producer_id, answer.producer_epoch) == (-1, -1)


def test_the_maximum_itself_is_allowed(raw: RawClient, new_topic: NewTopic) -> None:
    """B5: the border belongs to the range."""
    assert init_producer_id(raw, new_topic(), timeout_ms=900_000).error_code is ErrorCode.none


@protocols
def test_what_outlives_its_timeout_is_aborted_and_its_commit_refused(
    raw: RawClient, target: Target, new_topic: NewTopic, protocol: int
) -> None:
    """B3, B5: the coordinator aborts under an epoch of its own, and the producer goes on after a bump."""
    topic = new_topic()
    producer = RawProducer(raw, topic, protocol=protocol).begin(timeout_ms=100)
    late = producer.identity
    producer.write(topic, b"too slow")
    wait_until(lambda: end_offset(raw, topic, committed=True) == 2, "the abort by time-out")
    (marker,) = (one for one in everything_in(raw, topic) if one.is_control)
    assert is_abort(marker)
    assert marker.producer_epoch == late.producer_epoch + 1
    answer = producer.end(True)
    if protocol == 2:
        assert answer.error_code is ErrorCode.invalid_txn_state
    elif target.has_fenced_code:
        assert answer.error_code is ErrorCode.producer_fenced
    else:
        assert answer.error_code is ErrorCode.invalid_producer_epoch
    heir = RawProducer(raw, topic, protocol=protocol).begin()
    heir.write(topic, b"in time")
    heir.commit()
    assert visible_in(raw, topic) == [b"in time"]


@pytest.mark.parametrize("version", [4, 7, 11, 12])
def test_readers_of_committed_records_are_told_what_to_drop(
    raw: RawClient, target: Target, new_topic: NewTopic, version: int
) -> None:
    """B6: open, committed and aborted transactions interleaved; each Fetch version says the same."""
    version = min(version, raw.version(Api.FETCH))
    topic = new_topic()
    kept, dropped = RawProducer(raw, f"{topic}-kept").begin(), RawProducer(raw, f"{topic}-dropped").begin()
    open_one = RawProducer(raw, f"{topic}-open").begin()
    kept.write(topic, b"0 kept")
    dropped.write(topic, b"1 dropped")
    RawProducer(raw).begin().produce(topic, b"2 plain")
    kept.write(topic, b"3 kept")
    dropped.abort()  # offset 4
    kept.commit()  # offset 5
    open_one.write(topic, b"6 open")
    dropped.write(topic, b"7 dropped")
    dropped.abort()  # offset 8
    seen = fetch(raw, topic, committed=True, version=version)
    assert (seen.high_watermark, seen.last_stable_offset) == (9, 6)
    # Kafka finds the end of what it sends in a sparse index and may list what lies behind it: readers step over that.
    listed = [(one.producer_id, one.first_offset) for one in seen.aborted_transactions if one.first_offset < 6]
    assert listed == [(dropped.identity.producer_id, 1)]
    assert visible_in(raw, topic, version=version) == [b"0 kept", b"2 plain", b"3 kept"]
    all_of_it = fetch(raw, topic, version=version)
    assert not all_of_it.aborted_transactions
    assert [one.offset for one in everything_in(raw, topic)] == [*range(9)]
    assert [is_abort(one) for one in everything_in(raw, topic) if one.is_control] == [True, False, True]
    open_one.commit()
    assert visible_in(raw, topic, version=version) == [b"0 kept", b"2 plain", b"3 kept", b"6 open"]
    later = fetch(raw, topic, offset=6, committed=True, version=version)
    assert [(one.producer_id, one.first_offset) for one in later.aborted_transactions] == [
        (dropped.identity.producer_id, 7)
    ]
    assert later.last_stable_offset == 10


@ages
def test_the_end_for_readers_of_committed_records_is_the_last_stable_offset(
    raw: RawClient, new_topic: NewTopic, age: str
) -> None:
    """B6: ListOffsets with isolation level; the earlier of two open transactions holds both back."""
    topic = new_topic()
    one, other = RawProducer(raw, f"{topic}-one").begin(), RawProducer(raw, f"{topic}-other").begin()
    RawProducer(raw).begin().produce(topic, b"plain")
    one.write(topic, b"x")
    other.write(topic, b"y", b"z")

    def ends() -> tuple[int, int]:
        return end_offset(raw, topic, committed=True, age=age), end_offset(raw, topic, age=age)

    assert ends() == (1, 4)
    other.commit()
    assert ends() == (1, 5)
    one.abort()
    assert ends() == (6, 6)


@protocols
def test_order_is_kept_over_commits_and_aborts(raw: RawClient, new_topic: NewTopic, protocol: int) -> None:
    """B6: what readers see is in the order of the offsets, whoever committed first."""
    topic = new_topic()
    early, late = RawProducer(raw, f"{topic}-e", protocol=protocol), RawProducer(raw, f"{topic}-l", protocol=protocol)
    early.begin()
    late.begin()
    offsets = [producer.write(topic, b"%d" % n) for n, producer in enumerate((early, late, early, late))]
    late.commit()
    assert visible_in(raw, topic) == []
    early.commit()
    assert offsets == [0, 1, 2, 3]
    assert visible_in(raw, topic) == [b"0", b"1", b"2", b"3"]


@only_protocol_2
@outcomes
def test_an_end_of_protocol_2_answers_the_next_epoch_and_repeats_it(
    raw: RawClient, new_topic: NewTopic, protocol: int, committed: bool
) -> None:
    """B7 (KIP-890): a repeat gets the same answer, the opposite is INVALID_TXN_STATE, and the marker has the epoch."""
    topic = new_topic()
    producer = RawProducer(raw, topic, protocol=protocol).begin()
    before = producer.identity
    producer.write(topic, b"x")
    answer = producer.end(committed)
    assert (answer.error_code, answer.producer_id, answer.producer_epoch) == (
        ErrorCode.none,
        before.producer_id,
        before.producer_epoch + 1,
    )
    assert producer.end(committed, identity=before) == answer
    assert producer.end(not committed, identity=before).error_code is ErrorCode.invalid_txn_state
    (marker,) = (one for one in everything_in(raw, topic) if one.is_control)
    assert (marker.producer_epoch, is_abort(marker)) == (before.producer_epoch + 1, not committed)
    # Once the next one is open, the old epoch is a zombie's.
    producer.write(topic, b"y")
    assert producer.end(committed, identity=before).error_code is ErrorCode.producer_fenced
    producer.commit()


@only_protocol_2
def test_protocol_2_may_abort_what_was_never_begun_and_not_commit_it(
    raw: RawClient, new_topic: NewTopic, protocol: int
) -> None:
    """B7 (KIP-890): its client cannot know whether the first write arrived; each abort raises the epoch."""
    producer = RawProducer(raw, new_topic(), protocol=protocol).begin()
    assert producer.end(True).error_code is ErrorCode.invalid_txn_state
    epoch = producer.identity.producer_epoch
    producer.abort()
    assert producer.identity.producer_epoch == epoch + 1
    assert producer.end(True).error_code is ErrorCode.invalid_txn_state
    producer.abort()
    assert producer.identity.producer_epoch == epoch + 2


@only_protocol_2
def test_a_transaction_of_protocol_2_must_begin_at_sequence_zero(
    raw: RawClient, new_topic: NewTopic, protocol: int
) -> None:
    """B7, A3 (KIP-890): every epoch begins at 0, so that a first batch with another sequence is a gap."""
    topic = new_topic()
    producer = RawProducer(raw, topic, protocol=protocol).begin()
    assert producer.produce(topic, b"x", sequence=3).error_code is ErrorCode.out_of_order_sequence_number
    assert everything_in(raw, topic) == []
    assert producer.produce(topic, b"x").error_code is ErrorCode.none
    producer.commit()
    assert producer.produce(topic, b"y", sequence=1).error_code is ErrorCode.out_of_order_sequence_number
    producer.abort()
    assert visible_in(raw, topic) == [b"x"]


@ages
def test_an_end_of_protocol_1_leaves_the_epoch_and_repeats_its_answer(
    raw: RawClient, new_topic: NewTopic, age: str
) -> None:
    """B7 (KIP-98): commit after commit and abort after abort are repeats, the opposite is INVALID_TXN_STATE."""
    topic = new_topic()
    producer = RawProducer(raw, topic, age=age).begin()
    assert producer.end(True).error_code is ErrorCode.invalid_txn_state
    assert producer.end(False).error_code is ErrorCode.invalid_txn_state
    producer.write(topic, b"x")
    producer.commit()
    assert producer.end(True).error_code is ErrorCode.none
    assert producer.end(False).error_code is ErrorCode.invalid_txn_state
    producer.write(topic, b"y")
    producer.abort()
    assert producer.end(False).error_code is ErrorCode.none
    assert producer.end(True).error_code is ErrorCode.invalid_txn_state
    markers = [one.producer_epoch for one in everything_in(raw, topic) if one.is_control]
    assert markers == [producer.identity.producer_epoch] * 2


@pytest.mark.needs("verifies_partitions")
@ages
def test_protocol_1_must_add_a_partition_before_it_writes(raw: RawClient, new_topic: NewTopic, age: str) -> None:
    """B7 (KIP-890): INVALID_TXN_STATE, or TRANSACTION_ABORTABLE to those who know it, and nothing is stored."""
    topic, other = new_topic(), new_topic()
    producer = RawProducer(raw, topic, age=age).begin()
    version = raw.version(Api.PRODUCE, age)
    expected = ErrorCode.transaction_abortable if version >= 11 else ErrorCode.invalid_txn_state
    assert producer.produce(topic, b"before it began").error_code is expected
    producer.write(topic, b"x")
    assert producer.produce(other, b"not added").error_code is expected
    producer.commit()
    assert producer.produce(topic, b"after its end").error_code is expected
    assert visible_in(raw, topic) == [b"x"]
    assert everything_in(raw, other) == []


@pytest.mark.needs("verifies_partitions")
@ages
def test_protocol_1_must_add_a_group_before_it_commits_offsets(raw: RawClient, new_topic: NewTopic, age: str) -> None:
    """B7 (KIP-890): the same for TxnOffsetCommit without AddOffsetsToTxn."""
    topic = new_topic()
    producer = RawProducer(raw, topic, age=age).begin()
    producer.write(topic, b"x")
    version = raw.version(Api.TXN_OFFSET_COMMIT, age)
    expected = ErrorCode.transaction_abortable if version >= 4 else ErrorCode.invalid_txn_state
    assert producer.commit_offsets(f"{topic}-group", {(topic, 0): 1}) is expected
    producer.commit()
    assert committed_offset(raw, f"{topic}-group", topic) == (ErrorCode.none, -1)


@protocols
def test_records_outside_of_the_open_transaction_are_refused(
    raw: RawClient, new_topic: NewTopic, protocol: int
) -> None:
    """B6: a producer with an open transaction cannot slip a plain batch in between."""
    topic = new_topic()
    producer = RawProducer(raw, topic, protocol=protocol).begin()
    producer.write(topic, b"x")
    assert producer.produce(topic, b"plain", transactional=False).error_code is ErrorCode.invalid_txn_state
    producer.commit()
    assert visible_in(raw, topic) == [b"x"]


def test_used_up_epochs_bring_a_new_producer_id(kafka_without_sync: KafkaUnderTest, target: Target) -> None:
    """B7, A5: past epoch 32766 the id changes, with epoch 0, and a repeat of the last request finds its answer."""
    topic, protocol = f"exhausted-{time.time_ns()}", target.transaction_protocol
    create_topic(kafka_without_sync.bootstrap, topic)
    with connect(kafka_without_sync.bootstrap) as raw:
        first = RawProducer(raw, topic, protocol=protocol).begin().identity
        use_up_epochs(raw, topic, until=LAST_EPOCH - (1 if protocol == 2 else 0))
        producer = RawProducer(raw, topic, protocol=protocol).begin()
        if protocol == 1:
            assert producer.identity.producer_id != first.producer_id
            assert producer.identity.producer_epoch == 0
        else:
            assert producer.identity == (first.producer_id, LAST_EPOCH)
            producer.write(topic, b"under the last epoch")
            answer = producer.end(True)
            assert (answer.error_code, answer.producer_epoch) == (ErrorCode.none, 0)
            assert answer.producer_id != first.producer_id
            assert producer.end(True, identity=Identity(first.producer_id, LAST_EPOCH)) == answer
        producer.write(topic, b"under the new id")
        producer.commit()
        assert visible_in(raw, topic)[-1] == b"under the new id"


def use_up_epochs(raw: RawClient, transactional_id: str, *, until: int) -> None:
    """Each InitProducerId takes one epoch; they are pipelined to get there in seconds."""
    version = raw.version(Api.INIT_PRODUCER_ID)
    fields = {"transactional_id": transactional_id, "transaction_timeout": 60_000}
    epoch = under_way = 0
    while epoch < until:
        while under_way < 200 and epoch + under_way < until:
            raw.send(Api.INIT_PRODUCER_ID, version, **fields, producer_id=-1, producer_epoch=-1)
            under_way += 1
        answer = raw.receive()
        under_way -= 1
        if answer.error_code is ErrorCode.none:
            epoch = answer.producer_epoch
    assert under_way == 0

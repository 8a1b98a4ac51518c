"""What outlives the end of a broker, in order or by kill -9: producer state, decisions, and the time-out of the rest.

Everything is left behind at once, and the broker ended right after the answer to the last EndTxn; each test then looks
at one part of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from raw import RawClient, connect, settled, wait_until
from raw_producer import Identity, RawProducer, init_producer_id
from raw_reading import committed_offset, end_offset, everything_in, has_leader, is_abort, visible_in
from targets import RestartableKafka, Target

from semel.testing.exchange import create_topic
from semel.wire import Api, ErrorCode

KINDS = ("plain", "bumped", "decided", "crashed")
PARTITIONS = 3
SETTINGS = {
    "producer.id.expiration.check.interval.ms": "100",
    "transaction.remove.expired.transaction.cleanup.interval.ms": "200",
}
BROKER_RESOURCE = 4
SET = 0


@dataclass
class Left:
    """What was left behind. Its producers speak over the connection made after the restart."""

    raw: RawClient
    plain: RawProducer
    bumped: RawProducer
    decided: RawProducer
    crashed: RawProducer
    group: str

    def topic(self, kind: str) -> str:
        return f"{self.group}-{kind}"


@pytest.fixture(scope="module")
def own_kafka(target: Target) -> Iterator[RestartableKafka]:
    with target.start_own(SETTINGS) as kafka:
        yield kafka


@pytest.fixture(scope="module", params=["stopped", "killed"])
def left(request: pytest.FixtureRequest, target: Target, own_kafka: RestartableKafka) -> Iterator[Left]:
    name: str = request.param
    for kind in KINDS:
        create_topic(own_kafka.bootstrap, f"{name}-{kind}", partitions=PARTITIONS)
    with connect(own_kafka.bootstrap) as raw:
        left = _leave_behind(raw, name, target.transaction_protocol)
    own_kafka.restart(kill=name == "killed")
    with connect(own_kafka.bootstrap) as raw:
        for kind in KINDS:
            for partition in range(PARTITIONS):
                wait_until(lambda where=(f"{name}-{kind}", partition): has_leader(raw, *where), "a leader")
        left.raw = left.plain.raw = left.bumped.raw = left.decided.raw = left.crashed.raw = raw
        yield left


def _leave_behind(raw: RawClient, name: str, protocol: int) -> Left:
    plain, bumped = RawProducer(raw).begin(), RawProducer(raw).begin()
    decided = RawProducer(raw, f"{name}-decided", protocol=protocol).begin()
    crashed = RawProducer(raw, f"{name}-crashed", protocol=protocol).begin(timeout_ms=2_000)
    left = Left(raw, plain, bumped, decided, crashed, name)
    for number in range(6):
        assert plain.produce(left.topic("plain"), b"%d" % number).error_code is ErrorCode.none
    old = bumped.identity
    bumped.produce(left.topic("bumped"), b"old")
    bumped.become(Identity(old.producer_id, old.producer_epoch + 1))
    bumped.produce(left.topic("bumped"), b"new")
    for partition in range(PARTITIONS):
        decided.write(left.topic("decided"), b"decided", partition=partition)
    if protocol == 1:
        assert decided.add_offsets(left.group) is ErrorCode.none
    assert decided.commit_offsets(left.group, {(left.topic("decided"), 0): 5}) is ErrorCode.none
    for partition in range(PARTITIONS):
        crashed.write(left.topic("crashed"), b"crashed", partition=partition)
    assert decided.end(True).error_code is ErrorCode.none
    return left


def test_repeats_are_still_recognised(left: Left) -> None:
    """A4: the last batch is answered with its first offset; of those before, none is stored again.

    A snapshot has only the last batch of each producer, and an older one is then refused like a gap. Where the log is
    read again instead, more may be known.
    """
    topic = left.topic("plain")
    again = left.plain.produce(topic, b"5", sequence=5)
    assert (again.error_code, again.base_offset) == (ErrorCode.none, 5)
    fifth_last = left.plain.produce(topic, b"1", sequence=1)
    assert (fifth_last.error_code, fifth_last.base_offset) in [
        (ErrorCode.none, 1),
        (ErrorCode.out_of_order_sequence_number, -1),
    ]
    assert left.plain.produce(topic, b"0", sequence=0).error_code is ErrorCode.out_of_order_sequence_number
    assert end_offset(left.raw, topic) == 6


def test_gaps_are_still_refused_and_the_next_batch_fits(left: Left) -> None:
    """A4: the sequence goes on where it was."""
    topic = left.topic("plain")
    assert left.plain.produce(topic, b"7", sequence=7).error_code is ErrorCode.out_of_order_sequence_number
    assert left.plain.produce(topic, b"6", sequence=6).base_offset == 6


def test_a_lower_epoch_is_still_shut_out(left: Left) -> None:
    """A4, A6: with the epochs before, nothing can be written."""
    topic, now = left.topic("bumped"), left.bumped.identity
    old = Identity(now.producer_id, now.producer_epoch - 1)
    answer = left.bumped.produce(topic, b"zombie", sequence=1, identity=old)
    assert answer.error_code is ErrorCode.invalid_producer_epoch
    assert left.bumped.produce(topic, b"goes on", sequence=1).error_code is ErrorCode.none
    assert [one.value for one in everything_in(left.raw, topic)] == [b"old", b"new", b"goes on"]


def test_new_producers_get_ids_that_were_never_given(left: Left) -> None:
    """A4, A5: no id is given twice, over a restart."""
    given = {producer.identity.producer_id for producer in (left.plain, left.bumped, left.decided, left.crashed)}
    fresh = init_producer_id(left.raw, None)
    assert fresh.error_code is ErrorCode.none
    assert fresh.producer_id not in given


@pytest.mark.needs("completes_after_kill", when="killed")
def test_what_was_decided_is_completed(left: Left) -> None:
    """B2: the commit was answered and the broker ended at once: all partitions and the offsets show it."""
    topic = left.topic("decided")
    for partition in range(PARTITIONS):
        wait_until(
            lambda partition=partition: visible_in(left.raw, topic, partition) == [b"decided"],
            f"the commit in partition {partition}",
        )
        # A coordinator that does not know whether its markers were written writes them again, which does no harm.
        _, *markers = everything_in(left.raw, topic, partition)
        assert markers
        assert all(one.is_control and not is_abort(one) for one in markers)
    wait_until(
        lambda: committed_offset(left.raw, left.group, topic) == (ErrorCode.none, 5), "the offset in the transaction"
    )


def test_the_owner_of_a_decided_transaction_goes_on(left: Left) -> None:
    """B2: with the identity that it had, in the next transaction."""
    topic = left.topic("decided")
    left.decided.write(topic, b"next")
    left.decided.commit()
    assert visible_in(left.raw, topic) == [b"decided", b"next"]


@pytest.mark.needs("completes_after_kill", when="killed")
def test_what_was_not_decided_is_aborted_by_its_timeout(left: Left) -> None:
    """B3: records of the open transaction stay hidden, and readers can go on behind them."""
    topic = left.topic("crashed")
    for partition in range(PARTITIONS):
        wait_until(
            lambda partition=partition: end_offset(left.raw, topic, partition, committed=True) >= 2,
            f"the abort in partition {partition}",
        )
        _, *markers = everything_in(left.raw, topic, partition)
        assert all(one.is_control and is_abort(one) for one in markers)
        assert visible_in(left.raw, topic, partition) == []
    assert left.crashed.end(True).error_code in (
        ErrorCode.producer_fenced,
        ErrorCode.invalid_producer_epoch,
        ErrorCode.invalid_txn_state,
    )


@pytest.mark.needs("has_producer_expiry")
def test_idle_producers_are_forgotten(own_kafka: RestartableKafka) -> None:
    """A7: after producer.id.expiration.ms a producer is unknown, unless it has a transaction open."""
    topic = f"idle-{time.time_ns()}"
    create_topic(own_kafka.bootstrap, topic)
    with connect(own_kafka.bootstrap) as raw:
        idle, open_one = RawProducer(raw).begin(), RawProducer(raw, topic).begin()
        idle.produce(topic, b"0")
        open_one.write(topic, b"open")
        assert _producers_of(raw, topic) == {idle.identity.producer_id, open_one.identity.producer_id}
        _set_producer_expiration(raw, "1")
        try:
            wait_until(lambda: _producers_of(raw, topic) == {open_one.identity.producer_id}, "the expiry")
        finally:
            _set_producer_expiration(raw, "86400000")
        assert idle.produce(topic, b"0", sequence=0).base_offset == 2
        assert idle.produce(topic, b"5", sequence=5).error_code is ErrorCode.out_of_order_sequence_number
        open_one.commit()


def _producers_of(raw: RawClient, topic: str) -> set[int]:
    answer = settled(
        lambda: raw.call(Api.DESCRIBE_PRODUCERS, 0, topics=[{"name": topic, "partition_indexes": [0]}]),
        lambda answer: answer.topics[0].partitions[0].error_code,
    )
    return {one.producer_id for one in answer.topics[0].partitions[0].active_producers}


def _set_producer_expiration(raw: RawClient, value: str) -> None:
    answer = raw.call(
        Api.INCREMENTAL_ALTER_CONFIGS,
        raw.version(Api.INCREMENTAL_ALTER_CONFIGS),
        resources=[
            {
                "resource_type": BROKER_RESOURCE,
                "resource_name": "",
                "configs": [{"name": "producer.id.expiration.ms", "config_operation": SET, "value": value}],
            }
        ],
        validate_only=False,
    )
    assert answer.responses[0].error_code is ErrorCode.none, answer

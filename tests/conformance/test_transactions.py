"""Transactions of Semel's producer, judged by another client."""

from __future__ import annotations

import itertools
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pyarrow as pa
import pytest
from observer import committed_offsets, records_of, values_of, wait_until_settled
from targets import KafkaUnderTest, NewTopic, Target

from semel.client import transaction_owner
from semel.client.cluster import Cluster, CoordinatorKind
from semel.client.partitions import TopicPartition
from semel.client.producer import Outcome, Producer
from semel.client.settings import parse_config
from semel.client.transaction_state import State
from semel.client.transactions import GroupMember, TransactionCalls
from semel.errors import CommitUnknown, Fenced, KafkaError, RequestTimedOut, SemelError, TransactionAborted
from semel.wire import Api, ErrorCode

LAST_EPOCH = 32_766
"""The highest epoch a producer gets; the one after it makes the coordinator hand out a new producer id."""


def make_producer(kafka: KafkaUnderTest, name: str, **settings: Any) -> Producer:
    return Producer(bootstrap_servers=kafka.bootstrap, transactional_id=name, **settings)


def test_the_protocol_is_the_one_the_cluster_has_finalized(
    kafka: KafkaUnderTest, target: Target, new_topic: NewTopic
) -> None:
    """B7: protocol 2 where transaction.version says so, protocol 1 elsewhere."""
    with make_producer(kafka, new_topic()) as producer:
        assert producer.transaction_protocol == target.transaction_protocol


def test_a_commit_shows_all_topics_partitions_and_offsets_at_once(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """B1: records of two topics and the consumed offsets become visible together, and not before the commit."""
    left, right, group = new_topic(partitions=2), new_topic(), f"group-{time.time_ns()}"
    with make_producer(kafka, left) as producer:
        with producer.transaction():
            producer.send_table(
                left, pa.table({"value": [b"%d" % n for n in range(100)], "key": [b"%d" % n for n in range(100)]})
            )
            producer.send(right, b"total")
            producer.send_offsets({TopicPartition(left, 1): 17}, group)
            producer.flush()
            assert values_of(kafka.bootstrap, left, 2) == []
            assert values_of(kafka.bootstrap, right) == []
            assert len(values_of(kafka.bootstrap, left, 2, committed=False)) == 100
        wait_until_settled(kafka.bootstrap, left, 2)
        assert values_of(kafka.bootstrap, left, 2) == sorted(b"%d" % n for n in range(100))
        assert values_of(kafka.bootstrap, right) == [b"total"]
        assert committed_offsets(kafka.bootstrap, group, {left: 2}) == {(left, 1): 17}


def test_an_abort_leaves_nothing_to_see_and_the_producer_goes_on(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """B6: aborted records are in the log and hidden; those of the transactions around them are not."""
    topic, group = new_topic(partitions=2), f"group-{time.time_ns()}"
    with make_producer(kafka, topic) as producer:
        for number, keep in enumerate([True, False, True, False]):
            producer.begin()
            for partition in range(2):
                producer.send(topic, b"%d" % number, partition=partition)
            producer.send_offsets({TopicPartition(topic, 0): number + 1}, group)
            if keep:
                producer.commit()
            else:
                producer.flush()
                producer.abort()
    wait_until_settled(kafka.bootstrap, topic, 2)
    assert records_of(kafka.bootstrap, topic, 2) == {0: [b"0", b"2"], 1: [b"0", b"2"]}
    assert records_of(kafka.bootstrap, topic, 2, committed=False) == {
        0: [b"0", b"1", b"2", b"3"],
        1: [b"0", b"1", b"2", b"3"],
    }
    assert committed_offsets(kafka.bootstrap, group, {topic: 1}) == {(topic, 0): 3}


def test_an_exception_in_the_block_aborts(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """D1: code that fails half-way leaves no half of its output."""
    topic = new_topic()
    with make_producer(kafka, topic) as producer:

        def fail_half_way() -> None:
            with producer.transaction():
                producer.send(topic, b"half")
                producer.flush()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail_half_way()
        with producer.transaction():
            producer.send(topic, b"whole")
    assert values_of(kafka.bootstrap, topic) == [b"whole"]


def test_transactions_also_work_where_the_owner_cannot_be_asked_for(
    kafka: KafkaUnderTest, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B7: brokers before 3.0 have no DescribeTransactions; commit, abort and fencing do without."""
    monkeypatch.setattr(TransactionCalls, "owner", lambda self, **_: None)
    topic = new_topic()
    with make_producer(kafka, topic) as producer:
        for number, keep in enumerate([True, False, True, False, True]):
            producer.begin()
            producer.send(topic, b"%d" % number)
            producer.flush()
            if keep:
                producer.commit()
            else:
                producer.abort()
        with make_producer(kafka, topic), pytest.raises(Fenced):
            try_transaction(producer, topic)
    assert values_of(kafka.bootstrap, topic) == [b"0", b"2", b"4"]


def test_an_empty_transaction_costs_no_request(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """Committing or aborting nothing is legal and tells the coordinator nothing."""
    topic = new_topic()
    with make_producer(kafka, topic) as producer:
        identity = producer.identity
        with producer.transaction():
            pass
        producer.begin()
        producer.abort()
        assert producer.state is State.READY
        assert producer.identity == identity


def test_the_first_of_two_producers_with_one_id_is_fenced(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """B4: with an open transaction or without one, the older producer gets the fenced error and writes nothing more."""
    topic = new_topic()
    with make_producer(kafka, topic) as idle, make_producer(kafka, topic) as open_one:
        open_one.begin()
        open_one.send(topic, b"from the open one")
        open_one.flush()
        with make_producer(kafka, topic) as newest:
            with pytest.raises(Fenced, match="Stop this instance"):
                open_one.commit()
            assert open_one.state is State.DEAD
            with pytest.raises(Fenced):
                open_one.begin()
            idle.begin()
            idle.send(topic, b"from the idle one")
            with pytest.raises((Fenced, TransactionAborted)):
                idle.commit()
            if idle.state is not State.DEAD:
                with pytest.raises(Fenced):
                    idle.abort()
            assert idle.state is State.DEAD
            with newest.transaction():
                newest.send(topic, b"from the newest")
    assert values_of(kafka.bootstrap, topic) == [b"from the newest"]


def test_a_fenced_producer_does_not_steal_the_id_back(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """B4: whatever the older one tries after being fenced, the newer one goes on unharmed."""
    topic = new_topic()
    with make_producer(kafka, topic) as older:
        older.begin()
        older.send(topic, b"older")
        older.flush()
        with make_producer(kafka, topic) as newer:
            newer.begin()
            newer.send(topic, b"newer")
            newer.flush()
            with pytest.raises(Fenced):
                older.abort()
            newer.commit()
            with newer.transaction():
                newer.send(topic, b"newer again")
    assert values_of(kafka.bootstrap, topic) == [b"newer", b"newer again"]


def test_a_producer_whose_transaction_a_successor_has_ended_is_fenced_though_the_successor_still_waits(
    kafka: KafkaUnderTest, new_topic: NewTopic
) -> None:
    """B4: the coordinator first aborts, and gives the successor its epoch at its next try; it looks like a time-out."""
    topic = new_topic()
    with (
        make_producer(kafka, topic) as older,
        Cluster(parse_config({"bootstrap.servers": kafka.bootstrap}).client) as one,
    ):
        older.begin()
        older.send(topic, b"older")
        older.flush()
        successor = TransactionCalls(one, topic, 60_000, one.transaction_protocol)
        with pytest.raises(KafkaError) as told:
            successor.init_producer_id(patience=one.patience(0))
        assert told.value.code == ErrorCode.concurrent_transactions
        wait_until_settled(kafka.bootstrap, topic, 1)
        with ThreadPoolExecutor(1) as pool:
            committing = pool.submit(older.commit)
            assert wait([committing], timeout=0.5).not_done or isinstance(committing.exception(), Fenced)
            successor.init_producer_id()
            with pytest.raises(Fenced, match="has taken over"):
                committing.result(10)
        assert older.state is State.DEAD
    assert values_of(kafka.bootstrap, topic) == []


def test_a_transaction_that_somebody_ended_and_nobody_took_over_is_not_blamed_on_its_timeout(
    kafka: KafkaUnderTest, new_topic: NewTopic
) -> None:
    """B4, B5: whoever asked for the id went away again; the producer is told so, and goes on."""
    topic = new_topic()
    with (
        make_producer(kafka, topic) as producer,
        Cluster(parse_config({"bootstrap.servers": kafka.bootstrap}).client) as one,
    ):
        producer.begin()
        producer.send(topic, b"ended")
        producer.flush()
        with pytest.raises(KafkaError):
            TransactionCalls(one, topic, 60_000, one.transaction_protocol).init_producer_id(patience=one.patience(0))
        wait_until_settled(kafka.bootstrap, topic, 1)
        with pytest.raises(TransactionAborted, match=r"before transaction\.timeout\.ms"):
            producer.commit()
        producer.abort()
        with producer.transaction():
            producer.send(topic, b"next")
    assert values_of(kafka.bootstrap, topic) == [b"next"]


def test_a_producer_that_slept_between_transactions_does_not_steal_the_id_back(
    kafka: KafkaUnderTest, new_topic: NewTopic
) -> None:
    """B4: after a commit the next epoch may be a successor's, whether it has begun a transaction or not."""
    for successor_is_writing in (False, True):
        topic = new_topic()
        with make_producer(kafka, topic) as sleeper:
            with sleeper.transaction():
                sleeper.send(topic, b"0")
            wait_until_settled(kafka.bootstrap, topic, 1)
            with make_producer(kafka, topic) as successor:
                successor.begin()
                if successor_is_writing:
                    successor.send(topic, b"1")
                    successor.flush()
                with pytest.raises(SemelError) as told:
                    try_transaction(sleeper, topic)
                assert isinstance(told.value, Fenced)
                assert sleeper.state is State.DEAD
                successor.send(topic, b"2")
                successor.commit()
        expected = [b"0", b"1", b"2"] if successor_is_writing else [b"0", b"2"]
        assert values_of(kafka.bootstrap, topic) == expected


def test_resolving_an_unknown_commit_does_not_disturb_a_successor(
    kafka: KafkaUnderTest, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B4, D3: whoever finds out late what its commit became leaves the newer producer's open transaction alone."""
    topic = new_topic()
    with make_producer(kafka, topic) as older:
        older.begin()
        older.send(topic, b"older")
        older.flush()
        with monkeypatch.context() as patched:
            patched.setattr(TransactionCalls, "end", lose_answer)
            with pytest.raises(CommitUnknown):
                older.commit()
        with make_producer(kafka, topic) as successor:
            successor.begin()
            successor.send(topic, b"successor")
            successor.flush()
            assert older.resolve() is Outcome.ABORTED
            with pytest.raises(Fenced):
                older.begin()
            successor.commit()
    assert values_of(kafka.bootstrap, topic) == [b"successor"]


def lose_answer(*_: Any, **__: Any) -> None:
    raise RequestTimedOut("The answer was lost.")


def leave_in_doubt(producer: Producer, topic: str, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction with records and offsets whose commit is lost before it reaches the coordinator."""
    producer.begin()
    producer.send(topic, b"in doubt")
    producer.send_offsets({TopicPartition(topic, 0): 5}, group)
    with monkeypatch.context() as patched:
        patched.setattr(TransactionCalls, "end", lose_answer)
        with pytest.raises(CommitUnknown):
            producer.commit()


def test_a_commit_whose_marker_is_not_found_stays_unknown(
    kafka: KafkaUnderTest, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D5: offsets are no witness for records; without a marker nothing is claimed, and it can be asked again."""
    topic = new_topic()
    with make_producer(kafka, topic) as producer:
        leave_in_doubt(producer, topic, f"group-{time.time_ns()}", monkeypatch)
        with monkeypatch.context() as patched:
            patched.setattr(transaction_owner, "find_marker", lambda *_, **__: None)
            with pytest.raises(CommitUnknown, match="no marker"):
                producer.resolve()
        assert producer.state is State.UNKNOWN
        assert producer.resolve() is Outcome.ABORTED


def test_a_coordinator_that_makes_no_progress_ends_in_an_error_and_not_in_a_wait_without_end(
    kafka: KafkaUnderTest, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D5: the producer stays in doubt, and finds out when the coordinator can be moved again."""
    topic = new_topic()

    def be_busy(*_: Any, **__: Any) -> None:
        raise KafkaError("Busy.", code=ErrorCode.concurrent_transactions)

    with make_producer(kafka, topic, default_api_timeout_ms=2_000) as producer:
        leave_in_doubt(producer, topic, f"group-{time.time_ns()}", monkeypatch)
        with monkeypatch.context() as patched:
            patched.setattr(TransactionCalls, "init_producer_id", be_busy)
            with pytest.raises((RequestTimedOut, KafkaError)):
                producer.resolve()
        assert producer.state is State.UNKNOWN
        assert producer.resolve() is Outcome.ABORTED


@pytest.mark.parametrize("fate", ["carried out", "never arrived", "carried out and moved on from"])
def test_an_unknown_commit_of_offsets_alone_is_told_by_the_group(
    kafka: KafkaUnderTest, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    """D5: without records there is no marker to read; where the group's offsets prove nothing, nothing is claimed."""
    topic, group = new_topic(), f"group-{time.time_ns()}"
    end = TransactionCalls.end

    def end_and_lose_answer(calls: TransactionCalls, *arguments: Any, **named: Any) -> None:
        end(calls, *arguments, **named)
        lose_answer()

    with make_producer(kafka, topic) as producer, make_producer(kafka, f"{topic}-other") as other:
        producer.begin()
        producer.send_offsets({TopicPartition(topic, 0): 5}, group)
        with monkeypatch.context() as patched:
            patched.setattr(TransactionCalls, "end", lose_answer if fate == "never arrived" else end_and_lose_answer)
            with pytest.raises(CommitUnknown):
                producer.commit()
        if fate == "carried out and moved on from":
            with other.transaction():
                other.send_offsets({TopicPartition(topic, 0): 9}, group)
            with pytest.raises(CommitUnknown, match="moved the group's offsets on"):
                producer.resolve()
            assert producer.state is State.UNKNOWN
        else:
            assert producer.resolve() is (Outcome.COMMITTED if fate == "carried out" else Outcome.ABORTED)
            with producer.transaction():
                producer.send(topic, b"goes on")
    offsets = committed_offsets(kafka.bootstrap, group, {topic: 1})
    assert list(offsets.values()) == {"carried out": [5], "never arrived": []}.get(fate, [9])


def try_transaction(producer: Producer, topic: str) -> None:
    """What an application does: one transaction, aborted if it fails."""
    try:
        with producer.transaction():
            producer.send(topic, b"of the fenced one")
    except TransactionAborted:
        producer.begin()


def test_a_transaction_that_outlives_its_timeout_is_aborted_and_the_producer_recovers(
    kafka: KafkaUnderTest, new_topic: NewTopic
) -> None:
    """B3, B5: the coordinator aborts it by itself; the late commit is refused; the next transaction works."""
    topic = new_topic()
    with make_producer(kafka, topic, transaction_timeout_ms=1_000) as producer:
        producer.begin()
        producer.send(topic, b"too slow")
        producer.flush()
        wait_until_settled(kafka.bootstrap, topic, 1)
        with pytest.raises(TransactionAborted, match=r"transaction\.timeout\.ms"):
            producer.commit()
        assert values_of(kafka.bootstrap, topic) == []
        producer.abort()
        with producer.transaction():
            producer.send(topic, b"in time")
    assert values_of(kafka.bootstrap, topic) == [b"in time"]


def test_a_crash_before_the_commit_ends_in_abort_by_the_successor(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """B3: a new producer with the same id ends what the dead one left open, and does not wait for the time-out."""
    topic = new_topic()
    crashed = make_producer(kafka, topic)
    crashed.begin()
    crashed.send(topic, b"lost with the crash")
    crashed.flush()
    crashed.cluster.close()
    with make_producer(kafka, topic) as successor, successor.transaction():
        successor.send(topic, b"after it")
    assert values_of(kafka.bootstrap, topic) == [b"after it"]


def test_a_timeout_above_the_brokers_maximum_is_refused_with_what_to_do(
    kafka: KafkaUnderTest, new_topic: NewTopic
) -> None:
    """B5: the sentence names both settings."""
    with pytest.raises(KafkaError, match=r"transaction\.timeout\.ms.*transaction\.max\.timeout\.ms"):
        make_producer(kafka, new_topic(), transaction_timeout_ms=100_000_000)


def test_every_transaction_has_an_epoch_of_its_own(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """B7: on both protocols, so that a delayed EndTxn of one transaction can never end the next."""
    topic = new_topic()
    epochs: list[int] = []
    with make_producer(kafka, topic) as producer:
        for _ in range(3):
            producer.begin()
            epochs.append(producer.identity.producer_epoch)
            producer.send(topic, b"x")
            producer.commit()
        producer.begin()
        epochs.append(producer.identity.producer_epoch)
        producer.send(topic, b"y")
        producer.flush()
        producer.abort()
        producer.begin()
        epochs.append(producer.identity.producer_epoch)
        producer.abort()
    assert all(later > earlier for earlier, later in itertools.pairwise(epochs)), epochs


def test_a_delayed_end_of_one_transaction_cannot_end_the_next(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """B7: the hole of protocol 1, closed by the epoch: a repeat of the old EndTxn is refused."""
    topic = new_topic()
    with make_producer(kafka, topic) as producer:
        producer.begin()
        producer.send(topic, b"first")
        old = producer.identity
        producer.commit()
        producer.begin()
        producer.send(topic, b"second")
        producer.flush()
        late = producer.cluster.call(
            producer.cluster.coordinator(CoordinatorKind.TRANSACTION, topic),
            Api.END_TXN,
            highest=4,
            transactional_id=topic,
            producer_id=old.producer_id,
            producer_epoch=old.producer_epoch,
            committed=True,
        )
        assert late.error_code in (ErrorCode.producer_fenced, ErrorCode.invalid_producer_epoch)
        producer.abort()
    assert values_of(kafka.bootstrap, topic) == [b"first"]


@pytest.mark.needs("has_time")
def test_an_exhausted_epoch_brings_a_new_producer_id(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """B7, A5: transactions go on over the end of the epochs, each record once."""
    topic = new_topic()
    use_up_epochs(kafka, topic, until=LAST_EPOCH - 4)
    identities: list[tuple[int, int]] = []
    with make_producer(kafka, topic) as producer:
        for number in range(10):
            with producer.transaction():
                identities.append(producer.identity)
                producer.send(topic, b"%d" % number)
    assert identities[0][1] >= LAST_EPOCH - 4
    assert identities[-1][0] != identities[0][0], identities
    assert len(set(identities)) == len(identities)
    assert values_of(kafka.bootstrap, topic) == [b"%d" % number for number in range(10)]


def use_up_epochs(kafka: KafkaUnderTest, transactional_id: str, *, until: int) -> None:
    """Each InitProducerId takes one epoch; they are pipelined to get there in seconds."""
    with Cluster(parse_config({"bootstrap.servers": kafka.bootstrap}).client) as cluster:
        Producer(bootstrap_servers=kafka.bootstrap, transactional_id=transactional_id).close()
        node = cluster.coordinator(CoordinatorKind.TRANSACTION, transactional_id)
        under_way = deque(_init(cluster, node, transactional_id) for _ in range(100))
        epoch = 0
        while under_way:
            cluster.wait_any([under_way[0]])
            epoch = max(epoch, under_way.popleft().result().producer_epoch)
            if epoch + len(under_way) < until - 1:
                under_way.append(_init(cluster, node, transactional_id))


def _init(cluster: Cluster, node: int, transactional_id: str):
    return cluster.submit(
        node,
        Api.INIT_PRODUCER_ID,
        transactional_id=transactional_id,
        transaction_timeout=60_000,
        producer_id=-1,
        producer_epoch=-1,
    )


def test_offsets_of_a_stale_generation_are_refused_and_the_transaction_with_them(
    kafka: KafkaUnderTest, new_topic: NewTopic
) -> None:
    """C1: a member that the group no longer has cannot commit its positions."""
    topic, group = new_topic(), f"group-{time.time_ns()}"
    with make_producer(kafka, topic) as producer:
        producer.begin()
        producer.send(topic, b"of a zombie")
        with pytest.raises(KafkaError) as refused:
            producer.send_offsets({TopicPartition(topic, 0): 1}, GroupMember(group, generation_id=3, member_id="gone"))
        assert refused.value.code in (ErrorCode.unknown_member_id, ErrorCode.illegal_generation)
        assert producer.state is State.DOOMED
        producer.abort()
    assert values_of(kafka.bootstrap, topic) == []


def test_a_doomed_transaction_that_is_surely_open_is_aborted_and_the_next_one_goes_on(
    kafka: KafkaUnderTest, new_topic: NewTopic
) -> None:
    """C1: to ask who has ended it must not end it under an epoch that is not its own: Kafka 2.5 takes that, writes no
    marker for it, and holds the id for ever."""
    topic, group = new_topic(), f"group-{time.time_ns()}"
    with make_producer(kafka, topic) as producer:
        producer.begin()
        producer.send(topic, b"of a zombie")
        producer.flush()
        with pytest.raises(KafkaError):
            producer.send_offsets({TopicPartition(topic, 0): 1}, GroupMember(group, generation_id=3, member_id="gone"))
        producer.abort()
        with producer.transaction():
            producer.send(topic, b"after it")
    assert values_of(kafka.bootstrap, topic) == [b"after it"]


def test_back_to_back_transactions_do_not_wait_a_back_off_for_the_markers(
    kafka: KafkaUnderTest, new_topic: NewTopic
) -> None:
    """The pauses while markers are written are milliseconds, and no transaction pauses 100 ms in all."""
    topic = new_topic(partitions=2)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(seconds)

    with make_producer(kafka, topic, sleep=sleep) as producer:
        with producer.transaction():  # the first also waits for internal topics to be created
            producer.send(topic, b"warm", partition=0)
        spent: list[float] = []
        for number in range(30):
            pauses.clear()
            with producer.transaction():
                for partition in range(2):
                    producer.send(topic, b"%d" % number, partition=partition)
            spent.append(sum(pauses))
    print(f"pauses per transaction: median {sorted(spent)[15] * 1000:.1f} ms, worst {max(spent) * 1000:.1f} ms")
    assert sorted(spent)[15] < 0.05
    assert len(values_of(kafka.bootstrap, topic, 2)) == 61

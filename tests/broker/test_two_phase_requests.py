"""Two-phase commit (KIP-939) as clients of the broker meet it: on the wire, through a loss of power, and when shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

import semel
from semel.broker.acls import AllowAll, Operation, Requester, ResourceType
from semel.broker.durability import Fsync
from semel.broker.metrics_page import read_numbers
from semel.broker.pacing import finish_now
from semel.cli.inspect.transactions import _report as report
from semel.client.cluster import Cluster
from semel.client.producer import Producer
from semel.client.settings import parse_config
from semel.errors import CommitUnknown, Fenced
from semel.inspect.transactions import known_transactions, open_transactions
from semel.testing.embedded import EmbeddedBroker
from semel.testing.manual_clock import ManualClock
from semel.testing.simulated_disk import SimulatedDisk
from semel.verify.chaos_reading import ask
from semel.wire.api import Api

TOPIC = "orders"
ON = {"transaction.two.phase.commit.enable": "true"}
DAY_MS = 86_400_000
LEFT_BEHIND: list[Producer] = []
"""They are not heard of any more, but their connections must not outlive the test."""


class WithoutTwoPhase(AllowAll):
    """Whoever may do everything else."""

    def allows(self, context: Requester | None, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        return operation is not Operation.TWO_PHASE_COMMIT


@pytest.fixture(autouse=True)
def disconnected() -> Iterator[None]:
    yield
    while LEFT_BEHIND:
        LEFT_BEHIND.pop().cluster.close()


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config=ON, clock=ManualClock()) as broker:
        make_topic(broker)
        yield broker


def make_topic(broker: EmbeddedBroker) -> None:
    with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.create_topics(TOPIC, partitions=2)


def connected(broker: EmbeddedBroker) -> Cluster:
    return Cluster(parse_config({"bootstrap.servers": broker.bootstrap}).client)


def producer(broker: EmbeddedBroker, **settings: Any) -> Producer:
    return Producer(bootstrap_servers=broker.bootstrap, transactional_id="t", **settings)


def left_behind(broker: EmbeddedBroker, **settings: Any) -> Producer:
    LEFT_BEHIND.append(producer(broker, **settings))
    return LEFT_BEHIND[-1]


def prepare(broker: EmbeddedBroker, *values: bytes) -> Producer:
    """A producer that has written records in a two-phase transaction, and is then not heard of any more."""
    made = left_behind(broker, transaction_timeout_ms=1_000)
    assert made.try_two_phase_commit()
    made.begin()
    for value in values:
        made.send(TOPIC, value, partition=0)
    made.flush()
    return made


def committed(broker: EmbeddedBroker) -> list[bytes]:
    with semel.Fetcher({"bootstrap.servers": broker.bootstrap}) as fetcher:
        fetcher.assign({(TOPIC, 0): "earliest", (TOPIC, 1): "earliest"})
        tables = list(fetcher.read_until(fetcher.end_offsets()))
        return [value for table in tables for value in table["value"].to_pylist()]


def init(broker: EmbeddedBroker, version: int = 6, **fields: Any) -> Any:
    values = {"transactional_id": "t", "transaction_timeout": 1_000, **fields}
    return ask(broker.bootstrap, Api.INIT_PRODUCER_ID, version, **values)


def state_of(broker: EmbeddedBroker) -> str:
    found = broker.call(lambda: broker.broker.transactions.coordinator.get("t"))
    assert found is not None
    return found.status.title


def test_version_6_is_offered_where_it_is_switched_on() -> None:
    """So that a client knows without asking. It takes protocol 2, whose log can hold two identities."""
    for config, highest in ((ON, 6), ({}, 5), ({**ON, "transaction.version": "1"}, 5)):
        with EmbeddedBroker(config=config) as broker, connected(broker) as cluster:
            assert cluster.speaks(Api.INIT_PRODUCER_ID, highest)
            assert not cluster.speaks(Api.INIT_PRODUCER_ID, highest + 1)
            answer = init(broker, enable2_pc=True)
            expected = {6: ErrorCode.none, 5: ErrorCode.transactional_id_authorization_failed}[highest]
            if config.get("transaction.version"):
                expected = ErrorCode.unsupported_version
            assert answer.error_code is expected


def test_the_answer_has_both_identities(broker: EmbeddedBroker) -> None:
    """The new owner's, and the one under which the open transaction was begun; -1 where there is none."""
    first = init(broker, enable2_pc=True)
    assert (first.producer_epoch, first.ongoing_txn_producer_id, first.ongoing_txn_producer_epoch) == (0, -1, -1)
    prepare(broker, b"a")
    kept = init(broker, enable2_pc=True, keep_prepared_txn=True)
    assert kept.producer_id == kept.ongoing_txn_producer_id == first.producer_id
    assert kept.producer_epoch == kept.ongoing_txn_producer_epoch + 1


def test_two_phase_commit_takes_a_permission_of_its_own(broker: EmbeddedBroker) -> None:
    """TWO_PHASE_COMMIT on the transactional id, besides WRITE. To keep what is open takes no more than WRITE."""

    def forbid() -> None:
        broker.broker.authorizer = WithoutTwoPhase()

    broker.call(forbid)
    assert init(broker, enable2_pc=True).error_code is ErrorCode.transactional_id_authorization_failed
    assert init(broker, keep_prepared_txn=True).error_code is ErrorCode.none
    with producer(broker) as plain:
        assert not plain.try_two_phase_commit()
        with plain.transaction():
            plain.send(TOPIC, b"a")
    assert committed(broker) == [b"a"]


def test_a_prepared_transaction_waits_for_its_decision(broker: EmbeddedBroker) -> None:
    """For days if need be; the next producer of the id finds it and ends it either way."""
    for decided in (True, False):
        first = prepare(broker, b"prepared %d" % decided)
        broker.clock.advance(ms=2 * DAY_MS)
        with producer(broker) as second:
            assert second.prepared == first.identity
            assert state_of(broker) == "Ongoing"
            second.end_prepared(commit=decided)
            assert second.prepared is None
            with second.transaction():
                second.send(TOPIC, b"next %d" % decided, partition=0)
        with pytest.raises((Fenced, CommitUnknown)):  # its connection was closed as idle, so it has to send twice
            first.commit()
    assert committed(broker) == [b"prepared 1", b"next 1", b"next 0"]


def test_a_producer_that_knows_of_no_decision_aborts_what_was_prepared(broker: EmbeddedBroker) -> None:
    """It begins a transaction of its own: that is how an operator gets rid of one. And its own has a timeout again."""
    prepare(broker, b"prepared")
    with producer(broker, transaction_timeout_ms=1_000) as plain:
        with plain.transaction():
            plain.send(TOPIC, b"plain")
        plain.begin()
        plain.send(TOPIC, b"late")
        plain.flush()
        broker.clock.advance(ms=60_000)
        assert state_of(broker) == "CompleteAbort"
    assert committed(broker) == [b"plain"]


def test_what_is_not_two_phase_is_aborted_at_once_as_ever(broker: EmbeddedBroker) -> None:
    """Readers must not wait for a transaction whose producer is gone."""
    gone = left_behind(broker)
    gone.begin()
    gone.send(TOPIC, b"gone")
    gone.flush()
    with producer(broker) as second:
        assert second.prepared is None
        assert state_of(broker) != "Ongoing"


def test_a_prepared_transaction_is_shown_as_one_and_not_as_hanging(broker: EmbeddedBroker) -> None:
    """In the metrics, in `semel inspect transactions`, and where it is judged what holds readers back."""
    prepare(broker, b"a")
    with connected(broker) as cluster:
        [known] = known_transactions(cluster)
        assert known.description.is_two_phase
        [held] = open_transactions(cluster, [(TOPIC, 0)])
        assert held.standing == "alive"
        assert "no timeout ends it" in held.explanation
        lines = "\n".join(report(cluster, [], []).lines)
        assert "two-phase" in lines
        assert "hang" not in lines
    seen = {family.name: family.values for family in broker.call(lambda: finish_now(read_numbers(broker.broker)))}
    assert seen["open_two_phase_transactions"] == {(): 1}


class Disk:
    """A broker on a disk that can lose what was not synced."""

    def __init__(self, fsync: Fsync = Fsync.COMMIT) -> None:
        self.disk = SimulatedDisk(seed=1)
        self.disk.make_directory("data")
        self.disk.sync_directory("")
        self.broker = EmbeddedBroker(disk=self.disk, config=ON, fsync=fsync)

    def cut_power(self, seed: int) -> None:
        self.broker.crash()
        self.disk = self.disk.reboot(power_cut=True, seed=seed)
        self.broker.restart(disk=self.disk, power_was_cut=True)


@pytest.mark.parametrize("seed", range(6))
def test_what_was_acknowledged_in_a_two_phase_transaction_survives_the_loss_of_power(seed: int) -> None:
    """It may have been decided elsewhere since: records, positions and the transaction are there to be committed."""
    scene = Disk()
    with scene.broker as broker:
        make_topic(broker)
        first = prepare(broker, *(b"%d" % number for number in range(5)))
        first.send_offsets({semel.TopicPartition(TOPIC, 1): 7}, "group")
        scene.cut_power(seed)
        with producer(broker) as second:
            assert second.prepared == first.identity
            second.end_prepared(commit=True)
        assert committed(broker) == [b"%d" % number for number in range(5)]
        with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            place = semel.TopicPartition(TOPIC, 1)
            assert admin.committed_offsets("group", [place])[place].offset == 7


@pytest.mark.parametrize("seed", range(6))
def test_an_owner_goes_on_with_a_two_phase_transaction_after_the_loss_of_power(seed: int) -> None:
    """It has not prepared it yet, writes more, and commits: all of it is there, once."""
    scene = Disk()
    with scene.broker as broker:
        make_topic(broker)
        owner = prepare(broker, b"before")
        scene.cut_power(seed)
        owner.send(TOPIC, b"after", partition=0)
        owner.send(TOPIC, b"elsewhere", partition=1)
        owner.commit()
        assert committed(broker) == [b"before", b"after", b"elsewhere"]


def test_a_partition_that_only_the_disk_knows_is_taken_into_the_transaction() -> None:
    """The loss of power took the note that it came in, but not its records: their producer sends them again."""
    scene = Disk()
    with scene.broker as broker:
        make_topic(broker)
        owner = prepare(broker, b"before")

        async def forget() -> None:
            coordinator = broker.broker.transactions.coordinator
            known = coordinator.get("t")
            assert known is not None
            coordinator.replay(replace(known, partitions=frozenset()))
            await broker.broker.transactions.recover(power_was_lost=True)

        broker.call(forget)
        owner.commit()
        assert committed(broker) == [b"before"]


def test_where_nothing_is_synced_a_loss_of_power_aborts_two_phase_transactions_too() -> None:
    """With fsync never nobody knows what of it is left, so it must not be committed."""
    scene = Disk(Fsync.NEVER)
    with scene.broker as broker:
        make_topic(broker)
        first = prepare(broker, b"a")
        scene.cut_power(1)
        with pytest.raises(semel.SemelError):
            first.commit()
        assert committed(broker) == []

"""The broker inside the test's process: its clock, its disk, its faults and its ends are the test's."""

from __future__ import annotations

import errno
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from kio.schema.join_group.v2.request import JoinGroupRequest, JoinGroupRequestProtocol
from kio.schema.types import GroupId
from kio.static.primitive import i32Timedelta

import semel
from semel.broker.faults import Cut
from semel.broker.listeners import ListenerSettings
from semel.broker.storage.disk import RealDisk
from semel.errors import CommitUnknown, ConnectionLost, InvalidState, KafkaError
from semel.testing.embedded import EmbeddedBroker
from semel.testing.exchange import exchange
from semel.testing.manual_clock import ManualClock
from semel.testing.simulated_disk import SimulatedDisk
from semel.wire.api import Api
from semel.wire.messages import build, encode_request, response_type_for


def admin_of(broker: EmbeddedBroker) -> semel.Admin:
    return semel.Admin({"bootstrap.servers": broker.bootstrap})


def ask(broker: EmbeddedBroker, api: Api, version: int, **fields: Any) -> Any:
    request = build(api, version, **fields)
    return exchange(("127.0.0.1", broker.ports[0]), request, response_type_for(request))


def new_producer(broker: EmbeddedBroker, timeout_ms: int) -> Any:
    return ask(
        broker,
        Api.INIT_PRODUCER_ID,
        3,
        transactional_id="t",
        transaction_timeout=timeout_ms,
        producer_id=-1,
        producer_epoch=-1,
    )


def begin_transaction(broker: EmbeddedBroker, timeout_ms: int) -> None:
    """Open a transaction over the wire, with nobody behind it to keep it alive or end it."""
    producer = new_producer(broker, timeout_ms)
    assert producer.error_code is ErrorCode.none
    added = ask(
        broker,
        Api.ADD_PARTITIONS_TO_TXN,
        3,
        v3_and_below_transactional_id="t",
        v3_and_below_producer_id=producer.producer_id,
        v3_and_below_producer_epoch=producer.producer_epoch,
        v3_and_below_topics=[{"name": "orders", "partitions": [0]}],
    )
    assert added.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code is ErrorCode.none


def test_time_passes_only_when_the_test_says_so() -> None:
    """A transaction is aborted when its time is over by the manual clock, and not a moment before."""
    with EmbeddedBroker(clock=ManualClock()) as broker:
        with admin_of(broker) as admin:
            admin.create_topics("orders")
        begin_transaction(broker, timeout_ms=60_000)
        broker.clock.advance(ms=59_000)
        assert broker.metrics.transactions_timed_out == 0
        broker.clock.advance(ms=2_000)
        assert (broker.metrics.transactions_timed_out, broker.metrics.transactions_aborted) == (1, 1)


def test_the_manual_clock_runs_what_is_due_in_its_order() -> None:
    """Calls see the time they were due at; what was cancelled never runs; time does not run backwards."""
    clock, seen = ManualClock(now_ms=100), list[tuple[str, int]]()
    clock.call_later(20, lambda: seen.append(("late", clock.now_ms())))
    clock.call_later(10, lambda: seen.append(("early", clock.now_ms())))
    clock.call_later(10, lambda: seen.append(("cancelled", clock.now_ms()))).cancel()
    clock.call_later(5, lambda: clock.call_later(6, lambda: seen.append(("following", clock.now_ms()))) and None)
    clock.advance(ms=15)
    clock.advance(ms=100)
    assert seen == [("early", 110), ("following", 111), ("late", 120)]
    assert clock.now_ms() == 215
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(ms=-1)


@pytest.mark.parametrize("is_crash", [True, False])
def test_it_comes_back_at_the_same_port_with_the_same_data(is_crash: bool) -> None:
    """After a clean stop and after a crash; the crash leaves the directory as it stood."""
    with EmbeddedBroker() as broker:
        bootstrap = broker.bootstrap
        with admin_of(broker) as admin:
            admin.create_topics("orders")
            with semel.Producer({"bootstrap.servers": bootstrap}) as producer:
                producer.send("orders", value=b"one")
            if is_crash:
                broker.crash()
            else:
                broker.stop()
            assert not broker.is_running
            broker.restart()
            assert broker.bootstrap == bootstrap
            assert broker.call(lambda: broker.broker.directory.was_clean) is not is_crash
            partition = broker.call(lambda: broker.broker.partition("orders", 0))
            assert partition is not None
            assert partition.log_end_offset == 1
            assert "orders" in admin.list_topics()


def test_a_crash_answers_nobody() -> None:
    """A client that waits for its answer sees the connection end."""
    with EmbeddedBroker() as broker, socket.create_connection(("127.0.0.1", broker.ports[0]), timeout=30) as client:
        broker.crash()
        assert client.recv(1) == b""


def test_it_can_run_on_a_disk_that_loses_power(tmp_path: Path) -> None:
    """The simulated disk keeps what was synced, and the broker knows that the power was gone."""
    disk = SimulatedDisk()
    disk.make_directory("data")
    disk.sync_directory("")
    with EmbeddedBroker(disk=disk, fsync="always", clock=ManualClock()) as broker:
        with admin_of(broker) as admin:
            admin.create_topics("orders")
            begin_transaction(broker, timeout_ms=60_000)
            broker.crash()
            broker.restart(disk=disk.reboot(power_cut=True, seed=1), power_was_cut=True)
            assert "orders" in admin.list_topics()
        # What belongs to an open transaction may be lost, so it cannot be committed any more.
        assert broker.metrics.transactions_aborted == 1
    assert not (tmp_path / "data").exists()


def test_a_disk_that_refuses_a_sync_ends_the_broker() -> None:
    """As the process would: nobody is told that anything was stored, and the reason is there to read."""

    class NoSync(SimulatedDisk):
        def __init__(self) -> None:
            super().__init__()
            self.refuses = False

        def sync(self, path: str) -> None:
            if self.refuses and path.endswith(".log"):
                raise OSError(errno.EIO, "the disk is broken")
            super().sync(path)

    disk = NoSync()
    with EmbeddedBroker(disk=disk, fsync="always") as broker:
        disk.refuses = True
        with pytest.raises(ConnectionLost):
            new_producer(broker, timeout_ms=60_000)
        assert broker.fatal_error is not None
        broker.stop()
        assert not broker.is_running
        disk.refuses = False
        broker.restart(disk=disk.reboot(power_cut=False))
        assert broker.fatal_error is None


def test_faults_reach_a_real_client() -> None:
    """The answer to a commit is cut off; the client finds out by asking again, and commits once."""
    with EmbeddedBroker() as broker:
        with admin_of(broker) as admin:
            admin.create_topics("orders")
        cut = broker.faults.inject(Api.END_TXN, Cut(carried_out=True), when=lambda request: request.committed)
        config = {"bootstrap.servers": broker.bootstrap, "transactional.id": "t"}
        with semel.Producer(config) as producer, producer.transaction():
            producer.send("orders", value=b"one")
        assert cut.served == 1
        assert broker.metrics.transactions_committed == 1


def test_work_runs_in_the_brokers_thread() -> None:
    """Plain calls and coroutines, their results and their exceptions."""
    with EmbeddedBroker() as broker:

        async def name() -> str:
            return threading.current_thread().name

        def fail() -> None:
            raise KafkaError("no")

        assert broker.call(name) == broker.call(lambda: threading.current_thread().name) == "semel-embedded"
        with pytest.raises(KafkaError, match="no"):
            broker.call(fail)


def test_what_cannot_be_asked_now_says_why() -> None:
    """Before the start, after the end, and without a clock of one's own."""
    broker = EmbeddedBroker()
    with pytest.raises(InvalidState, match="not been started"):
        _ = broker.bootstrap
    with broker:
        with pytest.raises(InvalidState, match="already running"):
            broker.start()
        with pytest.raises(InvalidState, match="ManualClock"):
            broker.clock.advance(ms=1)
    with pytest.raises(InvalidState, match="not running"):
        broker.call(lambda: None)
    broker.crash()
    broker.stop()


def test_a_start_that_fails_leaves_no_thread() -> None:
    """The port is taken: the error is the caller's, and nothing runs on."""
    with EmbeddedBroker() as broker:
        second = EmbeddedBroker(listeners=[ListenerSettings(port=broker.ports[0])])
        with pytest.raises(semel.SemelError, match="in use"):
            second.__enter__()
        assert not second.is_running


class HeldDisk(RealDisk):
    """A real disk on which a log's sync takes until the test lets it go."""

    def __init__(self) -> None:
        self.lets_go = threading.Event()
        self.lets_go.set()
        self.is_syncing = threading.Event()

    def sync(self, path: str) -> None:
        if path.endswith(".log"):
            self.is_syncing.set()
            assert self.lets_go.wait(30)
        super().sync(path)


def test_a_commit_that_is_under_way_when_the_broker_stops_comes_to_its_end(tmp_path: Path) -> None:
    """A clean stop waits for it: nothing is written after the files were closed as complete."""
    disk = HeldDisk()
    with EmbeddedBroker(disk=disk, data=tmp_path) as broker:
        with admin_of(broker) as admin:
            admin.create_topics("orders")
        producer = semel.Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "t"})
        producer.begin()
        producer.send("orders", value=b"one")
        producer.flush()
        disk.is_syncing.clear()
        disk.lets_go.clear()
        lost_answers = list[Exception]()

        def commit() -> None:
            try:
                producer.commit(timeout_ms=20_000)
            except semel.SemelError as error:
                lost_answers.append(error)

        committing = threading.Thread(target=commit)
        committing.start()
        assert disk.is_syncing.wait(30)
        stopping = threading.Thread(target=broker.stop)
        stopping.start()
        stopping.join(0.2)
        assert stopping.is_alive()
        disk.lets_go.set()
        stopping.join(30)
        assert not broker.is_running
        assert broker.metrics.transactions_committed == 1
        broker.restart()
        assert broker.call(lambda: broker.broker.directory.was_clean)
        partition = broker.call(lambda: broker.broker.partition("orders", 0))
        assert partition is not None
        assert partition.last_stable_offset == partition.log_end_offset == 2
        committing.join(30)
        # The answer went with the connection; the client asked again, or says that it does not know.
        assert all(isinstance(error, CommitUnknown) for error in lost_answers)
        producer.close()


def test_a_member_that_waits_for_others_does_not_hold_up_a_stop() -> None:
    """Its JoinGroup would be answered when the rebalance is over; a broker that stops does not wait for that."""
    with EmbeddedBroker(config={"group.initial.rebalance.delay.ms": "600000"}) as broker:
        join = JoinGroupRequest(
            group_id=GroupId("g"),
            session_timeout=i32Timedelta.parse(timedelta(seconds=30)),
            rebalance_timeout=i32Timedelta.parse(timedelta(seconds=30)),
            member_id="",
            protocol_type="consumer",
            protocols=(JoinGroupRequestProtocol(name="range", metadata=b"\0\0"),),
        )
        with socket.create_connection(("127.0.0.1", broker.ports[0]), timeout=30) as client:
            client.sendall(b"".join(encode_request(join, 1, "test")))
            while not broker.call(lambda: broker.metrics.requests["JOIN_GROUP"]):
                time.sleep(0.01)
            started = time.monotonic()
            broker.stop()
            assert time.monotonic() - started < 5
            assert client.recv(1) == b""

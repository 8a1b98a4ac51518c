"""Every kind of fault on real processes: it happens, it ends, it is recorded, and nothing that was stored is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driven_faults import (
    Sleepers,
    carried_out,
    driver_of,
    fault,
    new_topic,
    plan_of,
    state_of,
    store,
    values,
    wait_until,
    what_is_seen,
    write_until,
)
from kio.schema.errors import ErrorCode
from raw_connection import RawConnection

from semel.client.producer import Producer
from semel.errors import BrokerUnreachable, ConfigError, Fenced, InvalidState, RequestTimedOut, TransactionAborted
from semel.verify.chaos_reading import ends
from semel.verify.faults.driver import Driver, Record
from semel.verify.faults.hijack import hijack
from semel.verify.faults.kinds import FaultKind, choose_kinds
from semel.verify.faults.plan import Fault, FaultPlan, Worker, make_plan
from semel.verify.faults.proxy import FaultProxy
from semel.verify.faults.targets import EmbeddedTarget, KafkaTarget, RemoteTarget
from semel.wire import Api

LONG_MS = 60_000


@pytest.fixture(scope="module")
def target() -> Iterator[EmbeddedTarget]:
    with EmbeddedTarget() as made:
        yield made


@pytest.fixture
def topic(target: EmbeddedTarget) -> str:
    return new_topic(target.bootstrap)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Sleepers]:
    made = Sleepers(tmp_path)
    yield made
    made.close()


# Brokers


@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.RESTART])
def test_a_broker_is_ended_and_comes_back_with_its_data(
    target: EmbeddedTarget, topic: str, tmp_path: Path, kind: FaultKind
) -> None:
    """It is gone for as long as asked, then another process serves the same records at the same address."""
    address, process_id = target.bootstrap, target.broker.process_id
    assert store(address, topic, "before").error_code is ErrorCode.none
    with driver_of(target, tmp_path, fault(kind, 300, broker=0)) as driver:
        wait_until(lambda: not target.broker.is_running)
        record = carried_out(driver, tmp_path)
    assert record.outcome == "done"
    assert record.end_ns - record.begin_ns >= 300_000_000
    assert (target.bootstrap, target.broker.process_id != process_id) == (address, True)
    assert values(target.bootstrap, topic) == ["before"]


@pytest.mark.parametrize("kind", [FaultKind.PAUSE, FaultKind.STORM])
def test_a_paused_broker_answers_when_it_goes_on(
    target: EmbeddedTarget, topic: str, tmp_path: Path, kind: FaultKind
) -> None:
    """The request waits for as long as the process stands still, and is carried out then."""
    with driver_of(target, tmp_path, fault(kind, 300, broker=0)) as driver:
        wait_until(lambda: state_of(target.broker.process_id) == "T")
        assert store(target.bootstrap, topic, "waited").error_code is ErrorCode.none
        answered_ns = time.monotonic_ns()
        record = carried_out(driver, tmp_path)
    assert answered_ns - record.begin_ns >= 300_000_000
    assert state_of(target.broker.process_id) != "T"


@pytest.mark.parametrize("free_bytes", [0, 30])
def test_a_full_disk_refuses_clearly_and_nothing_is_lost(
    target: EmbeddedTarget, topic: str, tmp_path: Path, free_bytes: int
) -> None:
    """The reason is told; what was acknowledged is there once, also after a kill; and writing goes on afterwards."""
    assert store(target.bootstrap, topic, "before").error_code is ErrorCode.none
    with driver_of(target, tmp_path, fault(FaultKind.DISK, LONG_MS, broker=0, free_bytes=free_bytes)) as driver:
        wait_until(lambda: store(target.bootstrap, topic, "maybe").error_code is not ErrorCode.none)
        answer = store(target.bootstrap, topic, "refused")
        assert answer.error_code is ErrorCode.kafka_storage_error
        assert "The disk is full: free space" in answer.error_message
        stored = values(target.bootstrap, topic)
    assert "refused" not in stored
    assert driver.records[0].outcome == "done"
    assert store(target.bootstrap, topic, "after").error_code is ErrorCode.none
    target.kill_broker(0)
    target.start_broker(0)
    assert values(target.bootstrap, topic) == [*stored, "after"]


def test_a_producer_is_told_of_the_full_disk_or_outlasts_it(target: EmbeddedTarget, topic: str, tmp_path: Path) -> None:
    """An impatient one gets the broker's reason, its record is nowhere; a patient one commits when there is space."""
    settings: dict[str, object] = {"bootstrap.servers": target.bootstrap, "retry.backoff.ms": 10}
    impatient = Producer({**settings, "delivery.timeout.ms": 300, "request.timeout.ms": 300})
    patient = Producer({**settings, "transactional.id": topic})
    patient.begin()
    patient.send(topic, b"first", partition=0)
    patient.flush()
    with driver_of(target, tmp_path, fault(FaultKind.DISK, 1_000, broker=0, free_bytes=0)) as driver:
        wait_until(lambda: store(target.bootstrap, topic, "filler").error_code is not ErrorCode.none)
        impatient.send(topic, b"impatient", partition=0)
        with pytest.raises(RequestTimedOut, match=r"KAFKA_STORAGE_ERROR .* The disk is full: free space"):
            impatient.flush()
        patient.send(topic, b"second", partition=0)
        patient.commit()
        assert carried_out(driver, tmp_path).outcome == "done"
    patient.close()
    impatient.close()
    assert [value for value in values(target.bootstrap, topic) if value != "filler"] == ["first", "second"]


def test_a_clock_jump_aborts_an_open_transaction(target: EmbeddedTarget, topic: str, tmp_path: Path) -> None:
    """Its time-out of a minute is over at once; readers go on, and its owner is told that nothing of it is there."""
    settings = {"bootstrap.servers": target.bootstrap, "transactional.id": topic, "transaction.timeout.ms": 60_000}
    with Producer(settings) as producer:
        producer.begin()
        producer.send(topic, b"open", partition=0)
        producer.flush()
        assert ends(target.bootstrap, [(topic, 0)], is_stable=True) == {(topic, 0): 0}
        with driver_of(target, tmp_path, fault(FaultKind.CLOCK, broker=0, jump_ms=61_000)) as driver:
            carried_out(driver, tmp_path)
        wait_until(lambda: ends(target.bootstrap, [(topic, 0)], is_stable=True)[topic, 0] == 2)
        with pytest.raises(TransactionAborted, match=r"before transaction\.timeout\.ms"):
            producer.commit()
        producer.abort()
        with producer.transaction():
            producer.send(topic, b"again", partition=0)
    assert values(target.bootstrap, topic) == ["again"]


def test_the_clock_stays_shifted_over_a_restart_and_can_stand_still(target: EmbeddedTarget, topic: str) -> None:
    """Transactions begin in the shifted time; after a jump back no later one is older than an earlier."""

    def begun_ms() -> int:
        with Producer({"bootstrap.servers": target.bootstrap, "transactional.id": topic}) as producer:
            producer.begin()
            producer.send(topic, b"x", partition=0)
            producer.flush()
            with RawConnection(target.bootstrap) as client:
                (state,) = client.call(Api.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[topic]).transaction_states
            producer.abort()
        return int(state.transaction_start_time_ms)

    now_ms = begun_ms()
    target.shift_clock(0, 3_600_000)
    ahead_ms = begun_ms()
    target.shift_clock(0, -5_000)
    behind_ms = begun_ms()
    target.kill_broker(0)
    target.start_broker(0)
    assert 3_600_000 <= ahead_ms - now_ms < 3_605_000
    assert 0 <= behind_ms - ahead_ms < 1_000
    assert 3_590_000 <= begun_ms() - now_ms < 3_620_000


def test_a_broker_that_ends_by_itself_is_a_finding(tmp_path: Path) -> None:
    """It is not started again in silence: the next fault fails with its last words."""
    with (
        EmbeddedTarget() as target,
        driver_of(target, tmp_path, Fault(0, 300, FaultKind.PAUSE, 10, {"broker": 0})) as driver,
    ):
        os.kill(target.broker.process_id, signal.SIGKILL)
        assert driver.wait(30)
        with pytest.raises(BrokerUnreachable, match="ended by itself, which no fault asked for"):
            driver.raise_failure()
        assert driver.records[0].outcome == "failed"
        assert not target.broker.is_running


# Workers


def test_a_killed_worker_gets_a_next_life(target: EmbeddedTarget, workers: Sleepers, tmp_path: Path) -> None:
    """Another process of the same name, after the time that was asked for; the other worker goes on."""
    before = {name: workers.process_id(name) for name in ("one", "two")}
    with driver_of(target, tmp_path, fault(FaultKind.WORKER_KILL, 200, workers="one"), workers=workers) as driver:
        wait_until(lambda: workers.process_id("one") is None)
        record = carried_out(driver, tmp_path)
    assert workers.process_id("one") not in (None, before["one"])
    assert workers.process_id("two") == before["two"]
    assert record.note == f"process {before['one']}"


@pytest.mark.parametrize(
    ("kind", "names"), [(FaultKind.WORKER_PAUSE, ["two"]), (FaultKind.STORM, ["one", "two"])], ids=["pause", "storm"]
)
def test_workers_stand_still_and_go_on(
    target: EmbeddedTarget, workers: Sleepers, tmp_path: Path, kind: FaultKind, names: list[str]
) -> None:
    """Those that were named, all at once, and the same processes afterwards."""
    ids = {name: workers.process_id(name) or 0 for name in ("one", "two")}
    stopping = fault(kind, 400, workers=",".join(names))
    with driver_of(target, tmp_path, stopping, workers=workers) as driver:
        wait_until(lambda: all((state_of(ids[name]) == "T") == (name in names) for name in ids))
        record = carried_out(driver, tmp_path)
    assert record.end_ns - record.begin_ns >= 400_000_000
    assert {name: workers.process_id(name) for name in ids} == ids
    wait_until(lambda: all(state_of(one) != "T" for one in ids.values()))


def test_a_worker_that_is_gone_is_a_missed_fault(target: EmbeddedTarget, workers: Sleepers, tmp_path: Path) -> None:
    """And no stranger with its number is signalled."""
    os.kill(workers.process_id("one") or 0, signal.SIGKILL)
    wait_until(lambda: workers.process_id("one") is None)
    for kind in (FaultKind.WORKER_PAUSE, FaultKind.WORKER_KILL):
        with driver_of(target, tmp_path / "..", fault(kind, 10, workers="one"), workers=workers) as driver:
            driver.wait(30)
        assert [record.outcome for record in driver.records] == ["missed"]


# Transactional ids


def test_a_hijacker_fences_the_victim(target: EmbeddedTarget, topic: str, tmp_path: Path) -> None:
    """The victim's open transaction is aborted and it is told so; a new one with the id takes over again."""
    settings = {"bootstrap.servers": target.bootstrap, "transactional.id": topic}
    with Producer(settings) as victim:
        victim.begin()
        victim.send(topic, b"victim", partition=0)
        victim.flush()
        taking = fault(FaultKind.HIJACK, transactional_id=topic, keeps_epoch=False)
        with driver_of(target, tmp_path, taking) as driver:
            record = carried_out(driver, tmp_path)
        assert record.note.startswith("took producer id")
        with pytest.raises(Fenced):
            victim.commit()
    with Producer(settings) as successor, successor.transaction():
        successor.send(topic, b"successor", partition=0)
    assert values(target.bootstrap, topic) == ["successor"]


def test_a_kept_epoch_is_refused_once_the_victim_has_moved_on(target: EmbeddedTarget, topic: str) -> None:
    """A zombie that wakes up takes nothing from a victim that went on, and everything from one that did not."""

    def write(*each: bytes) -> None:
        for value in each:
            with victim.transaction():
                victim.send(topic, value, partition=0)

    with Producer({"bootstrap.servers": target.bootstrap, "transactional.id": topic}) as victim:
        write(b"first")
        moved_on = hijack(target.bootstrap, topic, keeps_epoch=True, wait=lambda: write(b"second", b"third"))
        assert moved_on.startswith("refused")
        stood_still = hijack(target.bootstrap, topic, keeps_epoch=True, wait=lambda: None)
        assert stood_still.startswith("took producer id")
        victim.begin()
        victim.send(topic, b"fenced", partition=0)
        with pytest.raises(TransactionAborted, match="another producer took over"):
            victim.commit()
        with pytest.raises(Fenced):
            victim.abort()
    assert values(target.bootstrap, topic) == ["first", "second", "third"]


def test_an_id_that_nobody_has_cannot_be_kept(target: EmbeddedTarget, tmp_path: Path) -> None:
    """The worker may not have begun: the fault is missed, not failed."""
    with driver_of(target, tmp_path, fault(FaultKind.HIJACK, transactional_id="nobody", keeps_epoch=True)) as driver:
        record = carried_out(driver, tmp_path)
    assert (record.outcome, record.note) == ("missed", "nobody has the id yet (invalid_producer_id_mapping)")


# Requests and answers


@pytest.fixture
def proxy(target: EmbeddedTarget) -> Iterator[FaultProxy]:
    with FaultProxy(target.bootstrap) as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "for_ms", "details"),
    [
        (FaultKind.CUT, 0, {"direction": "request", "when": "before"}),
        (FaultKind.CUT, 0, {"direction": "response", "when": "after"}),
        (FaultKind.DELAY, 200, {"direction": "request"}),
        (FaultKind.DELAY, 200, {"direction": "response"}),
        (FaultKind.SILENCE, 0, {"direction": "response"}),
        (FaultKind.REPEAT, 100, {}),
        (FaultKind.REORDER, 200, {"overtaker": "END_TXN"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_on_the_way_meets_its_request(
    target: EmbeddedTarget,
    proxy: FaultProxy,
    topic: str,
    tmp_path: Path,
    kind: FaultKind,
    for_ms: int,
    details: dict[str, Any],
) -> None:
    """What the plan says in words is what happens to the client, and the record tells which request it was."""
    meant = fault(kind, for_ms, api="PRODUCE", client_id="victim", nth=1, **details)
    with driver_of(target, tmp_path, meant, proxy=proxy) as driver:
        wait_until(lambda: proxy.waiting_traps == 1)
        with RawConnection(proxy.bootstrap, "victim") as client:
            client.send_record(topic, "value")
            seen = what_is_seen(client)
        record = carried_out(driver, tmp_path)
    expected = {
        (FaultKind.CUT, "before"): ("closed", 0),
        (FaultKind.CUT, "after"): ("answered, then closed", 1),
        (FaultKind.SILENCE, None): ("nothing", 1),
        (FaultKind.REPEAT, None): ("answered", 2),
    }
    assert (seen, len(values(target.bootstrap, topic))) == expected.get((kind, details.get("when")), ("answered", 1))
    assert record.note == "PRODUCE v9 of client 'victim', connection 1"
    assert record.end_ns - record.begin_ns >= for_ms * 1_000_000


# The driver itself


def test_a_stopped_driver_takes_everything_back_at_once(
    target: EmbeddedTarget, topic: str, workers: Sleepers, tmp_path: Path
) -> None:
    """However long a fault was meant to last; and what had not begun is not begun."""
    later = Fault(0, 50_000, FaultKind.PAUSE, 10, {"broker": 0})
    for first in (FaultKind.PAUSE, FaultKind.KILL):
        path = tmp_path / f"{first}.jsonl"
        plan = plan_of(fault(first, LONG_MS, broker=0), fault(FaultKind.WORKER_PAUSE, LONG_MS, workers="one"), later)
        driver = Driver(plan, target, record_path=path, workers=workers)
        driver.start()
        wait_until(lambda: state_of(workers.process_id("one") or 0) == "T")
        started = time.monotonic()
        driver.stop()
        assert time.monotonic() - started < 10
        driver.raise_failure()
        assert len(path.read_text().splitlines()) == 2
        wait_until(lambda: state_of(workers.process_id("one") or 0) != "T")
        assert store(target.bootstrap, topic, "served").error_code is ErrorCode.none


def test_a_request_that_never_comes_is_missed_when_the_run_ends(
    target: EmbeddedTarget, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Its trap is gone then, and strikes nobody later."""
    meant = fault(FaultKind.CUT, api="PRODUCE", nth=1, direction="request", when="before")
    with driver_of(target, tmp_path, meant, proxy=proxy) as driver:
        wait_until(lambda: proxy.waiting_traps == 1)
    assert [(one.outcome, one.note) for one in driver.records] == [("missed", "no such request came by")]
    with RawConnection(proxy.bootstrap) as client:
        client.send_record("nowhere", "value")
        client.receive()


@pytest.mark.parametrize(
    ("meant", "words"),
    [
        (fault(FaultKind.KILL, broker=0), "kill .* a remote cluster: its brokers are not this program's to stop"),
        (fault(FaultKind.STORM, broker=0), "storm .* not this program's to stop"),
        (fault(FaultKind.CUT, api="PRODUCE", direction="request", when="after"), "cut .* there is no proxy"),
        (fault(FaultKind.WORKER_KILL, workers="one"), "worker-kill .* there are no worker processes"),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else "",
)
def test_what_cannot_be_done_is_said_before_anything_starts(tmp_path: Path, meant: Fault, words: str) -> None:
    """A plan of another run may ask for what this one has not."""
    with pytest.raises(ConfigError, match=words):
        driver_of(RemoteTarget("127.0.0.1:1"), tmp_path, meant)


def test_a_broker_that_is_not_there_is_said_before_anything_starts(target: EmbeddedTarget, tmp_path: Path) -> None:
    """A plan for three brokers does not fit one."""
    with pytest.raises(ConfigError, match="meant for broker 2, and there are 1"):
        driver_of(target, tmp_path, fault(FaultKind.KILL, broker=2))


def test_a_driver_runs_once(target: EmbeddedTarget, tmp_path: Path) -> None:
    """Its records are those of one run."""
    driver = driver_of(target, tmp_path)
    with pytest.raises(InvalidState, match="not begun"):
        driver.wait()
    with driver, pytest.raises(InvalidState, match="begun already"):
        driver.start()


def test_a_remote_cluster_is_looked_at_and_left_alone(target: EmbeddedTarget) -> None:
    """Its brokers are counted; nothing can be done to them, and an address where nobody answers is told."""
    with RemoteTarget(target.bootstrap) as remote:
        assert (remote.broker_count, remote.bootstrap) == (1, target.bootstrap)
        assert not remote.cast([], longest_timeout_ms=1).can_pause_brokers
        with pytest.raises(InvalidState, match="kill cannot be had on a remote cluster"):
            remote.kill_broker(0)
    assert target.broker.is_running
    with pytest.raises(BrokerUnreachable, match=r"No broker answers at 127\.0\.0\.1:1"):
        RemoteTarget("127.0.0.1:1").start()


def test_a_whole_plan_is_carried_out_and_its_record_is_a_plan_again(workers: Sleepers, tmp_path: Path) -> None:
    """All kinds at once beside a producer that copes: each is in the record, and nothing it was told of is lost."""
    with EmbeddedTarget(tmp_path / "broker", fsync="never") as target, FaultProxy(target.bootstrap) as proxy:
        topic = new_topic(target.bootstrap)
        known = [Worker("one", client_id="writer"), Worker("two", ("stranger",))]
        cast = target.cast(known, longest_timeout_ms=300, apis=["PRODUCE"])
        rates = dict(choose_kinds(None, target.impossible).rates)
        del rates[FaultKind.LATE]  # this producer ends no transactions
        plan = make_plan(0, rates, 7_000, replace(cast, restart_ms=500))
        assert set(plan.counts()) == set(FaultKind) - {FaultKind.LATE}
        plan = replace(plan, duration_ms=60_000)  # on a busy machine faults may have to wait for each other
        with Driver(plan, target, record_path=tmp_path / "faults.jsonl", proxy=proxy, workers=workers) as driver:
            acknowledged = write_until(proxy.bootstrap, topic, lambda: driver.wait(0))
        driver.raise_failure()
        lines = (tmp_path / "faults.jsonl").read_text().splitlines()
        records = [Record.from_json(line) for line in lines]
        assert sorted(one.fault.number for one in records) == list(range(len(plan.faults)))
        done = {one.fault.kind for one in records if one.outcome == "done"}
        assert done >= set(rates) - {FaultKind.HIJACK}, records  # nobody may have the id yet
        again = FaultPlan.from_records(lines)
        assert again.counts() == {
            kind: sum(one.outcome == "done" and one.fault.kind is kind for one in records) for kind in done
        }
        assert len(acknowledged) > 10
        assert values(target.bootstrap, topic) == acknowledged


@pytest.mark.conformance
def test_an_apache_kafka_is_killed_restarted_and_paused(tmp_path: Path) -> None:
    """What the embedded broker stands, Apache Kafka does too, by the same plan; disk and clock it cannot have."""
    with KafkaTarget() as target:
        topic = new_topic(target.bootstrap)
        # A new topic has no leader for a moment, and then a record is refused: that is not what this is about.
        wait_until(lambda: store(target.bootstrap, topic, "before").error_code is ErrorCode.none)
        faults = [fault(kind, 500, broker=0) for kind in (FaultKind.KILL, FaultKind.RESTART, FaultKind.PAUSE)]
        with Driver(plan_of(*faults, duration_ms=120_000), target, record_path=tmp_path / "faults.jsonl") as driver:
            assert driver.wait(90)
        driver.raise_failure()
        assert {one.outcome for one in driver.records} == {"done"}
        wait_until(lambda: store(target.bootstrap, topic, "after").error_code is ErrorCode.none)
        assert values(target.bootstrap, topic) == ["before", "after"]
        with pytest.raises(ConfigError, match=r"clock .* Apache Kafka: its processes read the machine's clock"):
            driver_of(target, tmp_path, fault(FaultKind.CLOCK, broker=0, jump_ms=1))

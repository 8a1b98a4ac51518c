"""A broker whose disk is full, read-only or damaged, or whose clock was set back: it says so, and nothing is lost."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from semel.broker.clock import SystemClock
from semel.broker.process import Broker
from semel.client.admin import Admin
from semel.client.fetcher import Fetcher
from semel.client.producer import Producer
from semel.errors import BrokerUnreachable, CorruptRecords
from semel.records.reference import Record, encode_batch
from semel.testing.embedded import EmbeddedBroker
from semel.testing.manual_clock import ManualClock
from semel.verify.chaos_reading import ask, ends, read_by_requests
from semel.wire.api import Api

TOPIC = "orders"
SMALL = {"internal.segment.bytes": "1500"}
DAY_MS = 24 * 3_600_000
PRODUCER_ID = 4242
BATCH_RECORDS = 2


class Orders:
    """One idempotent producer by single requests: batches that keep their sequence, and what became of them."""

    def __init__(self, broker: Broker | EmbeddedBroker) -> None:
        self.broker = broker
        self.acknowledged: list[str] = []
        with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics(TOPIC, partitions=1, config=SMALL)
        self._batches = 0

    def batch(self, number: int) -> tuple[list[str], bytes]:
        values = [f"{number}.{part}" for part in range(BATCH_RECORDS)]
        records = [Record(n, int(time.time() * 1000), None, value.encode()) for n, value in enumerate(values)]
        return values, encode_batch(
            records, producer_id=PRODUCER_ID, producer_epoch=0, base_sequence=number * BATCH_RECORDS
        )

    def send(self, number: int) -> Any:
        answer = ask(
            self.broker.bootstrap,
            Api.PRODUCE,
            9,
            transactional_id=None,
            acks=-1,
            timeout=1000,
            topic_data=[{"name": TOPIC, "partition_data": [{"index": 0, "records": self.batch(number)[1]}]}],
        )
        return answer.responses[0].partition_responses[0]

    def put(self, count: int) -> None:
        """Store so many batches."""
        for _ in range(count):
            answer = self.send(self._batches)
            assert answer.error_code is ErrorCode.none, answer
            self.acknowledged += self.batch(self._batches)[0]
            self._batches += 1

    def put_until_refused(self) -> Any:
        """Store until the broker refuses, and return its answer."""
        for _ in range(3000):
            answer = self.send(self._batches)
            if answer.error_code is not ErrorCode.none:
                return answer
            self.acknowledged += self.batch(self._batches)[0]
            self._batches += 1
        raise AssertionError("the disk is never full")

    def stored(self) -> list[str]:
        return [value for _, value in read_by_requests(self.broker.bootstrap, [(TOPIC, 0)])[TOPIC, 0]]

    def check_repeat(self) -> None:
        """A batch that comes a second time is still known for what it is."""
        before = ends(self.broker.bootstrap, [(TOPIC, 0)], is_stable=False)
        assert self.send(self._batches - 1).error_code is ErrorCode.none
        assert ends(self.broker.bootstrap, [(TOPIC, 0)], is_stable=False) == before

    def check_all(self) -> None:
        """Everything acknowledged is there once, and the broker goes on."""
        assert self.stored() == self.acknowledged
        self.check_repeat()
        self.put(2)
        assert self.stored() == self.acknowledged


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(data=tmp_path / "data") as made:
        yield made


def files(broker: Broker, suffix: str) -> list[Path]:
    return sorted((broker.data / f"{TOPIC}-0").glob(f"*{suffix}"))


# A full disk


class LimitedFiles:
    """No file may grow beyond a size: what RLIMIT_FSIZE can do to a process that runs."""

    words = "may not grow"

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"

    def fill(self, broker: Broker) -> None:
        largest = max(file.stat().st_size for file in self.data.rglob("*") if file.is_file())
        resource.prlimit(broker.process_id, resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))

    def empty(self, broker: Broker) -> None:
        resource.prlimit(broker.process_id, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def close(self) -> None:
        return None


class SmallFileSystem:
    """A file system of its own with few bytes."""

    words = "disk is full"

    def __init__(self, folder: Path) -> None:
        self._mount = folder / "small"
        self._mount.mkdir()
        mount("-t", "tmpfs", "-o", "size=2m", "tmpfs", str(self._mount))
        self.data = self._mount / "data"

    def fill(self, broker: Broker) -> None:
        with (self._mount / "ballast").open("wb", buffering=0) as ballast:
            while True:
                try:
                    ballast.write(bytes(4096))
                except OSError:
                    return

    def empty(self, broker: Broker) -> None:
        (self._mount / "ballast").unlink()

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self._mount)], check=True)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def can_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0


SMALL_DISKS = [LimitedFiles, SmallFileSystem] if can_mount() else [LimitedFiles]


@pytest.fixture(params=SMALL_DISKS)
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made = request.param(tmp_path)
    yield made
    made.close()


def test_a_full_disk_is_told_and_when_there_is_space_the_broker_goes_on(small_disk: Any) -> None:
    """What was acknowledged stays readable, the refusal names the reason, and the same batch is taken later."""
    with Broker(data=small_disk.data) as broker:
        orders = Orders(broker)
        orders.put(3)
        small_disk.fill(broker)
        answer = orders.put_until_refused()
        assert answer.error_code is ErrorCode.kafka_storage_error
        assert small_disk.words in answer.error_message
        assert small_disk.words in broker.log_path.read_text()
        assert orders.stored() == orders.acknowledged
        small_disk.empty(broker)
        orders.check_all()
        broker.kill()
        broker.restart()
        orders.check_all()


@pytest.mark.parametrize("small_disk", [LimitedFiles], indirect=True)  # other disks leave room in a last block
def test_a_commit_on_a_full_disk_is_made_when_there_is_space(small_disk: Any) -> None:
    """The coordinator cannot log the decision; the client tries again, and no half of the transaction is ever seen."""
    with Broker(data=small_disk.data) as broker:
        orders = Orders(broker)
        settings = {"bootstrap.servers": broker.bootstrap, "transactional.id": "writer", "retry.backoff.ms": 20}
        with Producer(settings) as producer:
            for number in range(3):  # its log is as long as any other file then
                with producer.transaction():
                    producer.send(TOPIC, f"first {number}".encode(), partition=0)
            producer.begin()
            producer.send(TOPIC, b"second", partition=0)
            producer.flush()
            small_disk.fill(broker)
            committing = threading.Thread(target=producer.commit)
            committing.start()
            committing.join(1.0)
            assert committing.is_alive(), "committed on a full disk"
            assert orders.stored() == [f"first {number}" for number in range(3)]
            small_disk.empty(broker)
            committing.join(30)
            assert not committing.is_alive()
        assert orders.stored() == ["first 0", "first 1", "first 2", "second"]
        broker.kill()
        broker.restart()
        assert orders.stored() == ["first 0", "first 1", "first 2", "second"]


@pytest.mark.parametrize("small_disk", [kind for kind in SMALL_DISKS if kind is SmallFileSystem], indirect=True)
def test_a_broker_starts_on_a_full_disk_and_serves_what_it_has(small_disk: Any) -> None:
    """A full disk may be why the last one died: records must be readable, and topics deletable."""
    with Broker(data=small_disk.data) as broker:
        orders = Orders(broker)
        orders.put(20)
        broker.kill()
        small_disk.fill(broker)
        broker.restart()
        assert orders.stored() == orders.acknowledged
        small_disk.empty(broker)
        orders.check_all()


# A read-only directory


def make_read_only(folder: Path) -> Callable[[], None]:
    """Returns what takes it back. Rights do not bind root, so root gets a mount."""
    if os.geteuid() != 0:
        folder.chmod(0o500)
        return lambda: folder.chmod(0o700)
    mount("--bind", str(folder), str(folder))
    mount("-o", "remount,ro,bind", str(folder))
    return lambda: subprocess.run(["umount", str(folder)], check=True) and None


def test_a_read_only_directory_is_told_and_its_records_are_untouched(broker: Broker) -> None:
    """One sentence with the reason; writable again, everything is there."""
    orders = Orders(broker)
    orders.put(10)
    broker.stop()
    make_writable = make_read_only(broker.data)
    try:
        with pytest.raises(BrokerUnreachable, match=r"cannot be written to, so no broker runs: .*(Read-only|denied)"):
            broker.start()
    finally:
        make_writable()
    broker.start()
    orders.check_all()


# Damaged files


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x55
    path.write_bytes(data)


def test_a_flipped_byte_in_a_closed_segment_is_an_error_for_its_readers_only(broker: Broker) -> None:
    """Readers are told by the checksum, never handed the damage; all other records are served and writing goes on."""
    orders = Orders(broker)
    orders.put(60)
    broker.stop()
    closed = files(broker, ".log")
    assert len(closed) > 3
    flip(closed[1], closed[1].stat().st_size - 5)  # in a record, which the checksum covers
    broker.start()
    with pytest.raises(CorruptRecords, match="checksum"):
        orders.stored()
    later = int(closed[2].stem)
    before = ask_values(broker, 0, int(closed[1].stem))
    assert before == orders.acknowledged[: int(closed[1].stem)]
    orders.put(3)
    assert ask_values(broker, later, len(orders.acknowledged)) == orders.acknowledged[later:]


def ask_values(broker: Broker, start: int, end: int) -> list[str]:
    """What consumers get who read from `start` to `end`, segment by segment."""
    values: list[str] = []
    with Fetcher({"bootstrap.servers": broker.bootstrap, "max.partition.fetch.bytes": 200}) as fetcher:
        fetcher.assign({(TOPIC, 0): start})
        for table in fetcher.read_until({(TOPIC, 0): end}):
            values += [value.decode() for value in table["value"].to_pylist()]
    return values


def test_a_length_that_cannot_be_in_a_closed_segment_is_told_by_the_broker(broker: Broker) -> None:
    """Where a batch ends is not known any more, so the broker itself refuses, and says where."""
    orders = Orders(broker)
    orders.put(60)
    broker.stop()
    closed = files(broker, ".log")[1]
    flip(closed, 8)  # the highest byte of the first batch's length
    broker.start()
    answer = ask(
        broker.bootstrap,
        Api.FETCH,
        11,
        replica_id=-1,
        max_wait=0,
        min_bytes=0,
        max_bytes=1 << 20,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=[
            {
                "topic": TOPIC,
                "partitions": [{"partition": 0, "fetch_offset": int(closed.stem), "partition_max_bytes": 300}],
            }
        ],
        forgotten_topics_data=[],
        rack_id="",
    )
    assert answer.responses[0].partitions[0].error_code in (ErrorCode.corrupt_message, ErrorCode.kafka_storage_error)
    assert closed.name in broker.log_path.read_text()
    orders.put(2)


def test_a_flipped_byte_in_the_active_segment_of_a_killed_broker_is_set_aside_and_told(broker: Broker) -> None:
    """What stood behind the damage is kept in a file, for whoever wants to save it."""
    orders = Orders(broker)
    orders.put(5)
    broker.kill()
    (active,) = files(broker, ".log")
    whole = active.read_bytes()
    size = len(whole) // 5
    flip(active, 2 * size + size // 2)
    broker.restart()
    assert orders.stored() == orders.acknowledged[: 2 * BATCH_RECORDS]
    assert "were moved aside" in broker.log_path.read_text()
    (kept,) = files(broker, ".damaged")
    assert kept.read_bytes()[size:] == whole[3 * size :]
    assert orders.send(2).error_code is ErrorCode.none, "its client sends it again"


@pytest.mark.parametrize("suffix", [".index", ".timeindex", ".txnindex", ".indexsums", ".snapshot"])
def test_torn_files_beside_the_log_are_made_anew(tmp_path: Path, suffix: str) -> None:
    """They are all derived: no record is lost, repeats are known, aborted transactions stay aborted."""
    with EmbeddedBroker(data=tmp_path / "data") as broker:
        orders = Orders(broker)
        write_transactions(broker.bootstrap)
        orders.put(40)
        for harm in ("empty", "half", "garbage", "missing"):
            before = orders.stored()
            broker.stop()
            harmed = sorted((tmp_path / "data" / f"{TOPIC}-0").glob(f"*{suffix}"))
            assert harmed
            for path in harmed:
                hurt(path, harm)
            broker.start()
            assert orders.stored() == before, harm
            orders.check_repeat()
            orders.put(1)
        broker.crash()
        broker.restart()
        assert orders.stored() == [*before, *orders.acknowledged[-BATCH_RECORDS:]]


def write_transactions(bootstrap: str) -> None:
    """Some committed, some aborted."""
    with Producer({"bootstrap.servers": bootstrap, "transactional.id": "writer"}) as producer:
        for number in range(12):
            producer.begin()
            producer.send(TOPIC, f"kept {number}".encode(), partition=0)
            producer.flush()
            if number % 2:
                producer.abort()
            else:
                producer.commit()


def hurt(path: Path, harm: str) -> None:
    data = path.read_bytes()
    if harm == "missing":
        path.unlink()
    elif harm == "garbage":
        path.write_bytes(os.urandom(max(len(data), 16)))
    else:
        path.write_bytes(data[: len(data) // 2 if harm == "half" else 0])


@pytest.mark.parametrize("suffix", [".snapshot", "semel-checkpoint", ".txnindex"])
def test_a_repair_is_told_in_the_log(broker: Broker, suffix: str) -> None:
    """Somebody who looks after the machine wants to know that its disk loses bytes."""
    orders = Orders(broker)
    orders.put(40)
    broker.stop()
    for path in files(broker, suffix):
        path.write_bytes(os.urandom(40))
    log_start = len(broker.log_path.read_text())
    broker.start()
    orders.check_all()
    told = broker.log_path.read_text()[log_start:]
    assert f"{TOPIC}-0" in told
    assert "WARNING" in told or "ERROR" in told


@pytest.mark.parametrize("name", ["topics.json.meta", "producer_ids.json.meta", ".semel-layout"])
def test_a_damaged_file_that_cannot_be_made_anew_stops_the_start_and_names_itself(broker: Broker, name: str) -> None:
    """Going on would lose topics or give producer ids twice. With the file back everything is there."""
    orders = Orders(broker)
    orders.put(5)
    with Producer({"bootstrap.servers": broker.bootstrap}) as producer:
        assert producer.identity.producer_id >= 0
    broker.stop()
    path = broker.data / name
    shutil.copy(path, path.with_suffix(".kept"))
    path.write_bytes(b'{"version": 1, "top')
    with pytest.raises(BrokerUnreachable, match=name.removesuffix(".meta").replace(".", r"\.")):
        broker.start()
    assert "Traceback" not in broker.log_path.read_text()
    os.replace(path.with_suffix(".kept"), path)
    broker.start()
    orders.check_all()


@pytest.mark.parametrize("name", ["boot_id.meta", ".semel-clean-shutdown", ".semel-lock"])
def test_a_damaged_file_that_matters_to_nobody_stops_nothing(broker: Broker, name: str) -> None:
    """The worst that a wrong boot id can lead to is that open transactions are aborted."""
    orders = Orders(broker)
    orders.put(5)
    broker.stop()
    (broker.data / name).write_bytes(b"\xff\xfe")
    broker.start()
    orders.check_all()


# Clocks


def test_a_wall_clock_that_is_set_while_a_broker_runs_does_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time goes by the monotonic clock after the start."""
    clock = SystemClock()
    before = clock.now_ms()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert before <= clock.now_ms() < before + 60_000


def test_a_clock_that_was_set_back_before_a_restart_keeps_nobody_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An open transaction is aborted after its own time-out, not a day later; what was committed is kept."""
    now_ms = int(time.time() * 1000)
    with EmbeddedBroker(data=tmp_path / "data", clock=ManualClock(now_ms)) as broker:
        orders = Orders(broker)
        orders.put(5)
        settings = {"bootstrap.servers": broker.bootstrap, "transactional.id": "w", "transaction.timeout.ms": 10_000}
        producer = Producer(settings)
        with producer.transaction():
            producer.send(TOPIC, b"committed", partition=0)
        producer.begin()
        producer.send(TOPIC, b"left open", partition=0)
        producer.flush()
        broker.crash()
        producer.cluster.close()
    with EmbeddedBroker(data=tmp_path / "data", clock=ManualClock(now_ms - DAY_MS)) as broker:
        assert "the clock was set back since the transaction of w began" in caplog.text
        orders.broker = broker
        where = [(TOPIC, 0)]
        stable = ends(broker.bootstrap, where, is_stable=True)
        assert stable != ends(broker.bootstrap, where, is_stable=False)
        broker.clock.advance(ms=9_000)
        assert ends(broker.bootstrap, where, is_stable=True) == stable, "aborted too early"
        broker.clock.advance(ms=2_000)
        assert ends(broker.bootstrap, where, is_stable=True) == ends(broker.bootstrap, where, is_stable=False)
        assert orders.stored() == [*orders.acknowledged, "committed"]
        orders.check_repeat()


def test_a_machine_that_slept_for_a_day_wakes_with_everything_that_was_acknowledged(tmp_path: Path) -> None:
    """A jump ahead ends what was open and takes nothing that is younger than its retention."""
    with EmbeddedBroker(data=tmp_path / "data", clock=ManualClock()) as broker:
        orders = Orders(broker)
        orders.put(40)
        with Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "w"}) as producer:
            producer.begin()
            producer.send(TOPIC, b"left open", partition=0)
            producer.flush()
            broker.clock.advance(ms=DAY_MS // 2)
            where = [(TOPIC, 0)]
            assert ends(broker.bootstrap, where, is_stable=True) == ends(broker.bootstrap, where, is_stable=False)
            assert orders.stored() == orders.acknowledged
            producer.cluster.close()

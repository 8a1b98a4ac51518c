"""Faults that tests let a driver carry out, the workers they strike, and what is seen of a broker meanwhile."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raw_connection import Closed, RawConnection

from semel.client.admin import Admin
from semel.client.producer import Producer
from semel.processes import spawn
from semel.verify.chaos_reading import read_by_requests
from semel.verify.faults.driver import Driver, Record
from semel.verify.faults.kinds import FaultKind
from semel.verify.faults.plan import Fault, FaultPlan
from semel.verify.faults.targets import Target

SLEEP = shutil.which("sleep") or "/bin/sleep"
NUMBERS = itertools.count()


class Sleepers:
    """Worker processes that do nothing, and their supervisor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("one", "two"):
            self.start(name)

    def process_id(self, name: str) -> int | None:
        process = self._processes.get(name)
        return None if process is None or process.poll() is not None else process.pid

    def send_signal(self, process_id: int, number: signal.Signals) -> None:
        os.kill(process_id, number)

    def start(self, name: str) -> None:
        if name in self._processes:
            self._processes[name].wait(10)
        self._processes[name] = spawn([SLEEP, "600"], folder=self._folder)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


def state_of(process_id: int) -> str:
    """S: waits, T: stopped."""
    return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until(holds: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)


def fault(kind: FaultKind, for_ms: int = 0, **details: Any) -> Fault:
    return Fault(0, 0, kind, for_ms, details)


def plan_of(*faults: Fault, duration_ms: int = 30_000) -> FaultPlan:
    return FaultPlan(
        1, duration_ms, tuple(Fault(n, f.at_ms, f.kind, f.for_ms, f.details) for n, f in enumerate(faults))
    )


def driver_of(target: Target, tmp_path: Path, *faults: Fault, **parts: Any) -> Driver:
    return Driver(plan_of(*faults), target, record_path=tmp_path / "faults.jsonl", **parts)


def carried_out(driver: Driver, tmp_path: Path) -> Record:
    """The record of the only fault, once it is over; it is in the file too, and took the time that it says."""
    assert driver.wait(30)
    driver.raise_failure()
    (line,) = (tmp_path / "faults.jsonl").read_text().splitlines()
    (record,) = driver.records
    assert Record.from_json(line) == record
    assert record.start_ns <= record.begin_ns <= record.end_ns <= time.monotonic_ns()
    return record


def values(bootstrap: str, topic: str) -> list[str]:
    return [value for _, value in read_by_requests(bootstrap, [(topic, 0)])[topic, 0]]


def store(bootstrap: str, topic: str, value: str) -> Any:
    with RawConnection(bootstrap) as client:
        client.send_record(topic, value)
        return client.receive().responses[0].partition_responses[0]


def new_topic(bootstrap: str) -> str:
    name = f"topic-{next(NUMBERS)}"
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(name, partitions=1)
    return name


def what_is_seen(client: RawConnection) -> str:
    try:
        client.receive(timeout_s=0.7)
    except TimeoutError:
        return "nothing"
    except Closed:
        return "closed"
    try:
        client.receive(timeout_s=0.1)
    except Closed:
        return "answered, then closed"
    except TimeoutError:
        return "answered"
    raise AssertionError("answered twice")


def write_until(bootstrap: str, topic: str, is_over: Callable[[], bool]) -> list[str]:
    """One idempotent producer that never gives up; what it was told is stored, in order."""
    settings = {
        "bootstrap.servers": bootstrap,
        "client.id": "writer",
        "request.timeout.ms": 500,
        "retry.backoff.ms": 10,
    }
    acknowledged: list[str] = []
    with Producer(settings) as producer:
        for number in itertools.count():
            producer.send(topic, str(number).encode(), partition=0)
            producer.flush()
            acknowledged.append(str(number))
            if is_over():
                return acknowledged
    raise AssertionError

"""A broker process under an attack from another process: what it holds, how long its loop is held, who waits.

A bystander asks for small things all the while, from this process, which is neither the broker nor the attacker. Three
busy processes on two cores also wait for each other, and the broker can do nothing about that. So the time that the
broker's loop and the bystander were ready to run, and the machine ran something else, is read from the kernel
(`schedstat`) around each request, and taken off. While the loop sleeps, it may wait for another of its threads, for its
result or for Python's lock: the time that this one was ready to run is taken off as well. All else counts as the
broker's: computing, its disk, its threads.
"""

from __future__ import annotations

import re
import resource
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semel.broker.process import Broker
from semel.records import reference
from semel.verify.hostile_sockets import ask
from semel.wire.api import Api

_ATTACKS = Path(__file__).with_name("load_attacks.py")
_PAUSE_S = 0.01


@dataclass(frozen=True)
class Wait:
    """How long a bystander's request took, and how much of it the broker is to blame for."""

    api: str
    seconds: float
    broker_s: float


@dataclass(frozen=True)
class Report:
    """What was seen while the attack lasted."""

    idle_bytes: int
    peak_bytes: int
    longest_turn_s: float
    turns_over_50_ms: int
    waits: Sequence[Wait]
    seconds: float
    said: str
    metrics: Mapping[str, float]

    @property
    def grown_bytes(self) -> int:
        return self.peak_bytes - self.idle_bytes

    @property
    def slowest(self) -> Wait:
        """The answer for which the broker let the bystander wait longest."""
        return max(self.waits, key=lambda one: one.broker_s)

    @property
    def median_s(self) -> float:
        """By the clock on the wall."""
        return statistics.median(one.seconds for one in self.waits)

    def __str__(self) -> str:
        slowest_s = max(one.seconds for one in self.waits)
        return (
            f"idle {self.idle_bytes >> 20} MiB, peak {self.peak_bytes >> 20} MiB, longest turn "
            f"{self.longest_turn_s * 1000:.0f} ms of processor time, {self.turns_over_50_ms} turns over 50 ms; "
            f"{len(self.waits)} small requests, median {self.median_s * 1000:.1f} ms, slowest "
            f"{slowest_s * 1000:.0f} ms by the clock; slowest by the broker's own fault "
            f"{self.slowest.broker_s * 1000:.0f} ms ({self.slowest.api}); {self.seconds:.1f} s, {self.said}"
        )


class Bystander:
    """A well-behaved client on one connection: one small Metadata and one record, over and over."""

    def __init__(self, broker: Broker) -> None:
        host, _, port = broker.bootstrap.rpartition(":")
        self._client = socket.create_connection((host, int(port)), timeout=60)
        self._broker_id = broker.process_id
        batch = reference.encode_batch([reference.Record(0, 0, b"k", b"v")])
        data = [{"name": "small", "partition_data": [{"index": 0, "records": batch}]}]
        self._requests: list[tuple[Api, int, dict[str, Any]]] = [
            (Api.METADATA, 4, {"topics": [{"name": "small"}], "allow_auto_topic_creation": True}),
            (Api.PRODUCE, 3, {"transactional_id": None, "acks": 1, "timeout": 1000, "topic_data": data}),
        ]
        self.waits: list[Wait] = []

    def close(self) -> None:
        self._client.close()

    def ask_once(self) -> None:
        for api, version, fields in self._requests:
            own, loop, others = self._schedules()
            began = time.monotonic()
            ask(self._client, api, version, **fields)
            seconds = time.monotonic() - began
            own_after, loop_after, others_after = self._schedules()
            loop_delayed_s = loop_after.delayed_s - loop.delayed_s
            slept_s = max(0.0, seconds - loop_delayed_s - (loop_after.ran_s - loop.ran_s))
            others_delayed_s = max(
                (after.delayed_s - others.get(task, _Schedule()).delayed_s for task, after in others_after.items()),
                default=0.0,
            )
            delayed_s = own_after.delayed_s - own.delayed_s + loop_delayed_s + min(slept_s, others_delayed_s)
            self.waits.append(Wait(api.name, seconds, seconds - delayed_s))

    def _schedules(self) -> tuple[_Schedule, _Schedule, dict[str, _Schedule]]:
        """Of this thread, of the broker's loop, and of the broker's other threads."""
        tasks = Path(f"/proc/{self._broker_id}/task")
        of_broker = {task.name: _Schedule.of(task) for task in tasks.iterdir()} if tasks.exists() else {}
        loop = of_broker.pop(str(self._broker_id), _Schedule())
        return _Schedule.of(Path("/proc/thread-self")), loop, of_broker


@dataclass(frozen=True)
class _Schedule:
    """For how long a thread has run so far, and for how long it could have run and was not let."""

    ran_s: float = 0.0
    delayed_s: float = 0.0

    @classmethod
    def of(cls, task: Path) -> _Schedule:
        try:
            ran_ns, delayed_ns, _ = (task / "schedstat").read_text().split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended; or a kernel that does not tell
            return cls()
        return cls(int(ran_ns) / 1e9, int(delayed_ns) / 1e9)


def attack(
    name: str, *, config: Mapping[str, object] | None = None, arguments: Sequence[str] = (), target: str | None = None
) -> Report:
    """Run one attack against a broker of its own, on its first listener or on `target`, and look on from the first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    with Broker(config=config, metrics_port=0, arguments=arguments) as broker, ExitStack() as stack:
        page = _wait_for_page(broker)
        target = target or broker.bootstrap
        bystander = stack.enter_context(closing(Bystander(broker)))
        bystander.ask_once()  # creates its topic
        bystander.waits.clear()
        read_metrics(page)  # the first one imports what it needs
        before = read_metrics(page)
        idle_bytes = memory_bytes(broker.process_id, "VmRSS")
        began = time.monotonic()
        command = [sys.executable, str(_ATTACKS), name, target, page]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as attacker:
            while attacker.poll() is None:
                bystander.ask_once()
                time.sleep(_PAUSE_S)
            assert attacker.stdout is not None
            said = attacker.stdout.read().decode()
            assert attacker.returncode == 0, said
        bystander.ask_once()
        after = read_metrics(page)
        peak_bytes = memory_bytes(broker.process_id, "VmHWM")
        log = broker.log_path.read_text(errors="replace")
    assert "Traceback" not in log, log[log.index("Traceback") :][:3000]

    def turns_over(seconds: str) -> int:
        under = 'semel_broker_loop_turn_busy_seconds_bucket{le="%s"}'
        return int(after[under % "+Inf"] - after[under % seconds] - before[under % "+Inf"] + before[under % seconds])

    return Report(
        idle_bytes,
        peak_bytes,
        after["semel_broker_loop_turn_busy_seconds_max"],
        turns_over("0.05"),
        bystander.waits,
        time.monotonic() - began,
        said.strip(),
        after,
    )


def _wait_for_page(broker: Broker) -> str:
    found = re.search(r"metrics for Prometheus: (\S+)", broker.log_path.read_text())
    assert found is not None
    return found[1]


def read_metrics(page: str) -> dict[str, float]:
    text = urllib.request.urlopen(page, timeout=60).read().decode()
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def memory_bytes(process_id: int, what: str) -> int:
    """`VmRSS`, what the process holds now, or `VmHWM`, the most that it ever held. On Linux only."""
    for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {process_id} has no {what}")


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        print(f"{chosen}: {attack(chosen)}", flush=True)

"""A rebalance storm: members that join, leave, are killed and are stopped past their session, while they copy a topic.

Every record must be in the output exactly once, the group's offsets at the end of the input, and no transaction open.
`python -m semel.verify.session_storm --help` runs it, on the embedded broker, on Apache Kafka or elsewhere.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from semel.client.admin import Admin
from semel.client.fetcher import Fetcher
from semel.client.producer import Producer
from semel.errors import SemelError
from semel.processes import spawn
from semel.verify.faults.targets import parse_target

KINDS: Final = ("join", "leave", "kill", "stop")
BROKER_CONFIG: Final = {
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "500",
    "group.consumer.min.session.timeout.ms": "500",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.heartbeat.interval.ms": "300",
    "group.consumer.session.timeout.ms": "3000",
}


class StormFailed(SemelError):
    """A record was lost or repeated, or something was left behind."""


@dataclass(frozen=True, slots=True)
class Storm:
    """What is to happen."""

    bootstrap: str
    protocol: str = "cooperative-sticky"
    """An assignor of classic groups, or `consumer`."""
    records: int = 60_000
    partitions: int = 12
    events: int = 12
    seed: int = 0
    session_timeout_ms: int = 3_000
    transaction_records: int = 1_000
    patience_s: float = 120.0


@dataclass(slots=True)
class StormReport:
    """What has happened; nothing is in here unless the verdict holds."""

    events: Counter[str] = field(default_factory=Counter[str])
    records: int = 0
    seconds: float = 0.0


class _Members:
    def __init__(self, storm: Storm, group: str, source: str, target: str, folder: Path) -> None:
        self.log = folder / "members.log"
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []
        options = {
            "--bootstrap": storm.bootstrap,
            "--group": group,
            "--source": source,
            "--target": target,
            "--protocol": storm.protocol,
            "--session-timeout-ms": str(storm.session_timeout_ms),
            "--records-max": str(storm.transaction_records),
        }
        self._command = [sys.executable, "-m", "semel.verify.session_storm_member"]
        self._command += [text for pair in options.items() for text in pair]

    def __len__(self) -> int:
        return len(self._running)

    def join(self) -> None:
        self._running.append(spawn(self._command, folder=self._folder, output=self.log))

    def take(self, rng: random.Random) -> subprocess.Popen[bytes]:
        return self._running.pop(rng.randrange(len(self._running)))

    def give_back(self, member: subprocess.Popen[bytes]) -> None:
        self._running.append(member)

    def check_alive(self) -> None:
        for member in self._running:
            if member.poll() is not None:
                raise StormFailed(f"A member ended by itself with code {member.returncode}:\n{self.last_words()}")

    def leave(self, member: subprocess.Popen[bytes]) -> None:
        member.send_signal(signal.SIGTERM)
        # One that was still being started has no answer to the signal yet, and ends by it.
        if member.wait(60) not in (0, -signal.SIGTERM):
            raise StormFailed(f"A member that was asked to leave ended with {member.returncode}:\n{self.last_words()}")

    def end(self) -> None:
        for member in self._running:
            member.kill()
            member.wait()
        self._running.clear()

    def last_words(self) -> str:
        return self.log.read_text()[-2_000:] if self.log.exists() else ""


def run_storm(storm: Storm) -> StormReport:
    """Raises `StormFailed` if any promise was broken."""
    rng, report, began = random.Random(storm.seed), StormReport(), time.monotonic()
    name = uuid.uuid4().hex[:8]
    group, source, target = f"storm-{name}", f"storm-in-{name}", f"storm-out-{name}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="semel-storm-")))
        admin = stack.enter_context(Admin({"bootstrap.servers": storm.bootstrap}))
        admin.create_topics(source, target, partitions=storm.partitions)
        producer = stack.enter_context(Producer(bootstrap_servers=storm.bootstrap))
        members = _Members(storm, group, source, target, folder)
        stack.callback(members.end)
        for _ in range(2):
            members.join()
        for number, kind in enumerate(_kinds(storm, rng)):
            first, last = (storm.records * edge // storm.events for edge in (number, number + 1))
            producer.send_table(source, _numbers(first, last))
            producer.flush()
            time.sleep(rng.random())
            _strike(kind, members, storm, rng)
            report.events[kind] += 1
            members.check_alive()
        if not len(members):
            members.join()
        _wait_done(storm, group, source, members)
        while len(members):
            members.leave(members.take(rng))
        _judge(storm, admin, group, source, target)
    report.records, report.seconds = storm.records, time.monotonic() - began
    return report


def _kinds(storm: Storm, rng: random.Random) -> list[str]:
    """Each kind as often as the others, in any order."""
    kinds = [KINDS[number % len(KINDS)] for number in range(storm.events)]
    rng.shuffle(kinds)
    return kinds


def _strike(kind: str, members: _Members, storm: Storm, rng: random.Random) -> None:
    if kind == "join" or len(members) <= 1:
        members.join()
    if kind == "join":
        return
    member = members.take(rng)
    if kind == "leave":
        members.leave(member)
    elif kind == "kill":
        member.kill()
        member.wait()
    else:
        member.send_signal(signal.SIGSTOP)
        time.sleep(storm.session_timeout_ms / 1000 + rng.random())
        member.send_signal(signal.SIGCONT)
        members.give_back(member)


def _numbers(first: int, last: int) -> pa.Table:
    values = np.arange(first, last, dtype=">i8")
    column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(8), len(values), [None, pa.py_buffer(values.tobytes())])
    keys = pa.array(np.char.mod("%d", np.arange(first, last) % 1_000).tolist()).cast(pa.binary())
    return pa.table({"key": keys, "value": column.cast(pa.binary())})


def _wait_done(storm: Storm, group: str, source: str, members: _Members) -> None:
    deadline = time.monotonic() + storm.patience_s
    with Admin({"bootstrap.servers": storm.bootstrap}) as admin:
        while (lag := _lag(storm, admin, group, source)) > 0:
            members.check_alive()
            if time.monotonic() > deadline:
                raise StormFailed(
                    f"{lag} records were not processed in {storm.patience_s:g} s.\n{members.last_words()}"
                )
            time.sleep(0.2)


def _lag(storm: Storm, admin: Admin, group: str, source: str) -> int:
    committed = admin.committed_offsets(group, require_stable=False)
    with Fetcher({"bootstrap.servers": storm.bootstrap}) as fetcher:
        ends = fetcher.offsets_for([(source, partition) for partition in range(storm.partitions)], "latest")
    return sum(end - (committed[tp].offset if tp in committed else 0) for tp, end in ends.items())


def _judge(storm: Storm, admin: Admin, group: str, source: str, target: str) -> None:
    seen = np.zeros(storm.records, np.int64)
    with Fetcher({"bootstrap.servers": storm.bootstrap}) as fetcher:
        fetcher.assign({(target, partition): "earliest" for partition in range(storm.partitions)})
        for table in fetcher.read_until(fetcher.end_offsets()):
            values = np.frombuffer(b"".join(table.column("value").to_pylist()), dtype=">i8")
            np.add.at(seen, values.astype(np.int64), 1)
    lost, repeated = int((seen == 0).sum()), int((seen > 1).sum())
    left = [
        one.transactional_id
        for one in admin.list_transactions()
        if one.transactional_id.startswith(group) and one.state == "Ongoing"
    ]
    if lost or repeated or left or _lag(storm, admin, group, source):
        raise StormFailed(
            f"Of {storm.records} records {lost} are lost and {repeated} appear more than once; transactions left open: "
            f"{left or 'none'}. Seed {storm.seed}, {storm.protocol}."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="embedded", help="embedded, kafka, kafka:VERSION, or HOST:PORT")
    parser.add_argument("--protocol", default="cooperative-sticky", help="an assignor, or consumer (KIP-848)")
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--events", type=int, default=52)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--transaction-version", type=int, help="1 or 2; without it, the broker's default")
    options = parser.parse_args()
    target = parse_target(options.target, transaction_version=options.transaction_version, config=BROKER_CONFIG)
    print(f"{options.target}, {options.protocol}, seed {options.seed}", flush=True)
    with target:
        report = run_storm(
            Storm(target.bootstrap, options.protocol, options.records, events=options.events, seed=options.seed)
        )
    print(f"{report.records} records exactly once through {dict(report.events)} in {report.seconds:.0f} s")


if __name__ == "__main__":
    main()

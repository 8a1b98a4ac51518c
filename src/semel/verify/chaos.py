"""Real brokers killed with SIGKILL under transactional load: nothing acknowledged is lost, nothing appears twice.

`python -m semel.verify.chaos --kills 200` runs one broker after another, in every mode, with real clients at work, and
kills each at random moments and at every named point of its code. It needs confluent-kafka.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from semel.broker.failpoints import POINTS, VARIABLE
from semel.broker.process import Broker
from semel.client.admin import Admin
from semel.errors import BrokerUnreachable, InvalidState
from semel.verify import chaos_verdict as verdict
from semel.verify.chaos_clients import (
    COMPACTED,
    COPIED,
    COPY_PARTITIONS,
    GROUP,
    INPUT,
    RETAINED,
    SHARED,
    TRANSACTION_TIMEOUT_MS,
    Client,
    Copier,
    KafkaIdempotent,
    KafkaTransactions,
    Reader,
    SemelTransactions,
    TopicMaker,
)
from semel.verify.chaos_ledger import Ledger, Violation
from semel.verify.chaos_reading import (
    Records,
    all_partitions,
    committed_positions,
    ends,
    read_by_librdkafka,
    read_by_requests,
)

FsyncMode = Literal["always", "commit", "never"]
KINDS: Final[tuple[tuple[FsyncMode, int], ...]] = tuple(itertools.product(("commit", "always", "never"), (2, 1)))
"""Sync mode and transaction protocol."""

_CONFIG: Final = {
    "auto.create.topics.enable": False,
    "transaction.state.log.num.partitions": 2,
    "transaction.state.log.segment.bytes": 8_000,
    "offsets.topic.num.partitions": 2,
    "offsets.topic.segment.bytes": 8_000,
    "log.cleaner.backoff.ms": 250,
    "log.cleaner.min.cleanable.ratio": 0.1,
    "log.retention.check.interval.ms": 250,
}
_KILLS_PER_WORLD: Final = 40
_POINT_PATIENCE_S: Final = 6.0
_POINT_TRIES: Final = 4
_SETTLE_S: Final = TRANSACTION_TIMEOUT_MS / 1000 + 15
_STOP_S: Final = 90.0
_WAS_KILLED: Final = f"ended with code {-signal.SIGKILL} "


@dataclass(slots=True)
class Report:
    """What a run has done, summed over its worlds."""

    kills: int = 0
    points: set[str] = field(default_factory=set[str])
    transactions: int = 0
    records: int = 0


class World:
    """One data directory and one load; brokers come and go."""

    def __init__(self, folder: Path, seed: int, fsync: FsyncMode, protocol: int) -> None:
        self.chance = random.Random(seed)
        self.ledger = Ledger()
        self.broker = Broker(
            data=folder, fsync=fsync, config={**_CONFIG, "transaction.version": protocol}, start_timeout_s=60
        )
        self.kills = 0
        self.points: set[str] = set()
        self._clients: list[Client] = []

    def __enter__(self) -> World:
        self.broker.start()
        bootstrap = self.broker.bootstrap
        small = {"internal.segment.bytes": "6000"}
        with Admin({"bootstrap.servers": bootstrap}) as admin:
            for topic, count in SHARED.items():
                admin.create_topics(topic, partitions=count, config=small)
            admin.create_topics(INPUT, COPIED, partitions=COPY_PARTITIONS, config=small)
            admin.create_topics(COMPACTED, partitions=1, config={**small, "cleanup.policy": "compact"})
            admin.create_topics(RETAINED, partitions=1, config={**small, "retention.bytes": "15000"})
        self.reader = Reader("reader", bootstrap, self.ledger, self._seed())
        kinds: list[Callable[[str, str, Ledger, int], Client]] = [
            SemelTransactions,
            SemelTransactions,
            KafkaTransactions,
            KafkaIdempotent,
            Copier,
            TopicMaker,
        ]
        self._clients = [
            make(f"{getattr(make, '__name__', '')}-{number}", bootstrap, self.ledger, self._seed())
            for number, make in enumerate(kinds)
        ]
        for client in (*self._clients, self.reader):
            client.start()
        self._wait_at_work()
        return self

    def _wait_at_work(self) -> None:
        deadline = time.monotonic() + _STOP_S
        while any(client.name not in self.ledger.progress() for client in self._clients):
            self.ledger.check_failures()
            if time.monotonic() > deadline:
                raise Violation(f"only these clients got to work: {self.ledger.progress()}")
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        for client in (*self._clients, self.reader):
            client.stop()
        self.broker.close()

    def _seed(self) -> int:
        return self.chance.getrandbits(32)

    # Killing.

    def kill_at_random(self) -> None:
        """One round: let it run for a while, kill it, perhaps again while it recovers, start it, look at it."""
        how = self.chance.random()
        if how < 0.15:
            time.sleep(self.chance.uniform(0, 0.06))
        elif how < 0.5:
            time.sleep(self.chance.uniform(0.1, 0.6))
        else:
            # librdkafka takes a second to find its coordinator again; without this its transactions would all time out.
            self._wait_progress(2.0)
            time.sleep(self.chance.uniform(0, 0.2))
        self._kill()
        before = self.ledger.ends()
        if how > 0.85:
            for _ in range(2):
                self._kill_while_starting()
        self._start_and_look(before)

    def _wait_progress(self, seconds: float) -> None:
        """Return when every client has got something done, or some time has passed."""
        before = self.ledger.progress()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            now = self.ledger.progress()
            if all(now.get(client.name, 0) > before.get(client.name, 0) for client in self._clients):
                return
            time.sleep(0.02)

    def kill_at(self, point: str) -> bool:
        """Let the next broker die at a point of its code; False if it does not get there."""
        self._kill()
        with _environment(VARIABLE, f"{point}:{self._times_for(point)}"):
            try:
                self.broker.start()
            except BrokerUnreachable as failure:
                if _WAS_KILLED not in str(failure):
                    raise
                is_hit = True  # the points of recovery come before it is ready
            else:
                is_hit = self._dies_within(_POINT_PATIENCE_S)
        before = self.ledger.ends()
        self._kill()
        if is_hit:
            self.points.add(point)
        self._start_and_look(before)
        return is_hit

    def _times_for(self, point: str) -> int:
        if point == "between_new_partitions":
            # Each start opens those there are, up to 20 gaps between them and those of topics that stay.
            return self.chance.randint(1, 60)
        return self.chance.randint(1, 4) if point not in ("after_partitions_opened", "after_coordinators_loaded") else 1

    def _dies_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.broker.is_running and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.broker.is_running

    def _kill(self) -> None:
        self.kills += self.broker.is_running
        self.broker.kill()

    def _kill_while_starting(self) -> None:
        timer = threading.Timer(self.chance.uniform(0.05, 0.35), self._kill_process)
        timer.start()
        try:
            self.broker.start()
        except BrokerUnreachable as failure:
            if _WAS_KILLED not in str(failure):
                raise
            self.kills += 1
        timer.join()
        self._kill()

    def _kill_process(self) -> None:
        try:
            os.kill(self.broker.process_id, signal.SIGKILL)
        except (InvalidState, ProcessLookupError):
            return  # it was not there yet, or is gone: then it is killed when it is ready

    def _start_and_look(self, before: dict[tuple[str, int], int]) -> None:
        self.broker.start()
        verdict.check_ends(before, ends(self.broker.bootstrap, before, is_stable=False) if before else {})
        self.ledger.check_failures()

    # The end.

    def judge(self) -> Report:
        """Let everybody finish, read everything in two ways, and hold it against the ledger; then restart twice."""
        self._finish_clients()
        bootstrap = self.broker.bootstrap
        self._wait_stable()
        partitions = [where for where in all_partitions(bootstrap) if not where[0].startswith(("__", "passing-"))]
        records = read_by_requests(bootstrap, partitions)
        stable = ends(bootstrap, partitions, is_stable=True)
        verdict.check_same(records, read_by_librdkafka(bootstrap, stable), "Fetch and librdkafka do not agree")
        verdict.check_everything(self.ledger, records)
        verdict.check_reader(self.reader.seen, records)
        inputs = [(INPUT, index) for index in range(COPY_PARTITIONS)]
        verdict.check_positions(committed_positions(bootstrap, GROUP, inputs), records)
        verdict.check_topics(self.ledger, (topic for topic, _ in all_partitions(bootstrap)))
        self._check_progress()
        self.broker.kill()
        self.broker.restart()
        verdict.check_same(records, self._read_again(records), "after a kill at rest")
        self.broker.restart()
        verdict.check_same(records, self._read_again(records), "after a clean restart")
        self.ledger.check_failures()
        return Report(self.kills, self.points, len(self.ledger.transactions), sum(map(len, records.values())))

    def _read_again(self, before: Records) -> Records:
        """Retention and compaction go on at rest; what they may change is left out."""
        kept = {where for where in before if where[0] not in (COMPACTED, RETAINED)}
        found = read_by_requests(self.broker.bootstrap, kept)
        return {**found, **{where: before[where] for where in before if where not in kept}}

    def _finish_clients(self) -> None:
        """The producers first, so that the copier and the reader can get to the end."""
        last = [client for client in self._clients if isinstance(client, Copier)]
        for client in self._clients:
            if client not in last:
                client.stop()
        for client in self._clients:
            if client not in last:
                client.wait_ended(_STOP_S)
        self._wait_copied()
        for client in (*last, self.reader):
            client.stop()
            client.wait_ended(_STOP_S)
        self.ledger.check_failures()

    def _wait_copied(self) -> None:
        inputs = [(INPUT, index) for index in range(COPY_PARTITIONS)]
        goal = ends(self.broker.bootstrap, inputs, is_stable=False)
        deadline = time.monotonic() + _STOP_S
        while (found := committed_positions(self.broker.bootstrap, GROUP, inputs)) != goal:
            if time.monotonic() > deadline:
                raise Violation(f"the copier stands at {found} and does not get to {goal}")
            time.sleep(0.1)

    def _wait_stable(self) -> None:
        """No transaction may stay open for longer than its time-out."""
        bootstrap = self.broker.bootstrap
        partitions = all_partitions(bootstrap)
        deadline = time.monotonic() + _SETTLE_S
        while (stable := ends(bootstrap, partitions, is_stable=True)) != (
            now := ends(bootstrap, partitions, is_stable=False)
        ):
            if time.monotonic() > deadline:
                stuck = {where: (stable[where], now[where]) for where in now if stable[where] != now[where]}
                raise Violation(f"readers do not get to the end, last stable offset and end are {stuck}")
            time.sleep(0.1)

    def _check_progress(self) -> None:
        progress = self.ledger.progress()
        idle = [client.name for client in self._clients if not progress.get(client.name)]
        if idle:
            raise Violation(f"nothing that {idle} tried has succeeded")


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


@contextmanager
def world(seed: int, fsync: FsyncMode, protocol: int) -> Iterator[World]:
    """A world in a temporary folder; a violation is told with the last lines of the broker's log."""
    with (
        tempfile.TemporaryDirectory(prefix="semel-chaos-") as folder,
        World(Path(folder) / "data", seed, fsync, protocol) as made,
    ):
        try:
            yield made
        except BaseException as error:
            error.add_note(f"{seed=} {fsync=} {protocol=}, after {made.kills} kills")
            if made.broker.log_path.exists():
                error.add_note("the broker's last words:\n" + "\n".join(_last_lines(made.broker.log_path)))
            raise


def _last_lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()[-30:]


def kill_at_random(seed: int, kills: int, say: Callable[[str], None] = print) -> Report:
    """So many kills in all, over as many worlds as it takes, each of another kind."""
    total = Report()
    kinds = random.Random(seed).sample(KINDS, len(KINDS))
    worlds = max(1, min(len(KINDS), -(-kills // _KILLS_PER_WORLD)))
    for number in range(worlds):
        fsync, protocol = kinds[number]
        goal = kills * (number + 1) // worlds - total.kills
        with world(seed + number, fsync, protocol) as made:
            while made.kills < goal:
                made.kill_at_random()
            _add(total, made.judge())
        say(f"fsync {fsync}, protocol {protocol}: {made.kills} kills, {len(made.ledger.transactions)} transactions")
    return total


def kill_at_points(seed: int, points: Sequence[str], say: Callable[[str], None] = print) -> Report:
    """Each point once, in one world."""
    fsync, protocol = random.Random(seed).choice(KINDS)
    with world(seed, fsync, protocol) as made:
        for point in points:
            if not any(made.kill_at(point) for _ in range(_POINT_TRIES)):
                raise Violation(f"no broker has reached the point {point}: the load does not lead there any more")
        report = made.judge()
    say(
        f"fsync {fsync}, protocol {protocol}: killed at {len(report.points)} points, {report.transactions} transactions"
    )
    return report


def _add(total: Report, one: Report) -> None:
    total.kills += one.kills
    total.points |= one.points
    total.transactions += one.transactions
    total.records += one.records


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m semel.verify.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="at random moments (200)")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="for the same choices again")
    arguments = parser.parse_args(argv)
    print(f"seed {arguments.seed}")
    started = time.monotonic()
    report = kill_at_random(arguments.seed, arguments.kills)
    _add(report, kill_at_points(arguments.seed, sorted(POINTS)))
    print(
        f"{report.kills} kills, {len(report.points)} points, {report.transactions} transactions, {report.records} "
        f"records read: nothing lost, nothing twice ({time.monotonic() - started:.0f} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

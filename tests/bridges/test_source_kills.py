"""`kill -9` of sinks at each named point, and a storm of kills of relay and sink under ten readers."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest
from database_scene import Place, broker, make_postgres, place, server
from source_scene import CREATE, SUM, TABLES, TOTAL, SourceTopics, balances_after, relay, transfers, wait_for

import semel
from semel.bridges.failpoints import STOP_VARIABLE, VARIABLE
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

__all__ = ["broker", "place", "server"]

WORKER = Path(__file__).parent / "source_worker.py"
POINTS = ["before_write", "after_merge", "before_commit", "after_commit"]


def sinks(topics: SourceTopics, place: Place, count: int, *points: str, **options: Any) -> list[str]:
    told = [topics.bootstrap, topics.source, str(count), place.kind, place.address, json.dumps(options)]
    return [sys.executable, str(WORKER), "sink", *told, *points]


def balances(place: Place) -> dict[tuple[str, int], int]:
    query = " UNION ALL ".join(f"SELECT '{table}', account, balance FROM {table}" for table in TABLES)
    return {(table, account): balance for table, account, balance in place.ask(query)}


@pytest.mark.parametrize("memory_bytes_max", [64_000_000, 5_000])
def test_the_copy_is_exact_though_the_sink_is_killed_at_every_point(
    broker: EmbeddedBroker, place: Place, memory_bytes_max: int
) -> None:
    """H1: each life dies at the next point, with memory enough and with events in a file; the last one finishes."""
    topics = SourceTopics(broker.bootstrap).create()
    place.do(*CREATE)
    count = 60
    relay(topics, transfers(21, count))
    lives = [f"{point}:3" for point in POINTS]
    done = subprocess.run(
        sinks(topics, place, count, *lives, "", delivery_events_max=12, memory_bytes_max=memory_bytes_max),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert [int(status) for status in done.stdout.split()] == [-signal.SIGKILL] * len(lives) + [0], done.stderr
    assert balances(place) == balances_after(transfers(21, count))
    assert place.ask("SELECT next_offset FROM semel_inbox WHERE topic LIKE '%/transaction'") == [(count + 1,)]


def test_a_sink_that_wakes_after_its_successor_cannot_commit(
    broker: EmbeddedBroker, server: Postgres, tmp_path: Path
) -> None:
    """Two readers of one name: the one that was stopped between two transactions finds the number moved."""
    place, note = make_postgres(server), tmp_path / "stopped"
    topics = SourceTopics(broker.bootstrap).create()
    place.do(*CREATE)
    count = 60
    relay(topics, transfers(22, count))
    environment = {**os.environ, VARIABLE: "before_write:3", STOP_VARIABLE: str(note)}
    zombie = subprocess.Popen(
        sinks(topics, place, count, delivery_events_max=10), env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: note.exists() and note.read_text() != "", "the first sink to stop")
        subprocess.run(sinks(topics, place, count, ""), check=True, timeout=120)
        assert balances(place) == balances_after(transfers(22, count))
        os.kill(zombie.pid, signal.SIGCONT)
        _, said = zombie.communicate(timeout=60)
    finally:
        zombie.kill()
        zombie.wait()
    assert "InboxOvertaken" in said
    assert balances(place) == balances_after(transfers(22, count))


# -- the storm -------------------------------------------------------------------------------------------------------


class Reader(threading.Thread):
    """Looks at the total all the time, and counts what it sees."""

    def __init__(self, address: str, query: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._query = query
        self.seen: Counter[int] = Counter()
        self.is_over = threading.Event()

    def run(self) -> None:
        with psycopg.connect(self._address, autocommit=True) as connection:
            while not self.is_over.is_set():
                [(total,)] = connection.execute(self._query.encode()).fetchall()
                self.seen[int(total)] += 1


class Supervised:
    """A process that is started again whenever it was killed."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self.kills = 0
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    @property
    def is_done(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        if not self.is_done:
            self.kills += 1
        self.process.kill()
        self.process.wait()


def storm(count: int, kills: int, rng: random.Random) -> tuple[list[Reader], int]:
    """The readers, and how many kills there were."""
    with Postgres(settings={"max_connections": "60"}) as server, semel.Broker() as broker:
        place = make_postgres(server)
        topics = SourceTopics(broker.bootstrap).create()
        place.do(*CREATE)
        seed = rng.randrange(1000)
        relay(topics, list(transfers(seed, 0)))
        readers = [Reader(place.address, SUM) for _ in range(10)]
        writer = Supervised(
            [sys.executable, str(WORKER), "relay", topics.bootstrap, topics.source, str(count), str(seed)]
        )
        sink = Supervised(sinks(topics, place, count))
        try:
            for reader in readers:
                reader.start()
            while writer.kills + sink.kills < kills and not (writer.is_done and sink.is_done):
                time.sleep(rng.uniform(0.3, 1.2))
                victim = rng.choice([writer, sink])
                victim.kill()
                victim.start()
            while not (writer.is_done and sink.is_done):
                time.sleep(0.1)
            assert (writer.process.returncode, sink.process.returncode) == (0, 0)
        finally:
            for process in (writer, sink):
                process.process.kill()
                process.process.wait()
            for reader in readers:
                reader.is_over.set()
            for reader in readers:
                reader.join()
        assert balances(place) == balances_after(transfers(seed, count))
        return readers, writer.kills + sink.kills


@pytest.mark.chaos
def test_the_total_is_constant_at_every_instant_through_kills_of_relay_and_sink() -> None:
    """H1: transfers over two to five rows in three tables; ten readers look all the time."""
    seed = int(os.environ.get("SEMEL_SEED", "20261119"))
    count = int(os.environ.get("SEMEL_TRANSFERS", "20000"))
    kills = int(os.environ.get("SEMEL_TRANSFER_KILLS", "20"))
    print(f"SEMEL_SEED={seed} SEMEL_TRANSFERS={count} SEMEL_TRANSFER_KILLS={kills}")
    readers, killed = storm(count, kills, random.Random(seed))
    looks = sum((reader.seen for reader in readers), Counter[int]())
    print(f"{looks.total():,} looks, {killed} kills: {dict(looks)}")
    assert set(looks) <= {0, TOTAL}
    assert looks[TOTAL] > 100
    assert killed > 0

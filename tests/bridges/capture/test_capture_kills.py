"""`kill -9` at every named point and at random, zombies, lost servers: nothing lost or repeated, keys in order."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from capture_lives import AT_THE_BEGINNING, NUMBERS, PORTION, command, ids, insert, live, points_of_a_stream
from capture_scene import SETTINGS, Source, broker, server, source
from session_scene import wait_until

import semel
from semel.bridges.failpoints import STOP_VARIABLE, VARIABLE
from semel.testing.postgres import Postgres

__all__ = ["broker", "server", "source"]


def test_the_snapshot_is_there_once_though_the_capture_is_killed_at_every_point_of_its_beginning(
    source: Source,
) -> None:
    """G2: what died is never seen; the next life makes a new slot. The last kills come when all is committed."""
    source.make(NUMBERS)
    insert(source, 1, 12)
    assert live(source, *AT_THE_BEGINNING) == [-signal.SIGKILL] * len(AT_THE_BEGINNING)
    assert source.changes() == []
    insert(source, 13, 14)
    assert live(source, "relay_end_sent") == [-signal.SIGKILL]
    insert(source, 15, 17)
    assert live(source, "") == [0]
    assert sorted(ids(source)) == list(range(1, 18))
    source.ends()


def test_every_change_is_there_once_though_the_capture_is_killed_at_every_point(source: Source) -> None:
    """G2: each life dies at the next point, in its second portion; transactions are larger and smaller than one."""
    source.make(NUMBERS)
    source.capture()
    points = points_of_a_stream()
    count = (2 * PORTION * len(points) // 20 + 2) * 20
    for first in range(1, count, 20):
        insert(source, first, first + 11)
        for number in range(first + 12, first + 20):
            insert(source, number, number)
    assert live(source, *points, "") == [-signal.SIGKILL] * len(points) + [0]
    assert ids(source) == list(range(1, count + 1))
    assert [end.events for end in source.ends()] == [0] + [12, *[1] * 8] * (count // 20)


@pytest.mark.parametrize("point", ["relay_rows_read", "relay_events_written", "relay_progress_written"])
def test_a_zombie_that_wakes_after_its_successor_commits_nothing(source: Source, tmp_path: Path, point: str) -> None:
    """Stopped with SIGSTOP in its second portion; the successor ends its connection, and takes slot and name."""
    source.make(NUMBERS)
    source.capture()
    insert(source, 1, 4 * PORTION)
    note = tmp_path / "stopped"
    environment = {**os.environ, VARIABLE: f"{point}:2", STOP_VARIABLE: str(note)}
    zombie = subprocess.Popen(command(source), env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: note.exists() and note.read_text() != "", "the first capture to stop")
        source.capture()
        assert ids(source) == list(range(1, 4 * PORTION + 1))
        os.kill(zombie.pid, signal.SIGCONT)
        _, said = zombie.communicate(timeout=60)
    finally:
        zombie.kill()
        zombie.wait()
    assert "Another relay of the name" in said
    assert ids(source) == list(range(1, 4 * PORTION + 1))


@pytest.mark.parametrize("head_start_s", [0.0, 0.05, 0.1])
def test_two_captures_that_begin_together_write_the_snapshot_once(source: Source, head_start_s: float) -> None:
    """One of them fences the other, also in the middle of the snapshot. The slot of the one that stays is kept."""
    source.make(NUMBERS)
    insert(source, 1, 50)

    def run(delay_s: float) -> None:
        time.sleep(delay_s)
        with suppress(semel.SemelError):
            source.capture(transaction_rows_max=10, end_on_sigterm=False)

    both = [threading.Thread(target=run, args=[delay_s]) for delay_s in (0, head_start_s)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    insert(source, 51, 52)
    source.capture()
    assert sorted(ids(source)) == list(range(1, 53))
    source.ends()


def test_a_capture_goes_on_after_postgres_and_the_broker_were_restarted() -> None:
    """Immediate shutdown of Postgres, kill -9 of the broker, while rows are written: the same process goes on."""
    with Postgres(settings=SETTINGS) as server, semel.Broker() as broker:
        source = Source("postgres", server.uri, broker.bootstrap)
        source.make(NUMBERS)
        stop, reports = threading.Event(), list[Any]()
        running = threading.Thread(
            target=lambda: reports.append(source.capture(idle_ms=None, stop=stop, retry_s=60.0)), daemon=True
        )
        running.start()
        try:
            insert(source, 1, 50)
            wait_until(lambda: len(source.changes()) == 50, "the first rows")
            server.stop_at_once()
            server.start()
            insert(source, 51, 100)
            wait_until(lambda: len(source.changes()) == 100, "rows after Postgres was back")
            broker.kill()
            insert(source, 101, 150)
            broker.start()
            wait_until(lambda: len(source.changes()) == 150, "rows after the broker was back", 60)
        finally:
            stop.set()
            running.join(60)
        assert sorted(ids(source)) == list(range(1, 151))
        assert [report.rows for report in reports] == [150]


class Writer(threading.Thread):
    """Transactions of many rows, each with a new state of one counter, until it is told to stop or has its rows."""

    def __init__(self, address: str, number: int, rows: int, seed: int) -> None:
        super().__init__(daemon=True)
        self._address, self._number, self._rows = address, number, rows
        self._chance = random.Random(seed)
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.is_set():
            try:
                with psycopg.connect(self._address) as connection:
                    while not self.is_over.is_set() and self._write(connection):
                        pass
                    return
            except psycopg.OperationalError:
                time.sleep(0.1)  # the server is down; whether the last commit was made is found out from the table

    def _write(self, connection: Any) -> bool:
        """False if all rows are there."""
        [(count,)] = connection.execute("SELECT n FROM counters WHERE writer = %s", [self._number]).fetchall()
        if count >= self._rows:
            return False
        more = min(self._rows - count, self._chance.choice([1, 3, 20, 200]))
        connection.execute(
            "INSERT INTO accounts SELECT n * 10 + %s, %s FROM generate_series(%s::int, %s::int) n",
            [self._number, self._number, count, count + more - 1],
        )
        connection.execute("UPDATE counters SET n = n + %s WHERE writer = %s", [more, self._number])
        if self._chance.random() < 0.1:
            connection.rollback()
        else:
            connection.commit()
        time.sleep(self._chance.uniform(0, 0.04))
        return True


def storm(rows: int, kills: int, chance: random.Random) -> Counter[str]:
    """Returns who was killed how often."""
    killed: Counter[str] = Counter()
    settings = {**SETTINGS, "shared_buffers": "64MB", "max_wal_size": "1GB"}
    with Postgres(settings=settings) as server, semel.Broker() as broker:
        source = Source("postgres", server.uri, broker.bootstrap)
        source.make(NUMBERS, "CREATE TABLE counters (writer int PRIMARY KEY, n int)", tables=("accounts", "counters"))
        source.do("INSERT INTO counters SELECT n, 0 FROM generate_series(0, 3) n")
        writers = [Writer(source.address, number, rows // 4, chance.randrange(1000)) for number in range(4)]
        begin = command(source, idle_ms=None, transaction_rows_max=500, retry_s=60, heartbeat_s=0.5)
        capture = subprocess.Popen(begin)
        for writer in writers:
            writer.start()
        try:
            while killed.total() < kills:
                time.sleep(chance.uniform(0.5, 2.5))
                victim = chance.choice(["capture", "capture", "postgres", "broker"])
                killed[victim] += 1
                if victim == "capture":
                    capture.kill()
                    capture.wait()
                    capture = subprocess.Popen(begin)
                elif victim == "postgres":
                    server.stop_at_once()
                    server.start()
                else:
                    broker.kill()
                    broker.start()
                assert capture.poll() is None, "the capture has given up"
            for writer in writers:
                writer.join(600)
                assert not writer.is_alive()
            until = time.monotonic() + 600
            while sum(one.value["n"] == rows // 4 for one in source.changes("counters")) < 4:
                assert time.monotonic() < until, "the rest did not come"
                time.sleep(1)
        finally:
            for writer in writers:
                writer.is_over.set()
            capture.terminate()
            capture.wait(60)
        check(source, rows)
    return killed


def check(source: Source, rows: int) -> None:
    """Each row once, each key in the order of its writer, each transaction whole and in the order of commits."""
    found = source.changes()
    assert len(found) == rows
    expected = Counter(number for (number,) in source.ask("SELECT id FROM accounts"))
    assert Counter(one.value["id"] for one in found) == expected
    for writer in range(4):
        mine = [one.value["id"] // 10 for one in found if one.value["key"] == writer]
        assert mine == list(range(rows // 4))
    counters = source.changes("counters")
    for writer in range(4):
        states = [one.value["n"] for one in counters if one.value["writer"] == writer]
        assert states == sorted(set(states))
    sizes = Counter(one.number for one in [*found, *counters])
    assert {end.transaction: end.events for end in source.ends() if end.events} == dict(sizes)


@pytest.mark.chaos
def test_changes_are_there_once_through_kills_of_capture_postgres_and_broker() -> None:
    """G2: SEMEL_CAPTURE_KILLS kills over SEMEL_CAPTURE_ROWS rows."""
    seed = int(os.environ.get("SEMEL_SEED", "20261119"))
    rows = int(os.environ.get("SEMEL_CAPTURE_ROWS", "20000")) // 4 * 4
    kills = int(os.environ.get("SEMEL_CAPTURE_KILLS", "6"))
    print(f"SEMEL_SEED={seed} SEMEL_CAPTURE_ROWS={rows} SEMEL_CAPTURE_KILLS={kills}")
    killed = storm(rows, kills, random.Random(seed))
    print(f"{rows:,} rows, kills: {dict(killed)}")
    assert killed.total() == kills

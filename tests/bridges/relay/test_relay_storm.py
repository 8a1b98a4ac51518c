"""32 writers with pauses, rollbacks and savepoints, while relay, Postgres and broker are killed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psycopg
import pytest
from outbox_writers import Writers
from relay_scene import Outbox, read_topic

import semel
from semel.testing.postgres import Postgres

WORKER = Path(__file__).parent / "relay_worker.py"


class BareIdReader(threading.Thread):
    """The usual way, beside the relay: on from the highest id that was seen."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        self.found: Counter[tuple[str, str]] = Counter()
        self.is_over = threading.Event()

    def run(self) -> None:
        last, is_last_look = 0, False
        while not is_last_look:
            is_last_look = self.is_over.is_set()
            try:
                with psycopg.connect(self._address) as connection:
                    rows = connection.execute(
                        "SELECT id, key, value FROM outbox WHERE id > %s ORDER BY id", (last,)
                    ).fetchall()
            except psycopg.OperationalError:
                is_last_look = False
                continue
            self.found.update((key, value) for _, key, value in rows)
            last = rows[-1][0] if rows else last
            time.sleep(0.01)


class RelayProcess:
    def __init__(self, outbox: Outbox) -> None:
        given = {"name": outbox.name, "bootstrap": outbox.bootstrap, "transaction_rows_max": 500, "retry_s": 120}
        self._command = [sys.executable, str(WORKER), outbox.address, json.dumps(given)]
        self.ended_by_itself = 0
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        # A relay that is started while the broker is away ends with an error, and its supervisor starts it again.
        self.ended_by_itself += self.process.poll() is not None
        self.process.kill()
        self.process.wait()


def storm(count: int, kills: int, rng: random.Random) -> None:
    with Postgres(settings={"max_connections": "60"}) as server, semel.Broker() as broker:
        outbox = Outbox("postgres", server.uri, broker.bootstrap)
        outbox.make_table()
        writers, bare = Writers(server.uri, outbox.topic, count, rng), BareIdReader(server.uri)
        relay = RelayProcess(outbox)
        try:
            writers.start()
            bare.start()
            for number in range(kills):
                time.sleep(rng.uniform(1, 3))
                if number % 4 == 3:
                    server.stop_at_once()
                    server.start()
                elif number % 4 == 1 and number > 1:
                    broker.kill()
                    broker.start()
                else:
                    relay.kill()
                    relay.start()
            writers.join()
            bare.is_over.set()
            bare.join(60)
        finally:
            relay.kill()
        outbox.relay(retry_s=60.0)
        expected = Counter(outbox.ask("SELECT key, value FROM outbox"))
        records = read_topic(outbox.bootstrap, outbox.topic)
        found = Counter(((record.key or b"").decode(), (record.value or b"").decode()) for record in records)
        lost_by_bare = (expected - bare.found).total()
        print(f"{count} rows asked for, {expected.total()} committed, {dict(writers.outcomes)}, {kills} kills")
        assert kills > 4 or relay.ended_by_itself == 0
        print(f"lost {(expected - found).total()}, repeated {(found - expected).total()}, bare id lost {lost_by_bare}")
        assert found == expected
        assert expected.total() >= count
        assert outbox.is_in_order()
        assert lost_by_bare > 0
        assert writers.outcomes["savepoints"] > 0
        assert writers.outcomes["rollbacks"] > 0


def test_rows_of_many_writers_are_relayed_once_and_in_order_and_a_relay_on_the_bare_id_loses_some(
    rng: random.Random,
) -> None:
    """G1: the everyday size."""
    storm(int(os.environ.get("SEMEL_RELAY_ROWS", "4000")), int(os.environ.get("SEMEL_RELAY_KILLS", "2")), rng)


@pytest.mark.chaos
def test_two_hundred_thousand_rows_through_twenty_kills(rng: random.Random) -> None:
    """G1: kill -9 of relay and broker, immediate shutdown of Postgres."""
    storm(int(os.environ.get("SEMEL_RELAY_ROWS", "200000")), int(os.environ.get("SEMEL_RELAY_KILLS", "20")), rng)

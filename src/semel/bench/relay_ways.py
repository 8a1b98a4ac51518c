"""One way of bringing rows of an outbox in Postgres to Kafka, in a process of its own that is bound to one core.

`python -m semel.bench.relay_ways WAY OPTIONS` relays what is there and prints what it took, or with `serve` relays
until its input ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import Producer as ConfluentProducer

from semel.bridges.relay.relay import relay

LOOK_S: Final = 0.01
"""How often the loop by hand looks for rows when there are none: ten times as often as most do."""
PORTION: Final = 10_000
WRITING: Final = {
    "linger.ms": 5,
    "batch.size": 1_048_576,
    "batch.num.messages": 100_000,
    "queue.buffering.max.messages": 1_000_000,
}


def by_semel(options: Mapping[str, Any], stop: threading.Event, ready: Callable[[], None]) -> int:
    """`semel.relay`: exactly once, with its progress in Kafka."""
    return relay(
        options["database"],
        name=options["name"],
        stop=stop,
        on_ready=ready,
        idle_ms=None if options["serve"] else 0,
        settings={"bootstrap.servers": options["bootstrap"]},
    ).rows


def by_hand(options: Mapping[str, Any], stop: threading.Event, ready: Callable[[], None]) -> int:
    """What people write: the rows above the highest id so far, a produce for each, a flush. Without any guarantee.

    It loses rows that commit out of order, repeats after a crash, and keeps its place in memory alone.
    """
    connection = _connect(options["database"])
    producer = ConfluentProducer({"bootstrap.servers": options["bootstrap"], **WRITING})
    producer.list_topics(timeout=10)
    ready()
    produce, last, done = producer.produce, 0, 0
    with connection.cursor() as cursor:
        while not stop.is_set():
            cursor.execute(
                "SELECT id, topic, key, value FROM outbox WHERE id > %s ORDER BY id LIMIT %s", (last, PORTION)
            )
            rows = cursor.fetchall()
            for _, topic, key, value in rows:
                produce(topic, value, key)
            producer.flush()
            if rows:
                last, done = rows[-1][0], done + len(rows)
            elif options["serve"]:
                time.sleep(LOOK_S)
            else:
                break
    return done


def _connect(database: str) -> Any:
    """psycopg2 where it is installed, as it is the quicker one here; else psycopg 3."""
    try:
        import psycopg2  # pyright: ignore[reportMissingModuleSource]
    except ImportError:
        import psycopg

        return psycopg.connect(database, autocommit=True)
    connection = psycopg2.connect(database)
    connection.autocommit = True
    return connection


WAYS: Final = {"semel": by_semel, "hand": by_hand}


def main(way: str, text: str) -> None:
    options = json.loads(text)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    stop = threading.Event()
    began: list[tuple[float, float]] = []

    def ready() -> None:
        began.append((time.perf_counter(), time.process_time()))
        if options["serve"]:
            print("ready", flush=True)
            threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()

    rows = WAYS[way](options, stop, ready)
    [(wall, used)] = began
    print(json.dumps({"rows": rows, "seconds": time.perf_counter() - wall, "cpu": time.process_time() - used}))


if __name__ == "__main__":
    main(*sys.argv[1:])

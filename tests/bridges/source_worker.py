"""A relay of transfers, and sinks that apply them, as processes that die.

    python source_worker.py relay BOOTSTRAP SOURCE COUNT SEED
    python source_worker.py sink BOOTSTRAP SOURCE COUNT KIND ADDRESS OPTIONS [POINT...]
    python source_worker.py session BOOTSTRAP SOURCE COUNT OUTPUT

A session writes the number of each transaction, once for each event of it, to the topic OUTPUT, up to number COUNT.
The relay writes transfers up to number COUNT and goes on where one before it was killed. Each sink is a life that dies
at its POINT such as `before_commit:3`; with `` it ends when number COUNT is applied. The exit status of each is a line
of the output; they are forks of this process, because most of a start is imports. Without POINTs this process is it.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sqlite3
import sys
from contextlib import closing
from typing import Any

import psycopg
from source_scene import Relay, SourceTopics, apply_rows, transfers

import semel
from semel.bridges import failpoints
from semel.bridges.source_inbox import SourceInbox


def run_relay(bootstrap: str, source: str, count: str, seed: str) -> None:
    topics = SourceTopics(bootstrap, source)
    relay = Relay(topics, random.Random(int.from_bytes(os.urandom(4))), events_max=300)
    relay.write(transfers(int(seed), int(count)))
    relay.close()


def run_sink(bootstrap: str, source: str, last: int, kind: str, address: str, options: dict[str, Any]) -> None:
    topics = SourceTopics(bootstrap, source)
    connection: Any = sqlite3.connect(address, timeout=60) if kind == "sqlite" else psycopg.connect(address)
    given = {"topics": topics.topics, "name": "copy", "fetch_max_wait_ms": 20, **options}
    with closing(connection), SourceInbox(connection, bootstrap=bootstrap, source=source, **given) as inbox:
        while inbox.applied is None or inbox.applied < last:
            delivery = inbox.next(200)
            if delivery is None:
                continue
            failpoints.reach("before_write")
            with delivery as handle:
                for number, transaction in enumerate(delivery.transactions()):
                    apply_rows(handle, topics, transaction.rows())
                    if number == 0:
                        failpoints.reach("after_merge")  # some of the transactions are written, and no position moved


def live(bootstrap: str, source: str, count: str, kind: str, address: str, more: str, *points: str) -> None:
    if not points:
        run_sink(bootstrap, source, int(count), kind, address, json.loads(more))
    for point in points:
        child = os.fork()
        if child == 0:
            failpoints.arm(point)
            status = 1
            try:
                run_sink(bootstrap, source, int(count), kind, address, json.loads(more))
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(ended), flush=True)


def run_session(bootstrap: str, source: str, count: str, output: str) -> None:
    topics = SourceTopics(bootstrap, source)
    options: dict[str, Any] = {"source": source, "topics": topics.topics, "name": f"copy-{source}"}
    with semel.SourceSession(bootstrap=bootstrap, transaction_events_max=30, **options) as session:
        while session.applied is None or session.applied < int(count):
            with session.transaction() as transaction:
                for one in transaction.source_transactions():
                    for _ in one.rows():
                        transaction.send(output, str(one.number).encode())


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    {"relay": run_relay, "sink": live, "session": run_session}[sys.argv[1]](*sys.argv[2:])

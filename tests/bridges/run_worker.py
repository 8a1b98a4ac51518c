"""Pipelines into a database, one life after the other, each in a process of its own that dies at a given point.

    python run_worker.py KIND ADDRESS MODE BOOTSTRAP TOPIC NAME OPTIONS POINT...

OPTIONS of the run are JSON. A life dies at its POINT such as `after_stage:2`; with `` it reads to the end. The exit
status of each is a line of the output. They are forks of this process, because most of a start is imports. MODE `naive`
is the mix that this project warns of: a database write inside of a Kafka transaction. Without POINTs the one life is
this process.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from contextlib import closing
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pyarrow as pa

import semel
from semel.bridges import failpoints

COUNT = (
    "INSERT INTO numbers AS n (number, count) SELECT number, count(*) FROM rows WHERE true GROUP BY number "
    "ON CONFLICT (number) DO UPDATE SET count = n.count + excluded.count"
)
MODES: dict[str, dict[str, Any]] = {
    "append": {"create": True},
    "upsert": {"mode": "upsert", "key": ["number"], "create": True},
    "dedup": {"mode": "dedup", "key": ["number"], "create": True},
    "newest": {"mode": "newest", "key": ["number"], "version": "at", "create": True},
    "statement": {"statement": COUNT},
    "stops-in-half": {"dead_letter": "failed"},
    "pads": {},
    "delete": {"mode": "upsert", "key": ["number"], "delete": "gone", "create": True},
    "newest-delete": {"mode": "newest", "key": ["number"], "version": "at", "delete": "gone", "create": True},
}


LEAST = 5
"""Fewer records than in a batch: the function runs again for a half."""


def target(kind: str, address: str, mode: str) -> Any:
    options = {"table": "numbers", **MODES[mode]}
    return semel.SQLite(address, **options) if kind == "sqlite" else semel.Postgres(address, **options)


def row_of(mode: str, row: Any) -> dict[str, Any]:
    """A negative number deletes what was written for it."""
    value = int(row.value)
    if mode == "statement":
        return {"number": value}
    if "delete" in mode:
        return {"number": abs(value), "at": row.offset, "gone": value < 0}
    return {"number": value, "at": row.offset}


def table_of(mode: str, records: pa.Table) -> pa.Table:
    """The same for whole tables."""
    if mode == "stops-in-half" and records.num_rows < LEAST:
        os.kill(os.getpid(), signal.SIGSTOP)
    values = records["value"].cast(pa.string()).cast(pa.int64()).to_numpy()
    made: dict[str, Any] = {"number": np.abs(values), "at": records["offset"]}
    if "delete" in mode:
        made["gone"] = values < 0
    if mode == "pads":  # more than a socket takes while nobody reads
        made["pad"] = ["x" * 1_000_000] * len(values)
    return pa.table(made).select(["number"] if mode == "statement" else list(made))


def live(kind: str, address: str, mode: str, options: dict[str, Any]) -> None:
    if mode == "naive":
        mix(kind, address, options)
        return
    by = options.pop("by", "row")
    function = row_of if by == "row" else table_of
    semel.run(partial(function, mode), by=by, to=target(kind, address, mode), **options)


def mix(kind: str, address: str, options: dict[str, Any]) -> None:
    """The database commits inside of the Kafka transaction. Between the two commits there is always a gap."""
    limit = options.pop("transaction_records_max")
    idle_ms = options.pop("idle_ms")
    session = semel.Session(
        group=options["name"], instance="0", transaction_records_max=limit, session_timeout_ms=6_000, **options
    )
    with closing(connect(kind, address)) as database, session:
        while True:
            with session.transaction(max(idle_ms, 2_000)) as transaction:
                if transaction.is_empty:
                    return
                for row in transaction.rows():
                    database.execute(f"INSERT INTO numbers (number) VALUES ({int(row.value or b'')})")
                failpoints.reach("before_commit")
                database.commit()
                failpoints.reach("after_commit")
            failpoints.reach("after_offsets")


def connect(kind: str, address: str) -> Any:
    if kind == "sqlite":
        import sqlite3

        return sqlite3.connect(address)
    import psycopg

    return psycopg.connect(address)


def warm() -> None:
    """Import what a life needs, and leave nothing open."""
    for module in ("semel.bridges.run_into", "adbc_driver_postgresql.dbapi", "psycopg"):
        import_module(module)


def main(kind: str, address: str, mode: str, bootstrap: str, topic: str, name: str, more: str, *points: str) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(name)s %(message)s")
    options = {"bootstrap": bootstrap, "topics": [topic], "name": name, "fetch_max_wait_ms": 50, **json.loads(more)}
    if not points:
        live(kind, address, mode, options)
        return
    warm()
    for point in points:
        child = os.fork()
        if child == 0:
            failpoints.arm(point)
            status = 1
            try:
                live(kind, address, mode, dict(options))
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(ended), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""`semel.run`: a function from records to records, as an exactly-once pipeline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from semel.client.producer import Outcome
from semel.errors import ConfigError
from semel.session.session import Session
from semel.session.transaction import Row, Transaction

TableTransform = Callable[[pa.Table], pa.Table | Mapping[str, pa.Table] | None]
"""Returns what to write: a table, tables by topic, or nothing."""
RowTransform = Callable[[Row], "bytes | Row | Iterable[Row] | None"]
"""Returns the new value (the key stays), a row, several rows, or None to write nothing."""

_POLL_MS = 500


@dataclass(slots=True)
class RunReport:
    """What a run has done."""

    committed: int = 0
    aborted: int = 0
    records: int = 0
    """How many were read and are done with."""


def run(
    transform: TableTransform | RowTransform,
    *,
    to: str | None = None,
    by: Literal["table", "row"] = "table",
    stop: threading.Event | None = None,
    idle_ms: float | None = None,
    **session_options: Any,
) -> RunReport:
    """Read, transform, write and commit until `stop` is set, or until nothing has come for `idle_ms`.

    The options are those of `Session`. `to` is the topic for what does not name its own. From asyncio:
    `await asyncio.to_thread(semel.run, ...)`, and `stop.set()` to end it.

    >>> run(lambda row: row.value.upper(), by="row", to="out", bootstrap="127.0.0.1:9092",
    ...     group="g", topics=["in"], name="upper")  # doctest: +SKIP
    """
    if by not in ("table", "row"):
        raise ConfigError(f'by={by!r} is not supported: write "table" or "row".')
    stop = stop or threading.Event()
    report = RunReport()
    with Session(**session_options) as session:
        began = last_record = time.monotonic()
        held = session.partitions
        # A group may have no partition for this member; before it has had its time to say so, that is not idleness.
        join_s = session.config.group.session_timeout_ms / 1000
        while not stop.is_set():
            with session.transaction(_POLL_MS if idle_ms is None else min(_POLL_MS, idle_ms)) as transaction:
                if not transaction.is_empty:
                    _write(transaction, transform, to, by)
            if transaction.outcome is Outcome.COMMITTED:
                report.records += transaction.table.num_rows
            now = time.monotonic()
            is_joining = not session.partitions and now - began < join_s
            if not transaction.is_empty or is_joining or session.partitions != held:
                last_record, held = now, session.partitions
            if idle_ms is not None and (now - last_record) * 1000 >= idle_ms:
                break
        report.committed, report.aborted = session.committed_count, session.aborted_count
    return report


def _write(transaction: Transaction, transform: Callable[[Any], Any], to: str | None, by: str) -> None:
    if by == "row":
        for row in transaction.rows():
            for made in _rows(transform(row), row):
                _send(transaction, made, row, to)
        return
    made = transform(transaction.table)
    if isinstance(made, Mapping):
        for topic, table in made.items():
            transaction.send_table(topic, table)
    elif made is not None:
        transaction.send_table(to, made)


def _rows(made: Any, row: Row) -> Iterable[Row]:
    if made is None:
        return ()
    if isinstance(made, bytes):
        return (row._replace(value=made),)
    return (made,) if isinstance(made, Row) else made


def _send(transaction: Transaction, made: Row, row: Row, to: str | None) -> None:
    # A row that still has the topic it was read from was not meant to go back there.
    topic = made.topic if made.topic != row.topic else to
    if topic is None:
        raise ConfigError("A row has no topic to go to: write to=..., or return rows with another topic.")
    timestamp_ms = made.timestamp_ms if made.timestamp_ms >= 0 else None
    transaction.send(topic, made.value, key=made.key, headers=made.headers, timestamp_ms=timestamp_ms)

"""`semel.run`: a function from records to records, as an exactly-once pipeline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final, Literal, Protocol

import pyarrow as pa

from semel.client.producer import Outcome
from semel.client.settings import check_option_names
from semel.errors import ConfigError
from semel.session.function_steps import FunctionSteps
from semel.session.outputs import check_synchronous
from semel.session.row_pace import RunStopped
from semel.session.session import OPTIONS, Session
from semel.session.transaction import Row

TableTransform = Callable[[pa.Table], pa.Table | Mapping[str, pa.Table] | None]
"""Returns what to write: a table, tables by topic, or nothing."""
RowTransform = Callable[[Row], "bytes | Row | Iterable[bytes | Row] | None"]
"""Returns the new value (the key stays), a row, several rows, or None to write nothing."""

_POLL_MS = 500


class Target(Protocol):
    """Where results go, if that is not simply a topic: `semel.Postgres`, `semel.SQLite` or `semel.Kafka`."""

    def run(self, transform: Callable[[Any], Any], **options: Any) -> RunReport: ...


@dataclass(slots=True)
class RunReport:
    """What a run has done."""

    committed: int = 0
    aborted: int = 0
    """How many transactions were rolled back and tried again."""
    records: int = 0
    """How many were read and are done with."""
    dead_letters: int = 0
    """How many of them went to the dead-letter topic or table."""


_OTHER_NAMES: Final = {"group_id": "group", "topic": "topics", "dead_letter_topic": "dead_letter"}
"""What other libraries call the options of a session."""


def _check_names(options: Mapping[str, object]) -> None:
    for wrong, right in _OTHER_NAMES.items():
        if wrong in options and right not in options:
            raise TypeError(f"semel.run() has no option {wrong!r}: write {right}=.")
    if "source_transactions" in options:
        raise ConfigError(
            "semel.run() gives whole source transactions to a database. Into a topic, use semel.SourceSession: "
            "its transaction.source_transactions() gives them one by one. Nothing was read."
        )
    missing = [name for name in ("group", "topics", "name") if name not in options]
    if missing:
        raise TypeError(f"semel.run() needs {' and '.join(f'{name}=' for name in missing)}.")


def run(
    transform: Callable[[Any], Any],
    *,
    to: str | Target | None = None,
    by: Literal["table", "row"] = "table",
    stop: threading.Event | None = None,
    idle_ms: float | None = None,
    **session_options: Any,
) -> RunReport:
    """Read, transform, write and commit until `stop` is set, or until nothing has come for `idle_ms`.

    The options are those of `Session`. `to` is the topic for what does not name its own, or a target such as
    `semel.Postgres(...)`, which has its own options for a run. With `dead_letter="topic"`
    records at which the function fails, or whose results cannot be written, go there. From asyncio:
    `await asyncio.to_thread(semel.run, ...)`, and `stop.set()` to end it.

    >>> run(lambda row: row.value.upper(), by="row", to="out", bootstrap="127.0.0.1:9092",
    ...     group="g", topics=["in"], name="upper")  # doctest: +SKIP
    """
    if by not in ("table", "row"):
        raise ConfigError(f'by={by!r} is not supported: write "table" or "row".')
    check_synchronous(transform)
    if to is not None and not isinstance(to, str):
        return to.run(transform, by=by, stop=stop, idle_ms=idle_ms, **session_options)
    if to is not None and ("/" in to or ":" in to):
        raise ConfigError(
            "to= is an address and no name of a topic. For a database write to=semel.Postgres(url, table=...) or "
            "semel.SQLite(path, table=...). Nothing was read."
        )
    _check_names(session_options)
    check_option_names(session_options, [*OPTIONS, *signature(run).parameters], "semel.run()")
    stop = stop or threading.Event()
    report = RunReport()
    with Session(**session_options) as session:

        def is_stopping() -> bool:
            return stop.is_set() or session.is_stopping

        steps = FunctionSteps(session, transform, to=to, by_row=by == "row", is_stopping=is_stopping)
        began = last_record = time.monotonic()
        held = session.partitions
        # A group may have no partition for this member; before it has had its time to say so, that is not idleness.
        join_s = session.config.group.session_timeout_ms / 1000
        while not is_stopping():
            try:
                transaction = steps.step(_POLL_MS if idle_ms is None else min(_POLL_MS, idle_ms))
            except RunStopped:
                break
            if transaction.outcome is Outcome.COMMITTED:
                report.records += transaction.table.num_rows
            now = time.monotonic()
            is_joining = not session.partitions and now - began < join_s
            if not transaction.is_empty or is_joining or session.partitions != held:
                last_record, held = now, session.partitions
            if idle_ms is not None and (now - last_record) * 1000 >= idle_ms:
                break
        report.committed, report.aborted = session.committed_count, session.aborted_count
        report.dead_letters = session.dead_letter_count
    return report

"""A slow function of rows over a backlog: its portions are small enough to end soon when the run is stopped."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from session_scene import BROKER_CONFIG, Pipeline, wait_until

import semel
from semel.client.fetched import READ_SCHEMA
from semel.session.row_pace import RowPace, RunStopped
from semel.session.runner import RunReport
from semel.testing.embedded import EmbeddedBroker


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config=BROKER_CONFIG, fsync="never") as broker:
        yield broker


def stopped_after_first_results(run: Callable[..., RunReport], count: Callable[[], int]) -> RunReport:
    """Stop a run as soon as something of it is committed; it must end long before its backlog does."""
    stop, reports = threading.Event(), list[RunReport]()
    thread = threading.Thread(target=lambda: reports.append(run(stop=stop)))
    thread.start()
    try:
        wait_until(lambda: count() > 0, "the first results")
    finally:
        stop.set()
        thread.join(40)
    assert not thread.is_alive()
    return reports[0]


def test_a_slow_function_of_rows_is_stopped_soon_and_keeps_what_it_has_done(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """5,000 records of 20 ms are a hundred seconds. Into a topic and into a table; what comes after goes on there."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(5000))
    path, is_slow = tmp_path / "app.db", True

    def work(row: Any) -> bytes:
        time.sleep(0.02 if is_slow else 0)
        return row.value

    def into_topic(**options: Any) -> RunReport:
        return semel.run(work, to=pipeline.target, by="row", group="g", **given, **options)

    def into_table(**options: Any) -> RunReport:
        target = semel.SQLite(path, table="done", create=True)
        return semel.run(lambda row: {"n": int(work(row))}, to=target, by="row", **given, **options)

    def rows() -> int:
        with closing(sqlite3.connect(path)) as connection:
            try:
                return connection.execute("SELECT count(*) FROM done").fetchone()[0]
            except sqlite3.OperationalError:
                return 0

    given: dict[str, Any] = {"bootstrap": broker.bootstrap, "topics": [pipeline.source], "name": pipeline.group}
    for run, count in ((into_topic, lambda: sum(pipeline.counts().values())), (into_table, rows)):
        is_slow = True
        assert 0 < stopped_after_first_results(run, count).records < 2500
        is_slow = False
        run(idle_ms=500)
        assert count() == 5000
    assert pipeline.counts() == Counter(range(5000))


def test_portions_follow_the_pace() -> None:
    """They grow while they are quick, shrink when they are slow, and are given up some seconds after the stop."""
    now, is_stopping = 0.0, False
    pace = RowPace(lambda: is_stopping, clock=lambda: now)
    table = pa.table({name: [None] * 1000 for name in READ_SCHEMA.names}, schema=READ_SCHEMA)

    def work(count: int, each_s: float) -> None:
        nonlocal now
        for _ in pace.rows(table.slice(0, count)):
            now += each_s

    work(100, 0)
    assert pace.limit == 1600
    work(5, 0)
    assert pace.limit == 1600
    work(1000, 0.1)
    assert pace.limit == 40
    is_stopping = True
    with pytest.raises(RunStopped):
        work(1000, 0.5)
    work(4, 0.5)

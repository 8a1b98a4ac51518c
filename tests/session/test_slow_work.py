"""Work that takes longer than the transaction timeout: it shrinks until it fits, or ends in one clear error."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from session_scene import BROKER_CONFIG, Pipeline

from semel.errors import WorkTooLong
from semel.session.pace import Pace
from semel.session.runner import run
from semel.session.session import Session
from semel.session.transaction import Row, Transaction
from semel.testing.embedded import EmbeddedBroker

TIMEOUT_MS = 400


@pytest.fixture(scope="module", params=[2, 1], ids=["protocol-2", "protocol-1"])
def broker(request: pytest.FixtureRequest) -> Iterator[EmbeddedBroker]:
    config = {**BROKER_CONFIG, "transaction.version": str(request.param)}
    with EmbeddedBroker(config=config, fsync="never") as broker:
        yield broker


def copy_slowly(transaction: Transaction, target: str, seconds: float) -> None:
    """Each record is written before the work on the next: the transaction is open all the while."""
    for start in range(transaction.table.num_rows):
        transaction.send_table(target, transaction.table.slice(start, 1))
        time.sleep(seconds)


def copy_until(session: Session, pipeline: Pipeline, count: int, seconds: float) -> list[int]:
    """The sizes of the transactions that were handed out."""
    sizes: list[int] = []
    done = 0
    for transaction in session:
        sizes.append(transaction.table.num_rows)
        copy_slowly(transaction, pipeline.target, seconds)
        done = session.committed_count
        if len(pipeline.committed()) and sum(pipeline.committed().values()) + transaction.table.num_rows >= count:
            session.stop()
        assert len(sizes) < 40, f"{done} commits after {sizes}"
    return sizes


def test_a_loop_that_is_too_slow_gets_smaller_portions_until_they_fit(broker: EmbeddedBroker) -> None:
    """D9: it was aborted for ever, 6 aborts and no commit."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(16))
    with pipeline.session(transaction_timeout_ms=TIMEOUT_MS) as session:
        sizes = copy_until(session, pipeline, 16, TIMEOUT_MS / 1000 / 8)
        assert sizes[0] == 16
        assert min(sizes) < 8
        assert session.committed_count >= 3
    assert pipeline.counts() == Counter(range(16))


def test_one_record_that_does_not_fit_is_one_clear_error(broker: EmbeddedBroker) -> None:
    """D9: what came before it is committed, and nothing of it is."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(3))

    def work(session: Session) -> None:
        for transaction in session:
            for row in transaction.rows():
                table = transaction.table.slice(row.offset - transaction.table["offset"][0].as_py(), 1)
                transaction.send_table(pipeline.target, table)
                time.sleep(TIMEOUT_MS / 1000 * 2 if row.value == b"2" else 0)

    with (
        pytest.raises(WorkTooLong, match=r"One record alone took .* Raise transaction\.timeout\.ms"),
        pipeline.session(transaction_timeout_ms=TIMEOUT_MS) as session,
    ):
        work(session)
    assert pipeline.counts() == Counter(range(2))
    assert pipeline.committed() == {0: 2}


@pytest.mark.parametrize("by", ["row", "table"])
def test_a_run_finishes_though_all_its_work_takes_longer_than_the_timeout(broker: EmbeddedBroker, by: Any) -> None:
    """D9: what a function computes is written after it has returned, so that nothing is open meanwhile."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(20))
    large = b"x" * 200_000  # full batches leave at once, and would open the transaction early

    def work(given: Any) -> Any:
        time.sleep(TIMEOUT_MS / 1000 / 8 * (1 if by == "row" else given.num_rows))
        if isinstance(given, Row):
            return given._replace(key=large)
        return pa.table({"key": given["key"], "value": given["value"]})

    report = run(
        work,
        by=by,
        to=pipeline.target,
        bootstrap=pipeline.bootstrap,
        group=pipeline.group,
        topics=[pipeline.source],
        name=pipeline.group,
        fetch_max_wait_ms=50,
        idle_ms=300,
        session_timeout_ms=3_000,
        transaction_timeout_ms=TIMEOUT_MS,
    )
    assert report.records == 20
    assert pipeline.counts() == Counter(range(20))


def test_portions_grow_again_when_the_work_is_quick() -> None:
    """D9: one slow hour must not make a pipeline slow for good."""
    pace = Pace(timeout_s=10, records_max=1_000)
    pace.timed_out(records=1_000, took_s=1_000)
    assert pace.limit == 5
    for _ in range(20):
        pace.committed(records=pace.limit, took_s=0.1)
    assert pace.limit == 1_000
    pace.committed(records=1_000, took_s=9)
    assert pace.limit < 1_000  # before it is too late


def test_a_portion_of_one_that_timed_out_once_is_tried_again() -> None:
    """D9: a machine that slept for a minute is no reason to stop."""
    pace = Pace(timeout_s=10, records_max=1)
    pace.timed_out(records=1, took_s=60)
    pace.committed(records=1, took_s=1)
    pace.timed_out(records=1, took_s=60)
    with pytest.raises(WorkTooLong):
        pace.timed_out(records=1, took_s=60)

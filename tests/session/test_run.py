"""`semel.run` on the embedded broker: by table, by row, to several topics, and from asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from session_scene import BROKER_CONFIG, Pipeline

from semel.client.admin import Admin
from semel.errors import ConfigError
from semel.session.runner import run
from semel.session.transaction import Row
from semel.testing.embedded import EmbeddedBroker


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config=BROKER_CONFIG, fsync="never") as broker:
        yield broker


def options(pipeline: Pipeline) -> dict[str, Any]:
    return {
        "bootstrap": pipeline.bootstrap,
        "group": pipeline.group,
        "topics": [pipeline.source],
        "name": pipeline.group,
        "fetch_max_wait_ms": 50,
        "idle_ms": 500,
    }


def test_a_function_of_tables_is_a_pipeline(broker: EmbeddedBroker) -> None:
    """D7: it ends when nothing has come for a while, and the next run has nothing left to do."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(100))

    def negate(table: pa.Table) -> pa.Table:
        values = pc.call_function("binary_join_element_wise", [pa.scalar(b"-"), table["value"], pa.scalar(b"")])
        return pa.table({"key": table["key"], "value": values})

    report = run(negate, to=pipeline.target, **options(pipeline))
    assert (report.records, report.aborted) == (100, 0)
    assert report.committed > 0
    assert pipeline.counts() == Counter(-number for number in range(100))
    assert run(negate, to=pipeline.target, **options(pipeline)).records == 0


def test_a_function_of_rows_may_drop_change_and_multiply_them(broker: EmbeddedBroker) -> None:
    """D6, D7: bytes keep the key, rows may name another topic, and None is left out."""
    pipeline = Pipeline(broker.bootstrap)
    odd = f"{pipeline.target}-odd"
    with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.create_topics(odd)
    pipeline.write(range(10))

    def sort_out(row: Row) -> bytes | list[Row] | None:
        number = int(row.value or b"0")
        if number == 0:
            return None
        return [row, row._replace(topic=odd, headers=(("odd", b"yes"),))] if number % 2 else str(number * 10).encode()

    run(sort_out, by="row", to=pipeline.target, **options(pipeline))
    assert pipeline.counts() == Counter([1, 3, 5, 7, 9, 20, 40, 60, 80])
    found = pipeline.read(odd, partitions=1)
    assert sorted(int(row["value"]) for row in found) == [1, 3, 5, 7, 9]
    assert all(row["headers"] == [{"key": "odd", "value": b"yes"}] for row in found)
    assert {row["key"] for row in found} == {f"k{number % 7}".encode() for number in (1, 3, 5, 7, 9)}


def test_tables_by_topic_are_written_together(broker: EmbeddedBroker) -> None:
    """D6: a mapping from topic to table."""
    pipeline = Pipeline(broker.bootstrap)
    copy = f"{pipeline.target}-copy"
    with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.create_topics(copy)
    pipeline.write(range(10))
    run(lambda table: {pipeline.target: table, copy: table}, **options(pipeline))
    assert pipeline.counts() == Counter(range(10))
    assert len(pipeline.read(copy, partitions=1)) == 10


def test_it_is_run_from_asyncio_and_stopped_from_there(broker: EmbeddedBroker) -> None:
    """D7: in a thread, until the event is set."""
    pipeline = Pipeline(broker.bootstrap)
    stop = threading.Event()

    async def main() -> int:
        running = asyncio.create_task(
            asyncio.to_thread(
                run, lambda table: table, to=pipeline.target, stop=stop, **{**options(pipeline), "idle_ms": None}
            )
        )
        await asyncio.to_thread(pipeline.write, range(20))
        while len(await asyncio.to_thread(pipeline.counts)) < 20:
            await asyncio.sleep(0.02)
        stop.set()
        return (await running).records

    assert asyncio.run(asyncio.wait_for(main(), 30)) == 20


def test_what_has_no_place_to_go_to_is_a_mistake(broker: EmbeddedBroker) -> None:
    """It is told, the transaction is aborted, and nothing is committed."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(3))
    with pytest.raises(ConfigError, match="no topic to go to"):
        run(lambda row: row, by="row", **options(pipeline))
    assert pipeline.committed() == {}
    with pytest.raises(ConfigError, match='write "table" or "row"'):
        run(lambda row: row, by="batch", **options(pipeline))  # type: ignore[arg-type]


def test_a_table_that_was_only_passed_on_does_not_go_back_to_its_own_topic(broker: EmbeddedBroker) -> None:
    """Without to= the column `topic` of what was read named the input, and the run went round for ever."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(10))
    with pytest.raises(ConfigError, match="they would go back there: write to="):
        run(lambda table: table, **options(pipeline))
    report = run(lambda table: table, to=pipeline.target, **options(pipeline))
    assert report.records == 10


@pytest.mark.parametrize("by", ["table", "row"])
def test_a_mistyped_output_topic_is_found_before_anything_is_read(broker: EmbeddedBroker, by: Any) -> None:
    """With dead letters the whole input went aside, and the run reported success."""
    pipeline = Pipeline(broker.bootstrap)
    dead = f"{pipeline.target}-dead"
    with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.create_topics(dead)
    pipeline.write(range(10))
    wrong = {"to": "no-such-topic", "dead_letter": dead, "by": by, "max_block_ms": 1_000, **options(pipeline)}
    with pytest.raises(ConfigError, match=r"Nothing was read\. Create the topic, or correct to="):
        run(lambda rows: rows.value if by == "row" else rows, **wrong)
    report = run(lambda rows: rows.value if by == "row" else rows, **{**wrong, "to": pipeline.target})
    assert (report.records, report.dead_letters) == (10, 0)

"""A session on the embedded broker: what it reads, writes and commits, with both transaction protocols."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from kio.schema.errors import ErrorCode
from session_scene import BROKER_CONFIG, GROUP_PROTOCOLS, Pipeline, copy_all, copy_turn, wait_until

from semel.broker.faults import Error
from semel.client.admin import Admin
from semel.client.producer import Outcome
from semel.errors import ConfigError, InvalidState, OffsetOutOfRange
from semel.session.session import Session
from semel.testing.embedded import EmbeddedBroker
from semel.wire import Api


@pytest.fixture(scope="module", params=[2, 1], ids=["protocol-2", "protocol-1"])
def broker(request: pytest.FixtureRequest) -> Iterator[EmbeddedBroker]:
    config = {**BROKER_CONFIG, "transaction.version": str(request.param)}
    with EmbeddedBroker(config=config, fsync="never") as broker:
        yield broker
        broker.faults.clear()


def copy_and_fail(session: Session, pipeline: Pipeline) -> None:
    with session.transaction(10_000) as transaction:
        transaction.send_table(pipeline.target, transaction.table)
        raise ZeroDivisionError


@pytest.mark.parametrize("protocol", GROUP_PROTOCOLS)
def test_what_is_read_is_written_once_and_its_offsets_are_committed_with_it(
    broker: EmbeddedBroker, protocol: str
) -> None:
    """D1: over several sessions one after the other, each goes on where the last one has committed."""
    pipeline = Pipeline(broker.bootstrap, protocol)
    for first in (0, 100):
        pipeline.write(range(first, first + 100))
        with pipeline.session() as session:
            copy_all(session, pipeline, 100)
        assert pipeline.counts() == Counter(range(first + 100))
        assert pipeline.committed() == {0: (first + 100) // 2, 1: (first + 100) // 2}
    assert pipeline.open_transactions() == []


def test_an_exception_aborts_and_the_records_come_again(broker: EmbeddedBroker) -> None:
    """D1: positions go back to what is committed, also in partitions where nothing is."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(20))
    with pipeline.session() as session:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                copy_and_fail(session, pipeline)
        assert (session.committed_count, session.aborted_count) == (0, 2)
        assert pipeline.committed() == {}
        copy_all(session, pipeline, 20)
        pipeline.write(range(20, 30))
        with pytest.raises(ZeroDivisionError):
            copy_and_fail(session, pipeline)
        copy_all(session, pipeline, 10)
    assert pipeline.counts() == Counter(range(30))


def test_one_input_is_fanned_out_to_several_topics_or_to_none(broker: EmbeddedBroker) -> None:
    """D6: all or none, by table, by the table's own column of topics, and row by row with headers."""
    pipeline = Pipeline(broker.bootstrap)
    audit, loud = f"{pipeline.target}-audit", f"{pipeline.target}-loud"
    with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.create_topics(audit, loud)
    pipeline.write(range(10))
    with pipeline.session() as session:
        for fails in (True, False):
            with session.transaction(10_000) as transaction:
                table = transaction.table
                topics = pa.array([pipeline.target] * table.num_rows)
                place = table.schema.get_field_index("topic")
                transaction.send_table(None, table.set_column(place, "topic", topics))
                transaction.send_table(audit, table.select(["key", "value"]))
                for row in transaction.rows():
                    assert row.value is not None
                    transaction.send(loud, row.value + b"!", key=row.key, headers=[("from", str(row.offset).encode())])
                if fails:
                    broker.faults.inject(Api.TXN_OFFSET_COMMIT, Error(ErrorCode.illegal_generation))
            assert transaction.outcome is (Outcome.ABORTED if fails else Outcome.COMMITTED)
            counts = [
                len(pipeline.read(topic, partitions=n)) for topic, n in ((pipeline.target, 2), (audit, 1), (loud, 1))
            ]
            expected = 0 if fails else table.num_rows
            assert counts == [expected] * 3
        loudest = pipeline.read(loud, partitions=1)
        assert {header["key"] for row in loudest for header in row["headers"]} == {"from"}


def test_records_of_one_key_keep_their_order(broker: EmbeddedBroker) -> None:
    """Over many small transactions and several aborts, each key's numbers come out ascending."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(200))
    with pipeline.session(transaction_records_max=15) as session:
        done = turn = 0
        while done < 200:
            turn += 1
            if turn % 3 == 0:
                broker.faults.inject(Api.TXN_OFFSET_COMMIT, Error(ErrorCode.illegal_generation))
            with session.transaction(10_000) as transaction:
                assert transaction.table.num_rows <= 15
                transaction.send_table(pipeline.target, transaction.table)
            done += transaction.table.num_rows if transaction.outcome is Outcome.COMMITTED else 0
    by_key: dict[bytes, list[int]] = {}
    for row in pipeline.read():
        by_key.setdefault(row["key"], []).append(int(row["value"]))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())
    assert pipeline.counts() == Counter(range(200))


def test_a_transaction_gathers_for_a_time_or_up_to_a_size(broker: EmbeddedBroker) -> None:
    """One transaction a turn, of so many records, so many bytes, or what comes within so many milliseconds."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(20))
    with pipeline.session(transaction_bytes_max=200) as session:
        copy_all(session, pipeline, 20)
        assert 20 / 8 < session.committed_count <= 20
    pipeline.write(range(20, 25))
    late = threading.Timer(0.3, pipeline.write, [range(25, 30)])
    late.start()
    with pipeline.session(transaction_linger_ms=1_500) as session:
        assert copy_turn(session, pipeline, 10_000) == 10
    late.join()
    assert pipeline.counts() == Counter(range(30))


def test_a_loop_commits_each_turn_and_stop_ends_it(broker: EmbeddedBroker) -> None:
    """What is left by `break` is aborted and comes again."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(10))
    with pipeline.session() as session:
        for transaction in session:
            transaction.send_table(pipeline.target, transaction.table)
            break
        assert (session.committed_count, session.aborted_count, pipeline.counts()) == (0, 1, Counter())
        seen = 0
        for transaction in session:
            transaction.send_table(pipeline.target, transaction.table)
            seen += transaction.table.num_rows
            if seen == 10:
                session.stop()
    assert pipeline.counts() == Counter(range(10))


def test_it_works_from_asyncio_while_the_loop_goes_on(broker: EmbeddedBroker) -> None:
    """D7: waiting for records and for commits does not hold up other tasks."""
    pipeline = Pipeline(broker.bootstrap)

    async def copy() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticker = asyncio.create_task(tick())

        async def write() -> None:
            while ticks < 5:  # the session is waiting for records by then
                await asyncio.sleep(0.01)
            await asyncio.to_thread(pipeline.write, range(50))

        writer = asyncio.create_task(write())
        async with pipeline.session() as session:
            seen = 0
            async for transaction in session:
                seen += transaction.table.num_rows
                transaction.send_table(pipeline.target, transaction.table)
                if seen == 50:
                    session.stop()
        await writer
        ticker.cancel()

    asyncio.run(asyncio.wait_for(copy(), 30))
    assert pipeline.counts() == Counter(range(50))


def test_arrow_tables_go_in_and_out(broker: EmbeddedBroker) -> None:
    """D7: the columns are those of the fetcher, and a computed column is written as it is."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(3))
    with pipeline.session() as session, session.transaction(10_000) as transaction:
        assert transaction.table.column_names[:5] == ["key", "value", "topic", "partition", "offset"]
        values = transaction.table["value"].combine_chunks()
        doubled = pc.call_function("binary_join_element_wise", [values, values, pa.scalar(b"")])
        transaction.send_table(pipeline.target, pa.table({"key": transaction.table["key"], "value": doubled}))
    assert [row["value"] for row in pipeline.read()] == [b"00", b"11", b"22"]


# -- what users are told -----------------------------------------------------------------------------------------------


def test_who_waits_inside_of_a_transaction_is_told_why_no_answer_comes(
    broker: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """H4: with the transaction's age and the reason, before the time-out aborts it."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(2))
    caplog.set_level(logging.WARNING, "semel.session")
    with pipeline.session(transaction_timeout_ms=1_000) as session:
        with session.transaction(10_000) as transaction:
            transaction.send_table(pipeline.target, transaction.table)
            wait_until(lambda: bool(caplog.records), "the warning", 5)
            [record] = caplog.records
            assert "the answer cannot come" in record.getMessage()
            assert pipeline.target in record.getMessage()
            assert "will be aborted at 1.0 s" in record.getMessage()
            wait_until(lambda: pipeline.open_transactions() == [], "the time-out")
        assert transaction.outcome is Outcome.ABORTED
        copy_all(session, pipeline, 2)
    assert pipeline.counts() == Counter(range(2))


def test_the_transaction_timeout_is_below_the_session_timeout_unless_asked_otherwise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C4: and who asks otherwise is warned."""
    options: dict[str, Any] = {"bootstrap": "127.0.0.1:1", "group": "g", "topics": ["t"], "name": "n"}
    assert Session(**options).config.producer.transaction_timeout_ms == 30_000
    assert Session(**options, session_timeout_ms=9_000).config.producer.transaction_timeout_ms == 6_000
    assert not caplog.records
    Session(**options, transaction_timeout_ms=60_000)
    assert "is not below session.timeout.ms=45000" in caplog.text


def test_mistakes_are_told_before_anything_is_sent() -> None:
    """A session makes its own ids, wants a list of topics, and works only inside of its block."""
    options: dict[str, Any] = {"bootstrap": "127.0.0.1:1", "group": "g", "name": "n"}
    with pytest.raises(ConfigError, match="must be a list"):
        Session(**options, topics="orders")
    with pytest.raises(ConfigError, match=r"transactional\.id is what a session makes itself: write name="):
        Session(**options, topics=["orders"], transactional_id="x")
    with pytest.raises(InvalidState, match="not open"):
        Session(**options, topics=["orders"]).transaction()


def test_without_a_place_to_begin_it_says_so(broker: EmbeddedBroker) -> None:
    """`auto.offset.reset` is earliest unless another is written; with none of them nothing is guessed."""
    pipeline = Pipeline(broker.bootstrap)
    with (
        pipeline.session(auto_offset_reset="none") as session,
        pytest.raises(OffsetOutOfRange, match="has committed no offset"),
    ):
        copy_turn(session, pipeline, 10_000)


def test_records_that_were_deleted_before_they_were_read_are_not_skipped_in_silence(broker: EmbeddedBroker) -> None:
    """To begin at the earliest offset is the default; to jump there over lost records must be asked for."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(10))
    with pipeline.session() as session:
        copy_all(session, pipeline, 10)
    pipeline.write(range(10, 30))
    with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.delete_records({(pipeline.source, 0): 20})
    with pipeline.session() as session, pytest.raises(OffsetOutOfRange, match="deleted before they were read"):
        copy_all(session, pipeline, 10)
    with pipeline.session(auto_offset_reset="earliest") as session:
        copy_all(session, pipeline, 10)
    assert pipeline.counts() == Counter([*range(10), *range(20, 30)])


def test_who_begins_at_the_end_begins_there_once(broker: EmbeddedBroker) -> None:
    """Records that come while the session is away are not skipped, though nothing was read before."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(10))
    with pipeline.session(auto_offset_reset="latest") as session:
        wait_until(lambda: copy_turn(session, pipeline, 100) == 0 and len(pipeline.committed()) == 2, "its position")
    pipeline.write(range(10, 20))
    with pipeline.session(auto_offset_reset="latest") as session:
        copy_all(session, pipeline, 10)
    assert pipeline.counts() == Counter(range(10, 20))

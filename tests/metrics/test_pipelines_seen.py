"""Sessions and relays as their metrics, logs and traces show them, on a real broker."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sqlite3
import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pytest
from opentelemetry.trace import StatusCode
from watched import Spans, context_of, samples, traced

import semel
from semel.bridges.both.kafka_side import ProducerSide
from semel.session.trace_headers import carried_contexts, with_context

FAST = {"group.initial.rebalance.delay.ms": "0"}


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with semel.Broker(config=FAST) as broker:
        yield broker.bootstrap


@pytest.fixture
def name(bootstrap: str) -> str:
    """A pipeline of its own, with the topics NAME-in and NAME-out and three records to read."""
    name = f"p{uuid.uuid4().hex[:8]}"
    with semel.Admin({"bootstrap.servers": bootstrap}) as admin:
        for topic in (f"{name}-in", f"{name}-out", f"{name}-bad"):
            admin.create_topics(topic)
    with semel.Producer(bootstrap_servers=bootstrap) as producer:
        for number in range(3):
            producer.send(f"{name}-in", b"%d" % number, key=b"k")
    return name


def session(bootstrap: str, name: str) -> semel.Session:
    return semel.Session(bootstrap=bootstrap, group=name, topics=[f"{name}-in"], name=name, dead_letter=f"{name}-bad")


def fail_in_a_turn(bootstrap: str, name: str) -> None:
    """A user's error, which aborts the transaction and ends the session."""
    with session(bootstrap, name) as opened:
        for transaction in opened:
            transaction.send(f"{name}-out", b"lost")
            raise ZeroDivisionError


def test_a_sessions_transactions_are_counted_by_their_outcome(bootstrap: str, name: str) -> None:
    """One is aborted by the user's error, the next committed with a dead letter among its records."""
    with pytest.raises(ZeroDivisionError):
        fail_in_a_turn(bootstrap, name)
    with session(bootstrap, name) as opened:
        for transaction in opened:
            transaction.dead_letter(next(transaction.rows()), "bad")
            opened.stop()
    seen = samples("session", name)
    assert (seen["transactions_total:committed"], seen["transactions_total:aborted"]) == (1, 1)
    assert (seen["records_total"], seen["dead_letters_total"]) == (3, 1)
    assert seen["failures_total:ZeroDivisionError"] == 1
    assert seen["transaction_seconds_count"] == 1
    assert seen["last_turn_timestamp_seconds"] >= seen["last_commit_timestamp_seconds"] > 1_600_000_000


def test_a_span_names_the_transaction_and_is_the_parent_of_the_users_own(bootstrap: str, name: str) -> None:
    """Pipeline, transactional id, producer id and epoch, outcome; the aborted one has the error."""
    with traced() as spans:
        tracer = spans.provider.get_tracer("user")
        with pytest.raises(ZeroDivisionError):
            fail_in_a_turn(bootstrap, name)
        with session(bootstrap, name) as opened:
            for transaction in opened:
                with tracer.start_as_current_span("work"):
                    transaction.send(f"{name}-out", b"kept")
                opened.stop()
            transactional_id = opened.transactional_id
        aborted, committed = spans.named(f"session {name}")
        [work] = spans.named("work")
    assert committed.attributes is not None
    assert aborted.attributes is not None
    assert work.parent is not None
    assert work.parent.span_id == context_of(committed).span_id
    assert committed.attributes["semel.transactional_id"] == transactional_id
    assert committed.attributes["semel.outcome"] == "committed"
    assert committed.attributes["messaging.batch.message_count"] == 3
    assert isinstance(committed.attributes["semel.producer_id"], int)
    assert isinstance(committed.attributes["semel.producer_epoch"], int)
    assert aborted.attributes["semel.outcome"] == "aborted"
    assert aborted.status.status_code is StatusCode.ERROR
    assert [event.name for event in aborted.events] == ["exception"]


def test_the_context_goes_along_from_session_to_session(bootstrap: str, name: str) -> None:
    """The second session's span is linked to the first one's, through rows and tables, and carries its own on."""
    rows: list[semel.Row] = []
    with traced(headers=True) as spans:
        with session(bootstrap, name) as opened:
            for transaction in opened:
                transaction.send(f"{name}-out", b"row", headers=[("traceparent", b"stale"), ("own", b"1")])
                transaction.send_table(f"{name}-out", transaction.table)
                opened.stop()
        with semel.Session(bootstrap=bootstrap, group=f"{name}-2", topics=[f"{name}-out"], name=f"{name}-2") as opened:
            for transaction in opened:
                rows = list(transaction.rows())
                opened.stop()
        [one] = spans.named(f"session {name}")
        [two] = spans.named(f"session {name}-2")
    assert [link.context.span_id for link in two.links] == [context_of(one).span_id]
    assert [[key for key, _ in row.headers] for row in rows] == [["own", "traceparent"], *[["traceparent"]] * 3]


def test_headers_of_a_table_get_the_context_in_place_of_another_one() -> None:
    """Rows without headers, with null, with several, and with a stale context, in several chunks."""
    lists = [[], None, [{"key": "a", "value": b"1"}, {"key": "b", "value": None}]]
    stale = [{"key": "traceparent", "value": b"00-stale"}, {"key": "c", "value": b"3"}]
    kind = pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()}))
    headers = pa.chunked_array([pa.array(lists, kind), pa.array([[], stale][1:], kind)])
    table = pa.table({"value": [b"1", b"2", b"3", b"4"], "headers": headers})
    assert with_context(table) is table
    with traced(headers=True) as spans, spans.provider.get_tracer("t").start_as_current_span("s"):
        changed = with_context(table)
        found = [[header["key"] for header in row] for row in changed.column("headers").to_pylist()]
        assert found == [["traceparent"], ["traceparent"], ["a", "b", "traceparent"], ["c", "traceparent"]]
        [context] = carried_contexts(changed)
        assert changed.column("headers")[0].as_py()[0]["value"] == context.encode()
        assert with_context(table.drop_columns(["headers"])).column("headers")[3].as_py()[0]["key"] == "traceparent"


def test_log_lines_of_a_turn_name_its_pipeline_and_transaction(bootstrap: str, name: str) -> None:
    """Semel's own and, through Semel's loggers, the user's; a line outside has no such field."""
    lines = io.StringIO()
    semel.logs.json(stream=lines)
    try:
        log = logging.getLogger("semel.user")
        with session(bootstrap, name) as opened:
            for transaction in opened:
                log.info("inside")
                transaction.send(f"{name}-out", b"1")
                opened.stop()
            transactional_id = opened.transactional_id
        log.info("outside")
    finally:
        semel.logs.off()
    found = {line["message"]: line for line in map(json.loads, lines.getvalue().splitlines())}
    assert (found["inside"]["pipeline"], found["inside"]["transactional_id"]) == (name, transactional_id)
    assert "pipeline" not in found["outside"]


def test_under_asyncio_the_task_of_the_user_knows_its_transaction(bootstrap: str, name: str) -> None:
    """The steps run in another thread; log and trace of the block do not."""
    lines = io.StringIO()

    async def work(spans: Spans) -> None:
        async with session(bootstrap, name) as opened:
            async for transaction in opened:
                logging.getLogger("semel.user").info("inside")
                with spans.provider.get_tracer("user").start_as_current_span("work"):
                    transaction.send(f"{name}-out", b"1")
                opened.stop()
        logging.getLogger("semel.user").info("outside")

    semel.logs.json(stream=lines)
    try:
        with traced() as spans:
            asyncio.run(work(spans))
            [whole], [inner] = spans.named(f"session {name}"), spans.named("work")
    finally:
        semel.logs.off()
    assert inner.parent is not None
    assert inner.parent.span_id == context_of(whole).span_id
    found = {line["message"]: line for line in map(json.loads, lines.getvalue().splitlines())}
    assert found["inside"]["pipeline"] == name
    assert "pipeline" not in found["outside"]


def test_a_relays_portions_are_counted_and_traced(bootstrap: str, name: str, tmp_path: Path) -> None:
    """Two rows in one transaction, and their records carry its context."""
    database = tmp_path / "shop.db"
    with sqlite3.connect(database) as connection:
        connection.executescript(semel.outbox_table_sql("sqlite"))
        for number in range(2):
            connection.execute("INSERT INTO outbox (topic, value) VALUES (?, ?)", (f"{name}-out", b"%d" % number))
    with traced(headers=True) as spans:
        semel.relay(str(database), name=name, bootstrap=bootstrap, idle_ms=0)
        span = spans.named(f"relay {name}")[-1]
    seen = samples("relay", name)
    assert seen["records_total"] == 2
    assert seen["transactions_total:committed"] == len(spans.named(f"relay {name}"))
    assert "failures_total" not in str(seen)
    assert span.attributes is not None
    assert span.attributes["messaging.batch.message_count"] == 2
    with semel.Fetcher({"bootstrap.servers": bootstrap}) as fetcher:
        fetcher.assign({semel.TopicPartition(f"{name}-out", 0): 0})
        table = fetcher.read(timeout_ms=10_000)
    found = [{h["key"]: h["value"] for h in row} for row in table.column("headers").to_pylist()]
    trace_id = format(context_of(span).trace_id, "032x").encode()
    assert [trace_id in headers["traceparent"] for headers in found] == [True, True]


def test_a_relay_that_cannot_go_on_is_a_failure(bootstrap: str, name: str, tmp_path: Path) -> None:
    """By the class of its error."""
    sqlite3.connect(tmp_path / "empty.db").close()
    with pytest.raises(semel.SemelError) as raised:
        semel.relay(str(tmp_path / "empty.db"), name=name, bootstrap=bootstrap, idle_ms=0)
    assert samples("relay", name)[f"failures_total:{type(raised.value).__name__}"] == 1


def run_block(connection: sqlite3.Connection, producer: semel.Producer, topic: str, *, fails: bool = False) -> None:
    """A row and two records."""
    with semel.both(connection, producer, create_tables=True) as block:
        connection.execute("CREATE TABLE IF NOT EXISTS orders (id INTEGER)")
        block.send(topic, b"1")
        block.send(topic, b"2")
        if fails:
            raise ZeroDivisionError


def test_blocks_of_both_are_counted_by_their_outcome(bootstrap: str, name: str, tmp_path: Path) -> None:
    """One commits two records, one is undone by the user's error, one has records that Kafka refuses."""
    connection = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    with traced() as spans, semel.Producer(bootstrap_servers=bootstrap, transactional_id=name) as producer:
        run_block(connection, producer, f"{name}-out")
        with pytest.raises(ZeroDivisionError):
            run_block(connection, producer, f"{name}-out", fails=True)
        with pytest.raises(semel.SemelError) as refused:
            run_block(connection, producer, "no topic has such a name")
        outcomes = [span.attributes and span.attributes["semel.outcome"] for span in spans.named(f"both {name}")]
    connection.close()
    seen = samples("both", name)
    assert (seen["records_total"], seen["transactions_total:committed"]) == (2, 1)
    assert seen["transactions_total:aborted"] == 2
    assert seen[f"failures_total:{type(refused.value).__name__}"] == 1
    assert outcomes == ["committed", "aborted", "aborted"]


def test_a_block_that_kafka_must_still_follow_is_pending(
    bootstrap: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database has committed it, and Kafka cannot be told: neither committed nor aborted is true."""
    connection = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    gone = semel.BrokerUnreachable("the network is gone")
    with semel.Producer(bootstrap_servers=bootstrap, transactional_id=name) as producer:
        for step in ("commit", "send_end"):
            monkeypatch.setattr(ProducerSide, step, Mock(side_effect=gone))
        with pytest.raises(semel.CommitPending):
            run_block(connection, producer, f"{name}-out")
        producer.abort()
    connection.close()
    seen = {key: value for key, value in samples("both", name).items() if key.startswith("transactions")}
    assert seen == {"transactions_total:pending": 1}


def test_a_mirrors_cuts_are_counted_with_what_holds_it(bootstrap: str, name: str) -> None:
    """Three records are mirrored; an open transaction of the source is waited for, and counts as lag."""
    with semel.Broker() as there, semel.Producer(bootstrap_servers=bootstrap, transactional_id=f"{name}-w") as writer:

        def mirror() -> None:
            semel.mirror(name=name, source=bootstrap, target=there.bootstrap, topics=f"{name}-in", idle_ms=300)

        mirror()
        seen = samples("mirror", name)
        assert (seen["records_total"], seen["lag_offsets"], seen["waiting_seconds"]) == (3, 0, 0)
        assert seen["transactions_total:committed"] >= 1
        assert "failures_total" not in str(seen)
        writer.begin()
        writer.send(f"{name}-in", b"open")
        writer.flush()

        mirror()

        seen = samples("mirror", name)
        assert (seen["records_total"], seen["lag_offsets"]) == (3, 1)
        assert seen["waiting_seconds"] > 0
        writer.abort()


def test_a_mirror_that_cannot_go_on_is_a_failure(bootstrap: str, name: str) -> None:
    """After its tries, which are counted too."""
    with pytest.raises(semel.SemelError) as raised:
        semel.mirror(name=name, source=bootstrap, target="127.0.0.1:1", topics=f"{name}-in", retry_s=0.2)
    seen = samples("mirror", name)
    assert seen["retries_total"] >= 1
    assert seen[f"failures_total:{type(raised.value).__name__}"] == 1

"""`semel.run` with source transactions: a function of events into one table, whole transactions only."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from database_scene import Place, broker, place, server
from source_scene import Event, SourceTopics, balances_after, relay, transfers

import semel
from semel.session import source_events
from semel.testing.embedded import EmbeddedBroker

__all__ = ["broker", "place", "server"]


def balance(topics: SourceTopics, row: semel.Row) -> dict[str, Any]:
    event = json.loads(row.value or b"")
    return {"owner": topics.table_of(row.topic), **event}


def run(topics: SourceTopics, target: Any, function: Any = None, **options: Any) -> Any:
    given = {
        "by": "row",
        "bootstrap": topics.bootstrap,
        "source_transactions": topics.source,
        "topics": topics.topics,
        "name": f"ledger-{topics.source}",
        "idle_ms": 200,
        "fetch_max_wait_ms": 20,
        **options,
    }
    return semel.run(function or (lambda row: balance(topics, row)), to=target, **given)


def ledger(place: Place, **options: Any) -> Any:
    return place.target(table="ledger", mode="upsert", key=["owner", "account"], create=True, **options)


def found(place: Place) -> dict[tuple[str, int], int]:
    return {
        (owner, account): balance for owner, account, balance in place.ask("SELECT owner, account, balance FROM ledger")
    }


def test_transactions_go_whole_into_one_table_over_several_runs(broker: EmbeddedBroker, place: Place) -> None:
    """H1: position, number and rows in one database transaction; the offsets of the group follow for lag tools."""
    topics = SourceTopics(broker.bootstrap).create()
    all_transfers = list(transfers(11, 60))
    for until in (20, 61):
        relay(topics, all_transfers[:until])
        report = run(topics, ledger(place), transaction_records_max=15)
        assert report.committed > 2
        assert found(place) == balances_after(all_transfers[:until])
    assert run(topics, ledger(place)).records == 0
    with semel.Admin({"bootstrap.servers": topics.bootstrap}) as admin:
        committed = {place: at.offset for place, at in admin.committed_offsets(f"ledger-{topics.source}").items()}
    stored = place.ask("SELECT topic, partition, next_offset FROM semel_inbox WHERE topic NOT LIKE '%/%'")
    assert committed == {(topic, partition): offset for topic, partition, offset in stored}


def test_a_transaction_larger_than_the_memory_is_one_database_transaction(
    broker: EmbeddedBroker, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H1: it is read from its file in parts, and nothing of it shows before all of it does."""
    monkeypatch.setattr(source_events, "WINDOW_BYTES_MAX", 20_000)
    topics = SourceTopics(broker.bootstrap).create()
    large = [Event("cash", number, number) for number in range(3_000)]
    snapshot = next(iter(transfers(1, 0)))
    relay(topics, [snapshot], events_max=500)
    run(topics, ledger(place))
    relay(topics, [snapshot, large], events_max=500)
    parts: list[int] = []
    seen: set[int] = set()

    def rows(table: pa.Table) -> pa.Table:
        parts.append(table.num_rows)
        if place.kind == "postgres":
            seen.update(count for (count,) in place.ask("SELECT count(*) FROM ledger"))
        return pa.Table.from_pylist(
            [balance(topics, semel.Row(row["topic"], 0, 0, 0, None, row["value"])) for row in table.to_pylist()]
        )

    report = run(topics, ledger(place), rows, by="table", memory_bytes_max=50_000)
    assert (report.records, report.committed) == (3_000, 1)
    assert len(parts) > 5
    assert seen <= {len(snapshot)}
    assert found(place) == balances_after([snapshot, large])


def test_a_lost_event_ends_the_run(broker: EmbeddedBroker, place: Place) -> None:
    """One error, and the table as it was after the last whole transaction."""
    topics = SourceTopics(broker.bootstrap).create()
    all_transfers = list(transfers(11, 10))
    relay(topics, all_transfers[:5])
    run(topics, ledger(place))
    relay(topics, all_transfers)
    with semel.Fetcher({"bootstrap.servers": topics.bootstrap}) as fetcher:
        ends = fetcher.offsets_for([(topic, n) for topic in topics.topics for n in range(2)], "latest")
    with semel.Admin({"bootstrap.servers": topics.bootstrap}) as admin:
        admin.delete_records(ends)
    with pytest.raises(semel.TransactionIncomplete, match="Nothing of"):
        run(topics, ledger(place))
    assert found(place) == balances_after(all_transfers[:5])


def test_what_would_tear_a_transaction_is_refused_at_once(broker: EmbeddedBroker, place: Place) -> None:
    """Dead letters, a start in the middle, offsets of a group, and options without the relay's name."""
    topics = SourceTopics(broker.bootstrap)
    with pytest.raises(semel.ConfigError, match="put a part of a transaction aside"):
        run(topics, ledger(place, dead_letter="failed"))
    with pytest.raises(semel.ConfigError, match="after= with the last one"):
        run(topics, ledger(place), start="latest")
    with pytest.raises(semel.ConfigError, match="which transaction was the last"):
        run(topics, ledger(place), resume="group")
    with pytest.raises(semel.ConfigError, match="names the relay"):
        run(topics, ledger(place), source_transactions=None, after=5)

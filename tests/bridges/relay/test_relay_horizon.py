"""The decision which rows are due, held against a model of Postgres with random transactions."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from outbox_model import ModelRow, Server

from semel.bridges.relay.horizon import IN_PROGRESS_MAX, Horizon, after_interval, after_row, decide_interval
from semel.bridges.relay.progress import RelayProgress
from semel.bridges.relay.snapshots import NOTHING, Snapshot

STEPS = 120


class HorizonRelay:
    """What the relay does, with a list as the topic; progress goes through its record each time."""

    def __init__(self) -> None:
        self.horizon = Horizon()
        self.topic: list[ModelRow] = []

    def step(self, server: Server, rows_max: int) -> None:
        interval = decide_interval(self.horizon, server.snapshot())
        due = sorted((row for row in server.committed if interval.is_due(row.xid, row.id)), key=lambda row: row.id)
        portion = due[:rows_max]
        is_end = len(portion) == len(due)
        self.topic += portion
        moved = after_interval(interval) if is_end else after_row(interval, portion[-1].id)
        self.horizon = Horizon.decode(json.loads(json.dumps(moved.encode())))


class BareIdRelay:
    """The usual way: on from the highest id that was seen."""

    def __init__(self) -> None:
        self.last = 0
        self.topic: list[ModelRow] = []

    def step(self, server: Server, rows_max: int) -> None:
        due = sorted((row for row in server.committed if row.id > self.last), key=lambda row: row.id)[:rows_max]
        self.topic += due
        self.last = due[-1].id if due else self.last


class XidOrderRelay(HorizonRelay):
    """The same intervals, but in the order of transaction ids."""

    def step(self, server: Server, rows_max: int) -> None:
        interval = decide_interval(self.horizon, server.snapshot())
        self.topic += sorted(
            (row for row in server.committed if interval.is_due(row.xid, row.id)), key=lambda row: (row.xid, row.id)
        )
        self.horizon = after_interval(interval)


def run(seed: int, relay: HorizonRelay | BareIdRelay) -> Server:
    rng = random.Random(seed)
    server = Server(rng)
    for _ in range(STEPS):
        server.step()
        if rng.random() < 0.3:
            relay.step(server, rng.choice([1, 2, 100]))
    server.finish()
    for _ in range(2 * len(server.committed) + 2):
        relay.step(server, 100)
    return server


def out_of_order(rows: Iterable[ModelRow]) -> list[ModelRow]:
    """Events that come after a later one of their aggregate."""
    highest: Counter[int] = Counter()
    wrong: list[ModelRow] = []
    for row in rows:
        if row.number <= highest[row.aggregate]:
            wrong.append(row)
        highest[row.aggregate] = max(row.number, highest[row.aggregate])
    return wrong


@settings(max_examples=300)
@given(st.integers(0, 2**32))
def test_every_committed_row_is_relayed_once_and_each_aggregate_in_order(seed: int) -> None:
    """G1: savepoints, rollbacks, long transactions, and portions that split an interval."""
    relay = HorizonRelay()
    server = run(seed, relay)
    assert Counter(relay.topic) == Counter(server.committed)
    assert out_of_order(relay.topic) == []


def test_a_relay_on_the_bare_id_loses_rows_in_the_same_runs() -> None:
    """So the test above can fail."""
    lost = 0
    for seed in range(50):
        relay = BareIdRelay()
        server = run(seed, relay)
        lost += len(server.committed) - len(relay.topic)
    assert lost > 50


def test_the_order_of_transaction_ids_turns_events_around_in_the_same_runs() -> None:
    """The reason to order by id inside an interval."""
    wrong = 0
    for seed in range(50):
        relay = XidOrderRelay()
        server = run(seed, relay)
        assert Counter(relay.topic) == Counter(server.committed)
        wrong += len(out_of_order(relay.topic))
    assert wrong > 0


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_only_relayed_rows_count_as_done(seed: int) -> None:
    """What may be deleted is what is in the topic, at every moment."""
    rng = random.Random(seed)
    server, relay = Server(rng), HorizonRelay()
    for _ in range(STEPS):
        server.step()
        if rng.random() < 0.3:
            relay.step(server, rng.choice([1, 2, 100]))
        done = {row for row in server.committed if relay.horizon.is_done(row.xid, row.id)}
        assert done == set(relay.topic)


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_a_later_snapshot_may_follow_and_an_earlier_one_may_not(seed: int) -> None:
    """A server that was put back is recognised while it stands before the relay."""
    server = Server(random.Random(seed))
    snapshots = [server.snapshot()]
    for _ in range(STEPS):
        server.step()
        snapshots.append(server.snapshot())
    for earlier, later in zip(snapshots, snapshots[5:], strict=False):
        assert later.may_follow(earlier)
        assert earlier == later or not earlier.may_follow(later)
    assert all(one.may_follow(NOTHING) for one in snapshots)


def test_the_largest_progress_record_fits_into_a_batch() -> None:
    """Two snapshots with as many open transactions as are allowed, with ids of 19 digits."""
    start = 2**62
    largest = Snapshot(start, start + IN_PROGRESS_MAX, tuple(range(start, start + IN_PROGRESS_MAX)))
    progress = RelayProgress({"kind": "postgres"}, Horizon(largest, largest, 2**62).encode())
    assert len(progress.encode()) < 500_000

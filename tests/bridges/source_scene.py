"""A source database in small: transfers between accounts in three tables, and a relay that writes them to Kafka.

The relay writes the format of `semel.client.source_transactions` in Kafka transactions of its own cut: several
transactions of the source in one, one of them over several, and now and then one that is aborted and written again. Its
progress is a record in the same Kafka transaction, so that it goes on after `kill -9`.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import semel
from semel.client.source_transactions import (
    INDEX_HEADER,
    SOURCE_HEADER,
    TRANSACTION_HEADER,
    TransactionEnd,
    transactions_topic,
)

TABLES = ["cash", "savings", "loans"]
ACCOUNTS = 20
"""In each table."""
START = 1_000
TOTAL = len(TABLES) * ACCOUNTS * START


class Event(NamedTuple):
    table: str
    account: int
    balance: int


def transfers(seed: int, count: int) -> Iterator[list[Event]]:
    """The snapshot, and then transfers over two to five rows in the three tables. None of them changes the total."""
    chance = random.Random(seed)
    balances = {(table, account): START for table in TABLES for account in range(ACCOUNTS)}
    places = sorted(balances)
    yield [Event(*place, START) for place in places]
    for _ in range(count):
        touched = chance.sample(places, chance.randint(2, 5))
        amounts = [chance.randint(-50, 50) for _ in touched[1:]]
        events: list[Event] = []
        for place, amount in zip(touched, [-sum(amounts), *amounts], strict=True):
            balances[place] += amount
            events.append(Event(*place, balances[place]))
        yield events


class SourceTopics:
    """The topics of one source."""

    def __init__(self, bootstrap: str, source: str | None = None, *, partitions: int = 2) -> None:
        self.bootstrap = bootstrap
        self.source = source or f"shop-{uuid.uuid4().hex[:8]}"
        self.partitions = partitions
        self.by_table = {table: f"{self.source}.{table}" for table in TABLES}
        self.topics = list(self.by_table.values())
        self.progress = f"{self.source}.progress"

    def create(self) -> SourceTopics:
        with semel.Admin({"bootstrap.servers": self.bootstrap}) as admin:
            admin.create_topics(*self.topics, partitions=self.partitions)
            admin.create_topics(transactions_topic(self.source), self.progress, partitions=1)
        return self

    def table_of(self, topic: str) -> str:
        return topic.rpartition(".")[2]


class Relay:
    """Writes transactions as a relay does. One that is made anew goes on where the last one has committed."""

    def __init__(self, topics: SourceTopics, chance: random.Random, *, events_max: int = 40) -> None:
        self._topics = topics
        self._chance = chance
        self._events_max = events_max
        settings = {"bootstrap.servers": topics.bootstrap, "linger.ms": 0}
        self.producer = semel.Producer(settings, transactional_id=f"relay-{topics.source}")
        self._next = self._find_progress()

    def _find_progress(self) -> tuple[int, int]:
        """The transaction and the index to go on with."""
        place = semel.TopicPartition(self._topics.progress, 0)
        found = (0, 0)
        with semel.Fetcher({"bootstrap.servers": self._topics.bootstrap}) as fetcher:
            fetcher.assign({place: "earliest"})
            for table in fetcher.read_until(fetcher.end_offsets()):
                found = tuple(json.loads(table["value"][-1].as_py()))
        return found  # pyright: ignore[reportReturnType]

    def write(self, transactions: Iterable[Sequence[Event]], *, first: int = 0) -> None:
        """Those that are not written yet; the first one has the number `first`."""
        steps = list(self._steps(transactions, first))
        at = 0
        while at < len(steps):
            until = at + self._chance.randint(1, self._events_max)
            if self._chance.random() < 0.1:
                self._commit(steps[at:until], gives_up=True)
            self._commit(steps[at:until])
            at = until

    def _steps(self, transactions: Iterable[Sequence[Event]], first: int) -> Iterator[tuple[int, int, Any]]:
        """Each event, and each end, with its number and index."""
        for number, events in enumerate(transactions, first):
            counts = Counter(self._topics.by_table[event.table] for event in events)
            end = TransactionEnd(self._topics.source, number, dict(counts), id=f"x{number}")
            for index, what in enumerate([*events, end]):
                if (number, index) >= self._next:
                    yield number, index, what

    def _commit(self, steps: Sequence[tuple[int, int, Any]], *, gives_up: bool = False) -> None:
        self.producer.begin()
        for number, index, what in steps:
            if isinstance(what, TransactionEnd):
                self.producer.send(transactions_topic(self._topics.source), what.encode(), partition=0)
            else:
                self.send(number, index, what)
        if gives_up:
            self.producer.flush()
            self.producer.abort()
            return
        number, index, what = steps[-1]
        following = (number + 1, 0) if isinstance(what, TransactionEnd) else (number, index + 1)
        self.producer.send(self._topics.progress, json.dumps(following).encode(), partition=0)
        self.producer.commit()
        self._next = following

    def send(self, number: int, index: int, event: Event) -> None:
        headers = [
            (SOURCE_HEADER, self._topics.source.encode()),
            (TRANSACTION_HEADER, str(number).encode()),
            (INDEX_HEADER, str(index).encode()),
        ]
        self.producer.send(
            self._topics.by_table[event.table],
            json.dumps({"account": event.account, "balance": event.balance}).encode(),
            key=str(event.account).encode(),
            headers=headers,
            partition=event.account % self._topics.partitions,
        )

    def close(self) -> None:
        self.producer.close()


def relay(topics: SourceTopics, transactions: Iterable[Sequence[Event]], seed: int = 1, **options: Any) -> None:
    """Write them all."""
    writer = Relay(topics, random.Random(seed), **options)
    writer.write(transactions)
    writer.close()


def balances_after(transactions: Iterable[Sequence[Event]]) -> dict[tuple[str, int], int]:
    return {(event.table, event.account): event.balance for events in transactions for event in events}


CREATE = [f"CREATE TABLE {table} (account BIGINT PRIMARY KEY, balance BIGINT NOT NULL)" for table in TABLES]
SUM = "SELECT " + " + ".join(f"(SELECT coalesce(sum(balance), 0) FROM {table})" for table in TABLES)
"""One statement, so that it sees one instant."""


def apply_rows(connection: Any, topics: SourceTopics, rows: Iterable[Any]) -> None:
    """What a user writes: each event into the table of its topic."""
    mark = "?" if type(connection).__module__.startswith("sqlite3") else "%s"
    cursor = connection.cursor()
    for row in rows:
        event = json.loads(row.value)
        cursor.execute(
            f"INSERT INTO {topics.table_of(row.topic)} (account, balance) VALUES ({mark}, {mark}) "
            "ON CONFLICT (account) DO UPDATE SET balance = excluded.balance",
            (event["account"], event["balance"]),
        )


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.01)

"""What the clients of a chaos run wrote and what they were told, kept for the verdict. For many threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

TopicPartition = tuple[str, int]


class Violation(Exception):
    """The broker has broken a promise."""


class Fate(Enum):
    """What a client knows of its transaction."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"
    """It may be committed or aborted, but wholly."""


@dataclass(slots=True, eq=False)
class Transaction:
    """`values` are written into `wheres`, each value once."""

    name: str
    values: dict[str, TopicPartition] = field(default_factory=dict[str, TopicPartition])
    fate: Fate = Fate.OPEN


class Ledger:
    """Everything of one run; the verdict reads it when all clients have ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.transactions: list[Transaction] = []
        self.sent: dict[str, TopicPartition] = {}
        """Records outside of transactions."""
        self.acknowledged: dict[str, TopicPartition] = {}
        self.last_of_key: dict[str, list[str]] = {}
        """Values of the compacted topic by key, in the order in which they were sent."""
        self.topics: dict[str, str] = {}
        """Topics that come and go: coming, there, going, gone."""
        self.failures: list[str] = []
        self._ends: dict[TopicPartition, int] = {}
        self._progress: dict[str, int] = {}

    def begin(self, name: str) -> Transaction:
        with self._lock:
            transaction = Transaction(name)
            self.transactions.append(transaction)
            return transaction

    def end(self, client: str, transaction: Transaction, fate: Fate) -> None:
        with self._lock:
            transaction.fate = fate
            if fate is not Fate.UNKNOWN:
                self._count(client)

    def send(self, value: str, where: TopicPartition, key: str | None = None) -> None:
        with self._lock:
            self.sent[value] = where
            if key is not None:
                self.last_of_key.setdefault(key, []).append(value)

    def acknowledge(self, client: str, value: str, where: TopicPartition, offset: int) -> None:
        with self._lock:
            self.acknowledged[value] = where
            self._ends[where] = max(self._ends.get(where, 0), offset + 1)
            self._count(client)

    def note_topic(self, client: str, name: str, state: str) -> None:
        with self._lock:
            self.topics[name] = state
            self._count(client)

    def fail(self, failure: str) -> None:
        with self._lock:
            self.failures.append(failure)

    def _count(self, client: str) -> None:
        self._progress[client] = self._progress.get(client, 0) + 1

    def ends(self) -> dict[TopicPartition, int]:
        """Behind the last acknowledged record of each partition: no log may end before."""
        with self._lock:
            return dict(self._ends)

    def progress(self) -> Mapping[str, int]:
        """How often each client was told something good."""
        with self._lock:
            return dict(self._progress)

    def check_failures(self) -> None:
        with self._lock:
            if self.failures:
                raise Violation("\n".join(self.failures[:5]))

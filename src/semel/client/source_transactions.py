"""How the transactions of a source database travel through Kafka: headers on each event, and one end record.

A change of the source may lie in several topics, so a reader that applies each event as it comes shows states that the
source never had. The headers say which transaction an event belongs to. The end record, in a topic with one partition,
says how many events it has in each topic, so that a reader knows when it is whole. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, Self

from semel.errors import ConfigError

SOURCE_HEADER: Final = "semel.source"
"""The name of the relay: numbers of transactions count within it."""
TRANSACTION_HEADER: Final = "semel.source.transaction"
"""Which transaction of the source, counted from 1 in commit order; 0 is the snapshot at the beginning."""
INDEX_HEADER: Final = "semel.source.index"
"""The place of the event among all events of its transaction, from 0, whatever their topics."""


def transactions_topic(source: str) -> str:
    """Where the end records of a relay are, unless it was given another topic.

    >>> transactions_topic("shop")
    'shop.transactions'
    """
    return f"{source}.transactions"


@dataclass(frozen=True, slots=True)
class TransactionEnd:
    """The end record of one source transaction. It is written after the last of its events, in commit order."""

    source: str
    transaction: int
    topics: Mapping[str, int]
    """How many events went to each topic, dead letters not counted."""
    id: str = ""
    """What the database calls the transaction."""
    position: str = ""
    """Where it ended in the database's log."""
    committed_at_ms: int = 0
    format: int = field(default=1)

    @property
    def events(self) -> int:
        return sum(self.topics.values())

    def encode(self) -> bytes:
        return json.dumps({**asdict(self), "events": self.events}).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Fields that a later release may have added are ignored.

        >>> TransactionEnd.decode(TransactionEnd("shop", 7, {"orders": 2, "items": 3}).encode()).events
        5
        """
        known = json.loads(value)
        if "format" not in known:
            raise ConfigError(
                'An end record of a source transaction has no field "format". Nothing of that transaction was '
                'applied. The program that writes it must put "format": 1 into it: see docs/whole-transactions.md.'
            )
        if known["format"] != 1:
            raise ConfigError(
                f"An end record of a source transaction has format {known.get('format')}, which this release cannot "
                "read. Nothing of that transaction was applied. Use the release that has written it, or a newer one."
            )
        return cls(**{name: known[name] for name in cls.__dataclass_fields__ if name in known})

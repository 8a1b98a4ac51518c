"""What a block commits in the database beside the user's own rows: the decision, and its records. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final, NamedTuple

from semel.client.ownership import ProducerIdentity
from semel.errors import ConfigError

_FORMAT: Final = 1
PLACES_MAX: Final = 16
"""In so many partitions a recovery can look for the end of the transaction. One that still has it is enough."""


class StoredBatch(NamedTuple):
    """Records as they go to one partition, encoded but without a producer's identity: one row of the outbox."""

    topic: str
    partition: int
    record_count: int
    data: bytes


class Place(NamedTuple):
    """Where the Kafka transaction wrote first in a partition. The marker that ends it comes after this offset."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Decision:
    """While this is in the database, the records of `id` belong into Kafka, exactly once.

    The transaction that holds them is named by its producer id and epoch: Semel's producers use each pair for one
    transaction only, on both protocols.
    """

    id: str
    cluster_id: str
    identity: ProducerIdentity
    protocol: int
    places: tuple[Place, ...]

    def encode(self) -> str:
        """The same decision always gives the same text, so that a row can be changed only from what was read."""
        content = {
            "format": _FORMAT,
            "id": self.id,
            "cluster": self.cluster_id,
            "producer_id": self.identity.producer_id,
            "producer_epoch": self.identity.producer_epoch,
            "protocol": self.protocol,
            "places": [list(place) for place in self.places],
        }
        return json.dumps(content, sort_keys=True)

    @classmethod
    def decode(cls, text: str) -> Decision:
        """
        >>> decision = Decision("d1", "c", ProducerIdentity(7, 3), 2, (Place("orders", 0, 12),))
        >>> Decision.decode(decision.encode()) == decision
        True
        """
        content = json.loads(text)
        if content.get("format") != _FORMAT:
            raise ConfigError(
                f"A decision in the table semel_both has format {content.get('format')}, which this release cannot "
                "read. Nothing was changed. Use the release that has written it, or a newer one."
            )
        return cls(
            content["id"],
            content["cluster"],
            ProducerIdentity(content["producer_id"], content["producer_epoch"]),
            content["protocol"],
            tuple(Place(*place) for place in content["places"]),
        )

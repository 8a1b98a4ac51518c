"""How far a session over source transactions has come: one record, written inside the transaction that it speaks of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from semel.client.partitions import TopicPartition
from semel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """What was committed last."""

    source: str
    applied: int
    """The last transaction of the source."""
    positions: Mapping[TopicPartition, tuple[int, str | None]]
    """The first offset that is needed after it, and the id of its topic."""
    producer_id: int = -1
    """Who has written the record: its markers say whether it counts where other transactions are open."""
    format: int = field(default=1)

    def encode(self) -> bytes:
        places = [[*place, *at] for place, at in sorted(self.positions.items())]
        record = {"format": 1, "source": self.source, "applied": self.applied, "positions": places}
        return json.dumps({**record, "producer_id": self.producer_id}).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """
        >>> progress = SourceProgress("shop", 7, {TopicPartition("orders", 0): (40, None)})
        >>> SourceProgress.decode(progress.encode()) == progress
        True
        """
        known: dict[str, Any] = json.loads(value)
        if known.get("format") != 1:
            raise ConfigError(
                f"The progress of this session has format {known.get('format')}, which this release cannot read. "
                "Nothing was read or written. Use the release that has written it, or a newer one."
            )
        positions = {TopicPartition(topic, number): (at, id) for topic, number, at, id in known["positions"]}
        return cls(known["source"], known["applied"], positions, known["producer_id"])

"""Dead letters of a relay: rows that cannot be written to their topic, in a topic of their own."""

from __future__ import annotations

import time
from typing import Any, Final

import pyarrow as pa

from semel.bridges.relay.routes import Routed
from semel.client.cluster import Cluster
from semel.client.config import ProducerConfig
from semel.client.dead_letter_size import SHORT_ERROR_MAX, FittingLetter, fit_letter, letter_bytes_max
from semel.client.dead_letter_topic import check_dead_letter_rules
from semel.client.dead_letters import PREFIX, dead_letter_headers, too_many_dead_letters
from semel.client.topic_rules import TopicLookup

TABLE: Final = PREFIX + "table"
ROW: Final = PREFIX + "row"
HEADERS: Final = PREFIX + "headers"
"""The text of the row's headers, if they could not be read."""


class RelayLetters:
    """Counts the dead letters of one run."""

    def __init__(self, topic: str, limit: int, table: str) -> None:
        self.topic = topic
        self.count = 0
        self._limit = limit
        self._table = table
        self._bytes_max = 0

    def check_writable(self, cluster: Cluster, config: ProducerConfig) -> None:
        """Raise at the start, and not at the first bad row, if dead letters cannot be written."""
        rules = TopicLookup(lambda: cluster).rules(self.topic)
        check_dead_letter_rules(self.topic, rules, config, "Nothing was relayed.")
        self._bytes_max = letter_bytes_max(rules, config)

    def make(self, rows: pa.Table, routed: Routed) -> list[FittingLetter]:
        """The dead letters of the bad rows. Raises if they are too many."""
        letters: list[FittingLetter] = []
        for number, reason in routed.bad:
            if self.count + len(letters) >= self._limit:
                raise too_many_dead_letters(self.topic, self._limit, reason)
            letters.append(self._letter(rows.slice(number, 1).to_pylist()[0], _row(routed, number), reason))
        return letters

    def _letter(self, row: dict[str, Any], record: dict[str, Any], reason: str) -> FittingLetter:
        headers = [(one["key"], one["value"]) for one in record.get("headers") or []]
        ours: list[tuple[str, bytes | None]] = [
            *dead_letter_headers(record["topic"], None, None, reason[:SHORT_ERROR_MAX], int(time.time() * 1000)),
            (TABLE, self._table.encode()),
            (ROW, str(row["id"]).encode()),
        ]
        if row["headers"] is not None and not headers:
            headers = [(HEADERS, row["headers"].encode())]
        return fit_letter(row["key"], row["value"], headers, ours, self._bytes_max)


def _row(routed: Routed, number: int) -> dict[str, Any]:
    # Not its time, which may be one that Python has no date for.
    wanted = [name for name in ("topic", "headers") if name in routed.records.column_names]
    return routed.records.select(wanted).slice(number, 1).to_pylist()[0]

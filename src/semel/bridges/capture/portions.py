"""Changes of several transactions as rows for Kafka, with the end of each transaction among them. Pure."""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from semel.bridges.capture.lsn import format_lsn
from semel.bridges.capture.positions import End, Event, position_after
from semel.bridges.capture.rows import EventRow
from semel.bridges.relay.routes import Routed
from semel.bridges.relay.row_source import Portion, Position
from semel.client.source_transactions import TransactionEnd
from semel.errors import ConfigError
from semel.records.schema import HEADERS_TYPE


@dataclass(frozen=True, slots=True)
class CapturedPortion(Portion):
    """Rows that end in the middle of a transaction, or with the end of one."""

    items: Sequence[Event[Any] | End] = ()
    source: str = ""
    topics: Mapping[str, int] | None = None
    """How many events of the first transaction went to each topic before."""

    def events(self, count: int) -> int:
        return sum(isinstance(item, Event) for item in self.items[:count])

    def finish(self, routed: Routed, count: int) -> tuple[Routed, Position]:
        """Fills the ends of transactions in: how many events go to each topic is known once they are routed."""
        topics, reasons = routed.records.column("topic").to_pylist(), dict(routed.bad)
        counts = dict(self.topics or {})
        ends: dict[int, bytes] = {}
        for row, item in enumerate(self.items[:count]):
            if isinstance(item, Event):
                if row not in reasons:
                    counts[topics[row]] = counts.get(topics[row], 0) + 1
                continue
            if row in reasons:
                raise ConfigError(
                    f"The end of transaction {item.number} cannot be written: {reasons[row]} Readers of whole "
                    "transactions would wait for it for ever, so the capture stops. Nothing is lost: create the topic "
                    "with one partition, and start it again."
                )
            ends[row] = self._end(item, counts).encode()
            counts = {}
        return _with_values(routed, ends), position_after(self.items[count - 1], counts).encode()

    def _end(self, end: End, topics: dict[str, int]) -> TransactionEnd:
        return TransactionEnd(
            self.source,
            end.number,
            topics,
            id=str(end.begin.xid),
            position=format_lsn(end.begin.commit_lsn),
            committed_at_ms=end.begin.committed_at_ms,
        )


def _with_values(routed: Routed, ends: Mapping[int, bytes]) -> Routed:
    if not ends:
        return routed
    records = routed.records
    values = records.column("value").to_pylist()
    for row, value in ends.items():
        values[row] = value
    at = records.column_names.index("value")
    return Routed(records.set_column(at, "value", pa.array(values, pa.binary())), routed.bad)


def table_of(rows: Sequence[EventRow]) -> pa.Table:
    """As a portion has them, with `topic`, and with `problem` for those that cannot be written."""
    return pa.table(
        {
            "id": pa.array([row.id for row in rows], pa.string()),
            "topic": pa.array([row.topic for row in rows], pa.string()),
            "key": pa.array([row.key for row in rows], pa.binary()),
            "value": pa.array([row.value for row in rows], pa.binary()),
            "timestamp": pa.array([row.timestamp_ms for row in rows], pa.int64()),
            "headers": _headers(rows),
            "problem": pa.array([row.problem for row in rows], pa.string()),
        }
    )


def _headers(rows: Sequence[EventRow]) -> pa.Array:
    names = [name for row in rows for name, _ in row.headers]
    values = [value for row in rows for _, value in row.headers]
    ends = np.cumsum([0, *(len(row.headers) for row in rows)])
    header = HEADERS_TYPE.value_type
    pairs = pa.StructArray.from_arrays(
        [pa.array(names, header[0].type), pa.array(values, header[1].type)], fields=[header[0], header[1]]
    )
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pairs, type=HEADERS_TYPE)

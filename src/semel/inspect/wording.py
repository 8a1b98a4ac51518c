"""How the command line and the page put into words what was found. Pure."""

from __future__ import annotations

from typing import Final

from semel.inspect.excerpts import Excerpt, LoggedRecord
from semel.inspect.lag import TrueLag
from semel.inspect.provenance import Provenance
from semel.inspect.shown import show_text

SEEN_BY: Final = {
    "everyone": "every reader",
    "read_uncommitted": "only readers with isolation.level=read_uncommitted",
    "nobody": "no reader: it is a transaction marker",
}
LAG_TITLES: Final = ("LAG", "NAIVE", "WAITING", "OPEN", "ABORTED", "MARKERS")


def lag_cells(lag: TrueLag | None) -> tuple[object, ...]:
    """What stands below `LAG_TITLES`. A lag that was not counted to its end is a range.

    >>> lag_cells(TrueLag(9, 2, waiting=1)), lag_cells(TrueLag(9, 2, unread_offsets=5))
    (('2', 9, '1', '0', '0', '0'), ('2..7', 9, '0+', '0+', '0+', '0+'))
    """
    if lag is None:
        return ("-",) * len(LAG_TITLES)
    readable = f"{lag.readable}" if not lag.unread_offsets else f"{lag.readable}..{lag.at_most}"
    more = "" if lag.is_exact else "+"
    return (readable, lag.naive, *(f"{count}{more}" for count in (lag.waiting, lag.open, lag.aborted, lag.markers)))


def writer_of(one: LoggedRecord, origin: Provenance) -> str:
    """Who wrote a record."""
    if one.batch.producer_id < 0:
        return "a producer without idempotence, which leaves no trace"
    name = "" if origin.transactional_id is None else f", transactional.id {show_text(origin.transactional_id)}"
    return f"producer {one.batch.producer_id}, epoch {one.batch.producer_epoch}{name}"


def transaction_of(one: LoggedRecord, found: Excerpt) -> str:
    """What became of its transaction."""
    if not one.batch.is_transactional:
        return "none"
    if one.batch.status == "open":
        return "open" if found.is_decided else "open, or its end was not read"
    where = "" if one.ended_by is None else f" by the marker at offset {one.ended_by.offset}"
    return f"{one.batch.status}{where}"


def seen_by(one: LoggedRecord, found: Excerpt) -> str:
    """Who can read it."""
    said = SEEN_BY[one.visible_to]
    if one.visible_to == "read_uncommitted" and one.batch.status in ("plain", "committed"):
        return f"{said}, until the last stable offset ({found.last_stable_offset}) has passed it"
    return said


def spark_batch_of(origin: Provenance) -> str | None:
    """The pipeline and batch that wrote it."""
    if origin.spark is None:
        return None
    entry = origin.spark
    what = f"job {entry.job}" if entry.job is not None else f"batch {entry.entry.batch} of query {entry.entry.query}"
    return show_text(f"pipeline {entry.pipeline}, {what}", longest=None)

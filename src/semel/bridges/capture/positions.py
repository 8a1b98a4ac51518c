"""Where a capture stands, and which changes it has still to write when the server sends some again. Pure.

A position is the place of a commit in the log and an index among the events of that transaction. The place of a change
would not do: changes of one transaction lie between those of others, and all rows of one COPY have the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Self, TypeVar

from semel.bridges.capture.lsn import format_lsn, parse_lsn
from semel.bridges.capture.pgoutput import Begin, Commit

SNAPSHOT: Final = 0
"""The number of the transaction that the rows at the beginning make up."""


@dataclass(frozen=True, slots=True)
class CapturePosition:
    """Everything that was committed before `lsn` is written, and of the commit at `lsn` the first `index` events."""

    lsn: int
    number: int = 1
    """Of the transaction that comes next, or that is under way."""
    index: int = 0
    topics: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many of those events went to each topic."""

    def encode(self) -> dict[str, Any]:
        """
        >>> CapturePosition(9, 7).encode()
        {'lsn': '0/9', 'number': 7, 'index': 0, 'topics': {}}
        """
        return {"lsn": format_lsn(self.lsn), "number": self.number, "index": self.index, "topics": dict(self.topics)}

    @property
    def place(self) -> tuple[int, int, int]:
        """Without what was written there."""
        return self.lsn, self.number, self.index

    @classmethod
    def decode(cls, written: Mapping[str, Any]) -> Self:
        return cls(parse_lsn(written["lsn"]), written["number"], written["index"], written["topics"])


C = TypeVar("C")


@dataclass(slots=True)
class Event(Generic[C]):
    """A change with its place."""

    begin: Begin
    number: int
    index: int
    change: C


@dataclass(slots=True)
class End:
    """The end of a transaction that has events."""

    begin: Begin
    number: int
    index: int
    """How many events it has."""
    end_lsn: int


def position_after(item: Event[Any] | End, topics: Mapping[str, int]) -> CapturePosition:
    if isinstance(item, End):
        return CapturePosition(item.end_lsn, item.number + 1)
    return CapturePosition(item.begin.commit_lsn, item.number, item.index + 1, topics)


class OtherHistory(Exception):
    """What the server sends cannot follow what was written. The text says why."""


class Numbering(Generic[C]):
    """Counts transactions and their events, from a position on. What comes before it is left out.

    >>> numbering = Numbering[str](CapturePosition(50, number=7, index=1))
    >>> numbering.begin(Begin(40, 0, 1)); numbering.change("old"); numbering.commit(Commit(40, 45))
    >>> numbering.begin(Begin(50, 0, 2)); numbering.change("written"); numbering.change("new").index
    1
    >>> numbering.commit(Commit(50, 60)).number, numbering.position
    (7, CapturePosition(lsn=60, number=8, index=0, topics={}))
    """

    def __init__(self, start: CapturePosition) -> None:
        self._start = start
        self._lsn = start.lsn
        self._number = start.number
        self._begin: Begin | None = None
        self._index = 0
        self._written = 0
        """How many events of the present transaction are written already."""
        self._is_old = False
        """Whether the whole present transaction is."""

    @property
    def is_inside(self) -> bool:
        """Whether a transaction has begun that has not ended."""
        return self._begin is not None

    @property
    def position(self) -> CapturePosition | None:
        """Where the next transaction will be found; None inside of one, or before one is reached that is half done."""
        return None if self.is_inside or self._start.index else CapturePosition(self._lsn, self._number)

    def begin(self, begin: Begin) -> None:
        self._begin, self._index, self._written = begin, 0, 0
        self._is_old = begin.commit_lsn < self._start.lsn
        if not self._start.index or self._is_old:
            return
        if begin.commit_lsn != self._start.lsn:
            raise OtherHistory(
                f"the transaction at {format_lsn(self._start.lsn)}, of which {self._start.index} events are written, "
                f"is not sent any more, but one at {format_lsn(begin.commit_lsn)}"
            )
        self._written = self._start.index

    def change(self, change: C) -> Event[C] | None:
        """None if it is written already."""
        assert self._begin is not None
        if self._is_old:
            return None
        index, self._index = self._index, self._index + 1
        return None if index < self._written else Event(self._begin, self._number, index, change)

    def commit(self, commit: Commit) -> End | None:
        """None if the transaction has no events, or is written already."""
        begin, self._begin = self._begin, None
        assert begin is not None
        if self._is_old:
            return None
        if self._index < self._written:
            raise OtherHistory(
                f"the transaction at {format_lsn(begin.commit_lsn)} has {self._index} events, and {self._written} of "
                "it are written"
            )
        self._start = CapturePosition(self._start.lsn)
        self._lsn = max(self._lsn, commit.end_lsn)
        if not self._index:
            return None
        self._number += 1
        return End(begin, self._number - 1, self._index, commit.end_lsn)

    def passed(self, lsn: int) -> None:
        """The server has sent everything that was committed before `lsn`."""
        if self.position is not None:
            self._lsn = max(self._lsn, lsn)

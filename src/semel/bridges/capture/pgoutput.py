"""Messages of Postgres' output plugin `pgoutput`, protocol version 1, from bytes. Pure.

A transaction comes as Begin, its changes, and Commit, after it was committed. A Relation comes before the first change
of a table in a session, and again after its columns have changed.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import Final, NamedTuple, TypeVar


class Unchanged(Enum):
    """A large value that is stored apart and was not changed, so that it is not in the log."""

    UNCHANGED = 0


UNCHANGED: Final = Unchanged.UNCHANGED
Value = bytes | None | Unchanged
"""The text of a value, as Postgres prints it; None is NULL."""
Values = tuple[Value, ...]


class Begin(NamedTuple):
    commit_lsn: int
    """Where the record of the commit begins in the log. Transactions come in its order; their changes do not."""
    committed_at_us: int
    """Since 2000-01-01."""
    xid: int

    @property
    def committed_at_ms(self) -> int:
        """Since 1970."""
        return _EPOCH_MS + self.committed_at_us // 1000

    @staticmethod
    def at_us(seconds: float) -> int:
        """A time since 1970 as Postgres counts."""
        return int((seconds * 1000 - _EPOCH_MS) * 1000)


class Commit(NamedTuple):
    commit_lsn: int
    end_lsn: int
    """Where the record of the commit ends."""


class RelationColumn(NamedTuple):
    name: str
    type: int
    is_key: bool
    """Whether it is part of the replica identity."""


class Relation(NamedTuple):
    oid: int
    schema: str
    table: str
    identity: str
    """`d`: the primary key, `i`: an index, `f`: the whole row, `n`: nothing."""
    columns: tuple[RelationColumn, ...]


class Insert(NamedTuple):
    relation: int
    new: Values


class Update(NamedTuple):
    relation: int
    old: Values | None
    """The key or the whole row as it was; None if the key did not change."""
    is_old_whole: bool
    new: Values


class Delete(NamedTuple):
    relation: int
    old: Values
    is_old_whole: bool


class Truncate(NamedTuple):
    relations: tuple[int, ...]


Message = Begin | Commit | Relation | Insert | Update | Delete | Truncate
_M = TypeVar("_M", bound=Message)

_EPOCH_MS: Final = 946_684_800_000
"""2000-01-01, from where Postgres counts."""
_BEGIN: Final = struct.Struct(">QqI")
_COMMIT: Final = struct.Struct(">BQQq")
_TRUNCATE: Final = struct.Struct(">IB")
_COLUMN: Final = struct.Struct(">Ii")
_UINT32: Final = struct.Struct(">I")
_UINT16: Final = struct.Struct(">H")
_IGNORED: Final = frozenset(b"OYM")
"""Where a transaction came from, names of types, and messages of `pg_logical_emit_message`, which nobody asks for."""


def decode(data: bytes) -> Message | None:
    """None for a message that says nothing about rows. Raises ValueError for one that cannot be read.

    >>> decode(b"B" + bytes(7) + b"\\x09" + bytes(8) + bytes(3) + b"\\x05")
    Begin(commit_lsn=9, committed_at_us=0, xid=5)
    """
    try:
        return _decode(data)
    except (struct.error, IndexError) as error:
        raise ValueError(f"A message of pgoutput ends too early: {data[:40]!r}") from error


def _decode(data: bytes) -> Message | None:
    kind = data[:1]
    if kind == b"I":
        new, at = _values(data, 6)
        return _whole(data, at, Insert(_relation(data), new))
    if kind == b"U":
        return _update(data)
    if kind == b"D":
        old, at = _values(data, 6)
        return _whole(data, at, Delete(_relation(data), old, _mark(data, 5, b"KO") == b"O"))
    if kind == b"B":
        return Begin(*_BEGIN.unpack(data[1:]))
    if kind == b"C":
        _, commit_lsn, end_lsn, _ = _COMMIT.unpack(data[1:])
        return Commit(commit_lsn, end_lsn)
    if kind == b"R":
        return _decode_relation(data)
    if kind == b"T":
        count, _ = _TRUNCATE.unpack_from(data, 1)
        return Truncate(struct.unpack(f">{count}I", data[1 + _TRUNCATE.size :]))
    if kind and kind[0] in _IGNORED:
        return None
    raise ValueError(f"pgoutput has sent a message of the unknown kind {kind!r}.")


def _relation(data: bytes) -> int:
    return _UINT32.unpack_from(data, 1)[0]


def _mark(data: bytes, at: int, known: bytes) -> bytes:
    found = data[at : at + 1]
    if not found or found not in known:
        raise ValueError(f"pgoutput has sent rows of the unknown kind {found!r}.")
    return found


def _whole(data: bytes, at: int, message: _M) -> _M:
    if at != len(data):
        raise ValueError(f"A message of pgoutput has {len(data) - at} bytes too many.")
    return message


def _update(data: bytes) -> Update:
    old, at, mark = None, 5, _mark(data, 5, b"KON")
    if mark != b"N":
        old, at = _values(data, 6)
        _mark(data, at, b"N")
    new, at = _values(data, at + 1)
    return _whole(data, at, Update(_relation(data), old, mark == b"O", new))


def _values(data: bytes, at: int) -> tuple[Values, int]:
    (count,) = _UINT16.unpack_from(data, at)
    at += 2
    values: list[Value] = []
    for _ in range(count):
        kind = data[at]
        at += 1
        if kind == 0x74:  # t
            (length,) = _UINT32.unpack_from(data, at)
            at += 4
            value = data[at : at + length]
            if len(value) != length:
                raise ValueError("A message of pgoutput ends in the middle of a value.")
            values.append(value)
            at += length
        elif kind == 0x6E:  # n
            values.append(None)
        elif kind == 0x75:  # u
            values.append(UNCHANGED)
        else:
            raise ValueError(f"pgoutput has sent a value of the unknown kind {chr(kind)!r}.")
    return tuple(values), at


def _decode_relation(data: bytes) -> Relation:
    schema, at = _text(data, 5)
    table, at = _text(data, at)
    identity = chr(data[at])
    (count,) = _UINT16.unpack_from(data, at + 1)
    at += 3
    columns: list[RelationColumn] = []
    for _ in range(count):
        flags = data[at]
        name, at = _text(data, at + 1)
        kind, _ = _COLUMN.unpack_from(data, at)
        at += _COLUMN.size
        columns.append(RelationColumn(name, kind, bool(flags & 1)))
    # An empty schema stands for pg_catalog.
    return _whole(data, at, Relation(_relation(data), schema or "pg_catalog", table, identity, tuple(columns)))


def _text(data: bytes, at: int) -> tuple[str, int]:
    end = data.find(b"\0", at)
    if end < 0:
        raise ValueError("A message of pgoutput ends in the middle of a name.")
    return data[at:end].decode(), end + 1

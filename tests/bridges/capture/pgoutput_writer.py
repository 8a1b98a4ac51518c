"""Messages of pgoutput as bytes, written from the protocol's description: what the decoder must read."""

from __future__ import annotations

import struct

from semel.bridges.capture.pgoutput import (
    UNCHANGED,
    Begin,
    Commit,
    Delete,
    Insert,
    Message,
    Relation,
    Truncate,
    Update,
    Values,
)


def write(message: Message) -> bytes:
    if isinstance(message, Begin):
        return b"B" + struct.pack(">QqI", message.commit_lsn, message.committed_at_us, message.xid)
    if isinstance(message, Commit):
        return b"C" + struct.pack(">BQQq", 0, message.commit_lsn, message.end_lsn, 7)
    if isinstance(message, Relation):
        columns = b"".join(
            struct.pack(">B", one.is_key) + _text(one.name) + struct.pack(">Ii", one.type, -1)
            for one in message.columns
        )
        names = _text(message.schema) + _text(message.table) + message.identity.encode()
        return b"R" + struct.pack(">I", message.oid) + names + struct.pack(">H", len(message.columns)) + columns
    if isinstance(message, Insert):
        return b"I" + struct.pack(">I", message.relation) + b"N" + _values(message.new)
    if isinstance(message, Update):
        old = b"" if message.old is None else (b"O" if message.is_old_whole else b"K") + _values(message.old)
        return b"U" + struct.pack(">I", message.relation) + old + b"N" + _values(message.new)
    if isinstance(message, Delete):
        kind = b"O" if message.is_old_whole else b"K"
        return b"D" + struct.pack(">I", message.relation) + kind + _values(message.old)
    assert isinstance(message, Truncate)
    return b"T" + struct.pack(f">IB{len(message.relations)}I", len(message.relations), 3, *message.relations)


def _text(text: str) -> bytes:
    return text.encode() + b"\0"


def _values(values: Values) -> bytes:
    parts = [struct.pack(">H", len(values))]
    for value in values:
        if value is None:
            parts.append(b"n")
        elif value is UNCHANGED:
            parts.append(b"u")
        else:
            assert isinstance(value, bytes)
            parts.append(b"t" + struct.pack(">I", len(value)) + value)
    return b"".join(parts)

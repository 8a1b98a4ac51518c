"""Writes messages as bytes: kio's generated classes say what a message holds, and neighbours of fixed size go as one.

kio's own writer makes several calls for each field, which was a fifth of what a small request cost. It is the oracle
of the tests.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, Final

from semel.errors import WireError
from semel.wire.shape import nested_entity, varint

_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_INT64: Final = struct.Struct(">q")
_TEXT_BYTES_MAX: Final = 2**15 - 1
_GATHER_BYTES: Final = 4096
_FORMATS: Final = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "float64": "d",
    "error_code": "h",
}

Piece = bytes | memoryview
Step = Callable[[list[Piece], Any], None]
"""Takes what is written so far and a value, and appends the value."""


def write_frame(header: Any, body: Any) -> list[Piece]:
    """Header and body behind their size. Large fields (record batches) are passed on by reference, never copied."""
    pieces: list[Piece] = []
    _write(pieces, header)
    _write(pieces, body)
    sizes = list(map(len, pieces))
    size = _INT32.pack(sum(sizes))
    if max(sizes) < _GATHER_BYTES:
        return [size, b"".join(pieces)]
    gathered: list[Piece] = [size]
    begin = 0
    for number, piece in enumerate(pieces):
        if sizes[number] >= _GATHER_BYTES:
            if begin < number:
                gathered.append(b"".join(pieces[begin:number]))
            gathered.append(piece)
            begin = number + 1
    if begin < len(pieces):
        gathered.append(b"".join(pieces[begin:]))
    return gathered


def encode_entity(entity: Any) -> bytes:
    """One entity by itself.

    >>> from kio.schema.heartbeat.v0.response import HeartbeatResponse
    >>> from kio.schema.errors import ErrorCode
    >>> encode_entity(HeartbeatResponse(error_code=ErrorCode.illegal_generation)).hex()
    '0016'
    """
    pieces: list[Piece] = []
    _write(pieces, entity)
    return b"".join(pieces)


def _write(out: list[Piece], entity: Any) -> None:
    schema: type[Any] = entity.__class__
    _entity(schema)(out, entity)


@cache
def _entity(entity: type[Any]) -> Step:
    is_header = entity.__name__ == "RequestHeader"
    is_flexible: bool = entity.__flexible__
    steps: list[Step] = []
    names, layout = list[str](), ""
    tags: list[dataclasses.Field[Any]] = []
    for field in dataclasses.fields(entity):
        if "tag" in field.metadata:
            tags.append(field)
        elif _is_fixed(field):
            names.append(field.name)
            layout += _FORMATS[field.metadata["kafka_type"]]
        else:
            if names:
                steps.append(_fixed(names, layout))
                names, layout = [], ""
            # The client id in a header keeps its old layout in every version.
            step = _value(field, is_flexible and not (is_header and field.name == "client_id"), is_tagged=False)
            steps.append(_attribute(field.name, step))
    if is_flexible and not tags:
        layout += "x"  # a zero byte: no tags
    if layout:
        steps.append(_fixed(names, layout))
    if tags:
        steps.append(_tagged(sorted(tags, key=lambda field: field.metadata["tag"])))
    return steps[0] if len(steps) == 1 else _all(steps)


def _all(steps: Sequence[Step]) -> Step:
    def write_all(out: list[Piece], entity: Any) -> None:
        for step in steps:
            step(out, entity)

    return write_all


def _is_fixed(field: dataclasses.Field[Any]) -> bool:
    return not _is_array(field) and field.metadata.get("kafka_type") in _FORMATS


def _is_array(field: dataclasses.Field[Any]) -> bool:
    return "tuple" in str(field.type)


def _fixed(names: Sequence[str], layout: str) -> Step:
    pack = struct.Struct(">" + layout).pack
    if not names:
        constant = pack()
        return lambda out, entity: out.append(constant)
    get = attrgetter(*names)
    if len(names) == 1:
        return lambda out, entity: out.append(pack(get(entity)))
    return lambda out, entity: out.append(pack(*get(entity)))


def _attribute(name: str, step: Step) -> Step:
    get = attrgetter(name)
    return lambda out, entity: step(out, get(entity))


def _tagged(fields: Sequence[dataclasses.Field[Any]]) -> Step:
    """Those that are not as they are by default, each behind its number and size (KIP-482)."""
    steps = [
        (varint(field.metadata["tag"]), field.name, field.default, _value(field, True, is_tagged=True))
        for field in fields
    ]

    def write_tagged(out: list[Piece], entity: Any) -> None:
        told = [(tag, step, value) for tag, name, default, step in steps if (value := getattr(entity, name)) != default]
        out.append(varint(len(told)))
        for tag, step, value in told:
            content: list[Piece] = []
            step(content, value)
            out += (tag, varint(sum(map(len, content))), *content)

    return write_tagged


def _value(field: dataclasses.Field[Any], is_flexible: bool, *, is_tagged: bool) -> Step:
    # What a tag stands before cannot be null: it would not be there.
    may_be_null = "None" in str(field.type) and not is_tagged
    nested = nested_entity(field.type)
    kind = field.metadata.get("kafka_type", "")
    if _is_array(field):
        return _array(_entity(nested) if nested is not None else _plain(kind, is_flexible, False), is_flexible)
    if nested is not None:
        return _optional(_entity(nested)) if may_be_null else _entity(nested)
    return _plain(kind, is_flexible, may_be_null)


def _plain(kind: str, is_flexible: bool, may_be_null: bool) -> Step:
    if kind in _FORMATS:
        pack = struct.Struct(">" + _FORMATS[kind]).pack
        return lambda out, value: out.append(pack(value))
    if kind in ("string", "bytes", "records"):
        old = _write_string if kind == "string" else _write_bytes
        step = _write_compact if is_flexible else old
        return step if may_be_null else _never_null(step)
    return _OTHERS[kind]


def _never_null(step: Step) -> Step:
    def write(out: list[Piece], value: Any) -> None:
        if value is None:
            raise TypeError("a field that cannot be null is None")
        step(out, value)

    return write


def _write_compact(out: list[Piece], value: Any) -> None:
    if value is None:
        out.append(b"\0")
        return
    data = value.encode() if isinstance(value, str) else value
    out += (varint(len(data) + 1), data)


def _write_string(out: list[Piece], value: Any) -> None:
    if value is None:
        out.append(b"\xff\xff")
        return
    data = value.encode()
    if len(data) > _TEXT_BYTES_MAX:
        raise WireError(f"A text of {len(data):,} bytes is too long for this version of the protocol.")
    out += (_INT16.pack(len(data)), data)


def _write_bytes(out: list[Piece], value: Any) -> None:
    if value is None:
        out.append(b"\xff\xff\xff\xff")
        return
    out += (_INT32.pack(len(value)), value)


def _write_uuid(out: list[Piece], value: Any) -> None:
    out.append(bytes(16) if value is None else value.bytes)


def _write_datetime(out: list[Piece], value: Any) -> None:
    out.append(_INT64.pack(-1 if value is None else round(value.timestamp() * 1000)))


@lru_cache(maxsize=100)
def _milliseconds(value: timedelta) -> int:
    return round(value.total_seconds() * 1000)


_OTHERS: Final[dict[str, Step]] = {
    "uuid": _write_uuid,
    "datetime_i64": _write_datetime,
    "timedelta_i32": lambda out, value: out.append(_INT32.pack(_milliseconds(value))),
    "timedelta_i64": lambda out, value: out.append(_INT64.pack(_milliseconds(value))),
}


def _optional(step: Step) -> Step:
    """A byte tells whether the entity follows (KIP-893)."""

    def write(out: list[Piece], value: Any) -> None:
        if value is None:
            out.append(b"\xff")
            return
        out.append(b"\1")
        step(out, value)

    return write


def _array(step: Step, is_flexible: bool) -> Step:
    null = b"\0" if is_flexible else b"\xff\xff\xff\xff"

    def write(out: list[Piece], values: Any) -> None:
        if values is None:
            out.append(null)
            return
        out.append(varint(len(values) + 1) if is_flexible else _INT32.pack(len(values)))
        for value in values:
            step(out, value)

    return write

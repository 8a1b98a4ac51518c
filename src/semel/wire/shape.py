"""Walks over a message before it is decoded: everything it announces must be there, and in bounds.

kio's reader makes room for as many entries as an array announces, so that forty bytes from a stranger ended the process
("memory allocation failed"); it takes null for arrays that cannot be null, and it fails at tags that it does not know,
where the protocol asks to pass over them (KIP-482).
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, cast, get_args

from kio.static.protocol import Entity

from semel.errors import WireError

REQUEST_ENTRIES_MAX: Final = 25_000
"""Entries of all arrays and tags of a request together. Kafka's own limit is the size of the frame, and 100 MB of empty
names would cost gigabytes and stop all others for minutes. The most partitions that Kafka creates at once are 10,000,
and these fit in with their replicas."""

REQUEST_TEXT_BYTES_MAX: Final = 32_767
"""A text of a request in any version: the older layouts had no room for more, and names of megabytes only fill
the memory."""

_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_VARINT_BYTES_MAX: Final = 5
_FIXED_BYTES: Final = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "timedelta_i32": 4,
    "int64": 8,
    "float64": 8,
    "timedelta_i64": 8,
    "datetime_i64": 8,
    "error_code": 2,
    "uuid": 16,
}
_BYTES_KINDS: Final = frozenset({"bytes", "records"})


Frame = bytes | bytearray | memoryview


class Walk:
    """One message under way: how many entries it may still have, and which parts of it kio must not see."""

    __slots__ = ("data", "entries_left", "text_bytes_max", "unknown_tags")

    def __init__(self, data: Frame, entries_max: int, text_bytes_max: int) -> None:
        self.data = data
        self.text_bytes_max = text_bytes_max
        self.entries_left = entries_max
        self.unknown_tags: list[tuple[int, int, bytes]] = []
        """Where a list of tags begins and ends, and the bytes that are to take its place."""

    def take_entries(self, count: int) -> None:
        self.entries_left -= count
        if self.entries_left < 0:
            raise WireError("It has more entries than are taken: ask for fewer at a time.")

    def without_unknown_tags(self) -> Frame:
        if not self.unknown_tags:
            return self.data
        pieces: list[Frame] = []
        position = 0
        for begin, end, instead in self.unknown_tags:
            pieces += (self.data[position:begin], instead)
            position = end
        return b"".join((*pieces, self.data[position:]))


Step = Callable[[Walk, int], int]
"""Takes the position of a field and returns the one behind it."""


def check_shape(
    frame: Frame, header: type[Any], payload: type[Any], *, entries_max: int, text_bytes_max: int | None = None
) -> Frame:
    """The frame, fit to be decoded: as it is, or without the tags that are not known. Raises WireError."""
    walk = Walk(frame, entries_max, len(frame) if text_bytes_max is None else text_bytes_max)
    try:
        end = _step_over(payload)(walk, _step_over(header)(walk, 0))
    except (IndexError, struct.error):
        raise WireError("It ends before its fields do.") from None
    if end > len(frame):
        raise WireError("It ends before its fields do.")
    return walk.without_unknown_tags()


def nested_entity(annotation: Any) -> type[Entity] | None:
    """The entity class inside `Entity`, `tuple[Entity, ...]` or either with `| None`."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return cast(type[Entity], annotation)
    for argument in get_args(annotation):
        found = nested_entity(argument)
        if found is not None:
            return found
    return None


@cache
def _step_over(entity: type[Any]) -> Step:
    """Over one entity. Neighbours of a fixed size are one step."""
    # The client id in a header keeps its old layout in every version.
    is_flexible = entity.__flexible__ and entity.__name__ != "RequestHeader"
    steps: list[Step] = []
    fixed = 0
    tags: dict[int, Step] = {}
    for field in dataclasses.fields(entity):
        size = _fixed_size(field)
        if "tag" in field.metadata:
            tags[field.metadata["tag"]] = _over_fixed(size) if size is not None else _over_tagged(field)
            continue
        if size is not None:
            fixed += size
            continue
        if fixed:
            steps.append(_over_fixed(fixed))
            fixed = 0
        steps.append(_over_field(field, is_flexible))
    if entity.__flexible__:
        steps.append(_over_tags(tags, behind=fixed))
    elif fixed:
        steps.append(_over_fixed(fixed))
    if len(steps) == 1:
        return steps[0]

    def over_all(walk: Walk, at: int) -> int:
        for step in steps:
            at = step(walk, at)
        return at

    return over_all


def _fixed_size(field: dataclasses.Field[Any]) -> int | None:
    if _is_array(field) or nested_entity(field.type) is not None:
        return None
    return _FIXED_BYTES.get(field.metadata["kafka_type"])


def _is_array(field: dataclasses.Field[Any]) -> bool:
    return "tuple" in str(field.type)


def _over_fixed(size: int) -> Step:
    return lambda walk, at: at + size


def _over_field(field: dataclasses.Field[Any], is_flexible: bool) -> Step:
    nested = nested_entity(field.type)
    kind = field.metadata.get("kafka_type", "")
    if _is_array(field):
        may_be_null = "None" in str(field.type)
        if nested is not None:
            return _over_array(_step_over(nested), is_flexible, may_be_null)
        if kind in _FIXED_BYTES:
            return _over_numbers(_FIXED_BYTES[kind], is_flexible, may_be_null)
        return _over_array(_over_text_or_bytes(kind, is_flexible), is_flexible, may_be_null)
    if nested is not None:
        step = _step_over(nested)
        return _over_optional(step) if "None" in str(field.type) else step
    return _over_text_or_bytes(kind, is_flexible)


def _over_text_or_bytes(kind: str, is_flexible: bool) -> Step:
    if is_flexible:
        return _over_compact if kind in _BYTES_KINDS else _over_compact_string
    return _over_bytes if kind in _BYTES_KINDS else _over_string


def _over_compact(walk: Walk, at: int) -> int:
    size, at = _varint(walk.data, at)
    return at + size - 1 if size else at


def _over_compact_string(walk: Walk, at: int) -> int:
    size, at = _varint(walk.data, at)
    if size - 1 > walk.text_bytes_max:
        raise WireError(f"It has a text of {size - 1:,} bytes; at most {walk.text_bytes_max:,} are taken.")
    return at + size - 1 if size else at


def _over_string(walk: Walk, at: int) -> int:
    # Below zero is null; where that is not allowed, and for -2, the reader says so.
    return at + 2 + max(0, _INT16.unpack_from(walk.data, at)[0])


def _over_bytes(walk: Walk, at: int) -> int:
    return at + 4 + max(0, _INT32.unpack_from(walk.data, at)[0])


def _over_optional(step: Step) -> Step:
    """A byte tells whether the entity, which may be null, follows."""

    def over(walk: Walk, at: int) -> int:
        is_there = walk.data[at] < 0x80
        return step(walk, at + 1) if is_there else at + 1

    return over


def _over_numbers(size: int, is_flexible: bool, may_be_null: bool) -> Step:
    def over(walk: Walk, at: int) -> int:
        count, at = _count(walk, at, is_flexible, may_be_null)
        return at + count * size

    return over


def _over_array(step: Step, is_flexible: bool, may_be_null: bool) -> Step:
    def over(walk: Walk, at: int) -> int:
        count, at = _count(walk, at, is_flexible, may_be_null)
        for _ in range(count):
            at = step(walk, at)
        return at

    return over


def _count(walk: Walk, at: int, is_flexible: bool, may_be_null: bool) -> tuple[int, int]:
    if is_flexible:
        count, at = _varint(walk.data, at)
        count -= 1
    else:
        count, at = _INT32.unpack_from(walk.data, at)[0], at + 4
    if count < 0:
        if count < -1 or not may_be_null:
            raise WireError(f"It has an array of {count} entries.")
        return 0, at
    # An entry is a byte at least. Said here, before anybody makes room for them.
    if count > len(walk.data) - at:
        raise WireError(f"It announces {count:,} entries and has {len(walk.data) - at:,} bytes left.")
    walk.take_entries(count)
    return count, at


def _over_tagged(field: dataclasses.Field[Any]) -> Step:
    """An entity behind a tag has no byte that tells whether it is there: the tag does."""
    nested = nested_entity(field.type)
    return _step_over(nested) if nested is not None and not _is_array(field) else _over_field(field, is_flexible=True)


def _over_tags(known: Mapping[int, Step], *, behind: int) -> Step:
    """Over the tags that follow so many bytes of fixed fields."""

    def over(walk: Walk, at: int) -> int:
        at += behind
        if walk.data[at] == 0:
            return at + 1
        return _over_tags_there(walk, at, known)

    return over


def _over_tags_there(walk: Walk, begin: int, known: Mapping[int, Step]) -> int:
    data = walk.data
    count, at = _varint(data, begin)
    if count > len(data) - at:
        raise WireError(f"It announces {count:,} tags and has {len(data) - at:,} bytes left.")
    walk.take_entries(count)
    kept: dict[int, bytes] = {}
    is_as_it_was = True
    for _ in range(count):
        tag, at = _varint(data, at)
        size, at = _varint(data, at)
        if tag in known:
            content = Walk(bytes(data[at : at + size]), walk.entries_left, walk.text_bytes_max)
            if known[tag](content, 0) != size:
                raise WireError("A tag does not have the size that it announces.")
            walk.entries_left = content.entries_left
            is_as_it_was &= not content.unknown_tags
            fit = bytes(content.without_unknown_tags())
            kept[tag] = varint(tag) + varint(len(fit)) + fit
        at += size
    if len(kept) < count or not is_as_it_was:
        # At most as many as the entity has tags, so that one byte is enough for the count.
        walk.unknown_tags.append((begin, at, bytes([len(kept)]) + b"".join(kept.values())))
    return at


def varint(value: int) -> bytes:
    """An unsigned number, seven bits to the byte.

    >>> varint(300).hex()
    'ac02'
    """
    if value < 0x80:
        return _SMALL[value]
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_SMALL: Final = [bytes([value]) for value in range(0x80)]


def _varint(data: Frame, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value = byte & 0x7F
    for place in range(1, _VARINT_BYTES_MAX):
        byte = data[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise WireError("It has a length of more than five bytes.")

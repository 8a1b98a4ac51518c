"""Make a dead letter fit into the largest batch that its topic takes. Session and sink share it.

A record of nearly that size no longer fits once the headers of a dead letter are added. Its dead letter is cut, and
further headers say how long the original was and what its SHA-256 is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from semel.client.config import ProducerConfig
from semel.client.dead_letters import PREFIX
from semel.client.topic_rules import TopicRules
from semel.records import HEADER_BYTES
from semel.records.reference import Record, write_record

VALUE_LENGTH: Final = PREFIX + "value-length"
VALUE_SHA256: Final = PREFIX + "value-sha256"
KEY_LENGTH: Final = PREFIX + "key-length"
KEY_SHA256: Final = PREFIX + "key-sha256"
HEADERS_DROPPED: Final = PREFIX + "headers-dropped"

BYTES_MIN: Final = 4_096
"""The least that a dead letter must be allowed to take: room for all headers, whatever names and error are."""
SHORT_ERROR_MAX: Final = 500
"""How many characters of an error fit into `BYTES_MIN` beside the other headers."""

_Headers = list[tuple[str, bytes | None]]


class FittingLetter(NamedTuple):
    """Key, value and headers of a dead letter. The names of headers are UTF-8 with `surrogateescape`."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


def letter_bytes_max(rules: TopicRules, config: ProducerConfig) -> int:
    """How large a batch of one dead letter may be before compression, so that it fits whatever is in it."""
    return replace(rules, bytes_max=min(rules.bytes_max, config.request_bytes_max)).sure_bytes(config)


def letter_bytes(key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]) -> int:
    """The size of a batch of this record alone, before compression."""
    body = bytearray()
    write_record(body, Record(0, 0, key, value, tuple(headers)), 0, 0)
    return HEADER_BYTES + len(body)


def fit_letter(
    key: bytes | None,
    value: bytes | None,
    headers: Sequence[tuple[str, bytes | None]],
    ours: Sequence[tuple[str, bytes | None]],
    bytes_max: int,
) -> FittingLetter:
    """The dead letter of a record, cut so that a batch of it alone takes at most `bytes_max` bytes.

    `ours` are the headers that say why it failed; they are never cut. The value is cut first. If that is not enough,
    the record's own headers are dropped, and then the key is cut.

    >>> letter = fit_letter(b"k", bytes(10_000), [], [("semel.dead-letter.error", b"no amount")], 4_096)
    >>> len(letter.value) < 4_096, dict(letter.headers)["semel.dead-letter.value-length"]
    (True, b'10000')
    """
    whole = [*headers, *ours]
    if letter_bytes(key, value, whole) <= bytes_max:
        return FittingLetter(key, value, whole)
    about_value = _cut_headers(value, VALUE_LENGTH, VALUE_SHA256)
    room = bytes_max - letter_bytes(key, b"", [*whole, *about_value]) - 8
    if room >= 0:
        return FittingLetter(key, value and value[:room], [*whole, *about_value])
    kept = list(ours)
    if headers:
        kept.append((HEADERS_DROPPED, str(len(headers)).encode()))
    about_key = _cut_headers(key, KEY_LENGTH, KEY_SHA256)
    room = bytes_max - letter_bytes(b"", b"", [*kept, *about_key, *about_value]) - 16
    if key is not None and len(key) > room:
        key, kept = key[:room], [*kept, *about_key]
    room -= len(key or b"")
    if value is not None and len(value) > room:
        value, kept = value[:room], [*kept, *about_value]
    return FittingLetter(key, value, kept)


def _cut_headers(data: bytes | None, length: str, digest: str) -> _Headers:
    if data is None:
        return []
    return [(length, str(len(data)).encode()), (digest, hashlib.sha256(data).hexdigest().encode())]

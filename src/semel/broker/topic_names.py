"""Which names a topic may have, and which two names cannot stand beside each other."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from kio.schema.errors import ErrorCode

from semel.core.refusal import Refused

NAME_CHARACTERS_MAX: Final = 249
_LEGAL: Final = re.compile(r"[a-zA-Z0-9._-]+")


def refuse_bad_name(name: str) -> None:
    """INVALID_TOPIC_EXCEPTION for what Kafka does not take: the name becomes a folder's name and a metric's.

    >>> refuse_bad_name("a b")
    Traceback (most recent call last):
    semel.core.refusal.Refused: invalid_topic_exception: Topic name is invalid: 'a b' contains one or more characters \
other than ASCII alphanumerics, '.', '_' and '-'
    """
    reason = None
    if not name:
        reason = "the empty string is not allowed"
    elif name in (".", ".."):
        reason = f"'{name}' is not allowed"
    elif len(name) > NAME_CHARACTERS_MAX:
        reason = f"the length of '{name}' is longer than the max allowed length {NAME_CHARACTERS_MAX}"
    elif not _LEGAL.fullmatch(name):
        reason = f"'{name}' contains one or more characters other than ASCII alphanumerics, '.', '_' and '-'"
    if reason is not None:
        raise Refused(ErrorCode.invalid_topic_exception, f"Topic name is invalid: {reason}")


def colliding(name: str, others: Collection[str]) -> str | None:
    """Another name that differs only in '.' and '_': both would be the same name of a metric.

    >>> colliding("a_b", ["a.b", "ab"])
    'a.b'
    """
    if "." not in name and "_" not in name:
        return None
    plain = name.replace(".", "_")
    return next((other for other in others if other != name and other.replace(".", "_") == plain), None)

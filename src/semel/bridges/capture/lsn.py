"""Places in Postgres' log, and the history of its timelines. Pure."""

from __future__ import annotations

import re
from typing import Final

_LSN: Final = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


def parse_lsn(text: str) -> int:
    """
    >>> parse_lsn("1/16B3748")
    4318771016
    """
    found = _LSN.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no place in a log of Postgres.")
    return int(found.group(1), 16) << 32 | int(found.group(2), 16)


def format_lsn(lsn: int) -> str:
    """
    >>> format_lsn(4318771016)
    '1/16B3748'
    """
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def end_of_timeline(history: str, timeline: int) -> int | None:
    """Where a timeline was left, as the history file of a later one says; None if it is none of its ancestors.

    >>> end_of_timeline("1\\t0/3000000\\tno recovery target specified\\n", 1)
    50331648
    """
    for line in history.splitlines():
        words = line.split("\t")
        if len(words) >= 2 and words[0].strip() == str(timeline):
            return parse_lsn(words[1].strip())
    return None

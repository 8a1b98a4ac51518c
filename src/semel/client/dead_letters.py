"""Dead letters: records that could not be processed, with their origin and the error. Session and sink share it.

A dead letter has the key, the value and the headers of the record that failed, and the headers below after them.
"""

from __future__ import annotations

import time
from typing import Final

from semel.errors import TooManyDeadLetters

PREFIX: Final = "semel.dead-letter."
TOPIC: Final = PREFIX + "topic"
PARTITION: Final = PREFIX + "partition"
OFFSET: Final = PREFIX + "offset"
ERROR: Final = PREFIX + "error"
TIME: Final = PREFIX + "time"
"""When it failed, in milliseconds since 1970."""

DEAD_LETTER_MAX: Final = 1_000
"""How many dead letters one run may write unless the user sets `dead_letter_max`."""
_ERROR_CHARACTERS_MAX: Final = 2_000
"""An error may quote the record itself; the header must not make the dead letter too large as well."""


def dead_letter_headers(
    topic: str | None,
    partition: int | None,
    offset: int | None,
    error: BaseException | str,
    time_ms: int | None = None,
) -> list[tuple[str, bytes]]:
    """The headers to add to a dead letter, all of them UTF-8 text. What is None is not known and is left out.

    >>> dead_letter_headers("orders", 2, 17, ValueError("no amount"), 1_700_000_000_000)[3:]
    [('semel.dead-letter.error', b'ValueError: no amount'), ('semel.dead-letter.time', b'1700000000000')]
    """
    text = error if isinstance(error, str) else describe_error(error)
    values = {
        TOPIC: topic,
        PARTITION: partition,
        OFFSET: offset,
        ERROR: text[:_ERROR_CHARACTERS_MAX],
        TIME: int(time.time() * 1000) if time_ms is None else time_ms,
    }
    return [(name, str(value).encode("utf-8", "replace")) for name, value in values.items() if value is not None]


def describe_error(error: BaseException) -> str:
    """Type and text of an error, whatever its own `__str__` does.

    >>> describe_error(KeyError("amount"))
    "KeyError: 'amount'"
    """
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def text_of(error: BaseException) -> str:
    """`str(error)`, or a remark if that raises.

    >>> text_of(KeyError("amount"))
    "'amount'"
    """
    try:
        return str(error)
    except Exception as second:
        return f"(its text cannot be shown: {type(second).__name__})"


def too_many_dead_letters(topic: str, limit: int, last: str) -> TooManyDeadLetters:
    """`last` is the error of the record that was one too many."""
    return TooManyDeadLetters(
        f"More than dead_letter_max={limit} records could not be processed; the last error was: {last}. This "
        f"transaction was aborted, so its records come again after a restart; the dead letters in topic {topic!r} are "
        "those of earlier transactions. Mend the cause, or raise dead_letter_max if so many are expected."
    )

"""Semel's log lines as text or as JSON, with the pipeline, batch and transaction that they belong to.

Without a call, Semel logs as any library does: through Python's `logging`, to the handlers that the program has set up.
SEMEL_LOG=json or SEMEL_LOG=text does the same as the functions here, without a change to the program.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from json import dumps
from typing import Final, TextIO

from semel.errors import ConfigError

VARIABLE: Final = "SEMEL_LOG"
LEVEL_VARIABLE: Final = "SEMEL_LOG_LEVEL"
_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_LOGGER: Final = logging.getLogger("semel")


@dataclass(slots=True)
class _Layer:
    """Fields of what is under way. What ends is passed over from then on, in whatever order things end."""

    read: Callable[[], Mapping[str, object] | None]
    """None once it has ended."""
    outer: _Layer | None


_innermost: ContextVar[_Layer | None] = ContextVar("semel_log_fields", default=None)
_handler: logging.Handler | None = None


def json(level: str = "info", stream: TextIO | None = None) -> None:
    """Write Semel's log as one JSON object a line, to standard error.

    >>> import io
    >>> lines = io.StringIO()
    >>> json(stream=lines)
    >>> with fields(pipeline="orders"):
    ...     logging.getLogger("semel.session").info("committed")
    >>> '"pipeline": "orders"' in lines.getvalue()
    True
    >>> off()
    """
    _write_with(_JsonLines(), level, stream)


def text(level: str = "info", stream: TextIO | None = None) -> None:
    """Write Semel's log as text, to standard error."""
    _write_with(_TextLines(), level, stream)


def off() -> None:
    """Leave the log to the program's own handlers again."""
    global _handler
    if _handler is not None:
        _LOGGER.removeHandler(_handler)
        _handler = None
        _LOGGER.propagate = True
        _LOGGER.setLevel(logging.NOTSET)


def set_up_if_asked() -> None:
    """Do what SEMEL_LOG says."""
    kind = os.environ.get(VARIABLE)
    if not kind:
        return
    if kind not in ("json", "text"):
        raise ConfigError(f"{VARIABLE}={kind!r} is not understood: write json or text, or unset it.")
    _write_with(_JsonLines() if kind == "json" else _TextLines(), os.environ.get(LEVEL_VARIABLE) or "info", None)


def _write_with(form: logging.Formatter, level: str, stream: TextIO | None) -> None:
    global _handler
    if level.lower() not in _LEVELS:
        raise ConfigError(f"The log level {level!r} is none of {', '.join(_LEVELS)}.")
    off()
    _handler = logging.StreamHandler(stream or sys.stderr)
    _handler.setFormatter(form)
    _LOGGER.addHandler(_handler)
    _LOGGER.setLevel(level.upper())
    _LOGGER.propagate = False  # the program's own handlers would write each line once more


# -- fields ------------------------------------------------------------------------------------------------------------


def current_fields() -> dict[str, object]:
    """What the lines of this thread or task belong to."""
    found: dict[str, object] = {}
    layer = _innermost.get()
    while layer is not None:
        found = {**(layer.read() or {}), **found}
        layer = layer.outer
    return found


def add_fields(read: Callable[[], Mapping[str, object] | None]) -> None:
    """Let the lines from here on have these fields too, until `read` gives None."""
    outer = _innermost.get()
    while outer is not None and outer.read() is None:
        outer = outer.outer
    _innermost.set(_Layer(read, outer))


@contextmanager
def fields(**more: object) -> Iterator[None]:
    """Lines within have these fields too.

    >>> with fields(pipeline="orders", batch_id=3):
    ...     current_fields()["batch_id"]
    3
    """
    is_over = False
    add_fields(lambda: None if is_over else more)
    try:
        yield
    finally:
        is_over = True


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    return {**current_fields(), **getattr(record, "semel_fields", {})}


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": getattr(record, "semel_event", None) or record.getMessage(),
        }
        for name, value in _fields_of(record).items():
            line.setdefault(name, value)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return dumps(line, default=str)


class _TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = getattr(record, "semel_event", None) or record.message
        named = " ".join(f"{name}={value}" for name, value in _fields_of(record).items() if value is not None)
        return super().formatMessage(record) + (f" [{named}]" if named else "")

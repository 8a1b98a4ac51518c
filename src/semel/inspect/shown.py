"""Text that is safe to show, from bytes and names that anybody may have written. Pure.

Control characters could move the cursor, colour the screen, or turn the reading direction around, so they are escaped.
What is cut says how much there is. Programs get the whole value from `--json`.
"""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Any, Final

TEXT_MAX: Final = 200
"""Characters of a value that are shown without being asked for more."""


def show_text(value: str | bytes | memoryview | None, longest: int | None = TEXT_MAX) -> str:
    r"""
    >>> show_text(b"caf\xc3\xa9 \x1b[31m \xff"), show_text(None), show_text("abcdef", 4)
    ('café \\x1b[31m \\xff', 'null', 'abcd… (6 characters)')
    """
    if value is None:
        return "null"
    if isinstance(value, str):
        text, whole = value, f"{len(value)} characters"
    else:
        # Four bytes are the longest character: what is cut off need not be decoded.
        head = bytes(value if longest is None else value[: 4 * longest])
        text, whole = head.decode("utf-8", "backslashreplace"), f"{len(value)} bytes"
    if longest is not None and (len(text) > longest or (not isinstance(value, str) and len(value) > 4 * longest)):
        return f"{_escape(text[:longest])}… ({whole})"
    return _escape(text)


def _escape(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape", "surrogatepass").decode() for one in text)


def show_time(at_ms: int | None) -> str:
    """
    >>> show_time(1_731_628_800_000), show_time(None), show_time(2**62)
    ('2024-11-15T00:00:00.000Z', '-', '4611686018427387904 ms')
    """
    if at_ms is None or at_ms < 0:
        return "-"
    try:
        at = datetime.fromtimestamp(at_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{at_ms} ms"
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def show_span(span_ms: float | None) -> str:
    """
    >>> [show_span(span) for span in (None, 250, 61_000, 7_500_000, 200_000_000)]
    ['-', '250 ms', '1 min 1 s', '2 h 5 min', '2 d 7 h']
    """
    if span_ms is None:
        return "-"
    if span_ms < 1_000:
        return f"{span_ms:.0f} ms"
    seconds = int(span_ms // 1_000)
    units = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    parts: list[str] = []
    for name, size in units:
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count} {name}")
    return " ".join(parts[:2])


def bytes_as_json(name: str, value: bytes | None) -> dict[str, Any]:
    r"""Text where it is UTF-8, else base64 under another name, so that no byte is lost.

    >>> bytes_as_json("value", b"10"), bytes_as_json("value", b"\xff")
    ({'value': '10'}, {'value_base64': '/w=='})
    """
    if value is None:
        return {name: None}
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}

"""One dead letter of the sink: the row as it was to be written, and headers that say why it was not.

A function of the row and of `DeadLetterTerms`, so that a task that runs twice makes the same bytes.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import pyarrow as pa

from semel.client.dead_letter_size import SHORT_ERROR_MAX, fit_letter
from semel.client.dead_letters import PREFIX, dead_letter_headers
from semel.records.schema import as_binary, normalise_columns
from semel.spark.bad_rows import BadRow
from semel.spark.dead_letters import DeadLetterTerms

PIPELINE: Final = PREFIX + "pipeline"
BATCH: Final = PREFIX + "batch"
JOB: Final = PREFIX + "job"
OUTPUT_TOPIC: Final = PREFIX + "output-topic"
OUTPUT_PARTITION: Final = PREFIX + "output-partition"

_TEXT_MAX: Final = 249
"""No topic has a longer name. A row may name any, and pipelines and jobs too."""
_SHOWN_MAX: Final = 60

Headers = list[tuple[bytes, bytes | None]]


class Row(NamedTuple):
    """A row as it was to be written; `topic` and `partition` may be what is wrong with it."""

    key: bytes | None
    value: bytes | None
    headers: Headers
    topic: str | None
    partition: int | None


def read_row(table: pa.Table, number: int, topic: str | None) -> Row:
    """One row of a table, whatever its strings hold."""
    one = table.slice(number, 1)
    columns = normalise_columns(one)
    headers = [] if columns.headers is None else columns.headers[0].as_py() or []
    if topic is None and "topic" in one.column_names:
        named = as_binary("topic", one.column("topic"))[0].as_py()
        topic = None if named is None else named.decode("utf-8", "backslashreplace")
    return Row(
        None if columns.key is None else columns.key[0].as_py(),
        columns.value[0].as_py(),
        [(b"", None) if header is None else (header["key"] or b"", header["value"]) for header in headers],
        topic,
        one.column("partition")[0].as_py() if "partition" in one.column_names else None,
    )


def dead_letter(row: Row, reason: str, terms: DeadLetterTerms, now_ms: int, bytes_max: int) -> dict[str, Any]:
    """The record for a bad row, cut so that a batch of it alone takes at most `bytes_max` bytes."""
    named = [(name.decode("utf-8", "surrogateescape"), data) for name, data in row.headers]
    letter = fit_letter(row.key, row.value, named, _our_headers(row, reason, terms, now_ms), bytes_max)
    headers = [{"key": name.encode("utf-8", "surrogateescape"), "value": data} for name, data in letter.headers]
    return {"key": letter.key, "value": letter.value, "headers": headers}


def _our_headers(row: Row, reason: str, terms: DeadLetterTerms, now_ms: int) -> list[tuple[str, bytes]]:
    about: dict[str, object] = {
        PIPELINE: terms.pipeline,
        BATCH: terms.batch_id,
        JOB: terms.job_id,
        OUTPUT_TOPIC: row.topic,
        OUTPUT_PARTITION: row.partition,
    }
    # The origin is a row of a query, which has no topic, partition or offset of its own.
    made = dead_letter_headers(None, None, None, reason[:SHORT_ERROR_MAX], now_ms)
    made += [
        (name, str(value).encode("utf-8", "replace")[:_TEXT_MAX]) for name, value in about.items() if value is not None
    ]
    return made


def show(table: pa.Table, bad: BadRow, topic: str | None) -> str:
    """What is wrong with a row, with its key and topic."""
    row = read_row(table, bad.row, topic)
    return f"a row with key {_shown(row.key)} for topic {_shown(row.topic)}: {bad.reason}"


def _shown(text: bytes | str | None) -> str:
    if text is None:
        return "null"
    return repr(text) if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]!r}... ({len(text)} long)"

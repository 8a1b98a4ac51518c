"""Records whose rows cannot be written, in a table of the same database and in the same transaction as the others."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple, Self

import pyarrow as pa

from semel.bridges.database import Database
from semel.bridges.merge import quote, quote_table
from semel.client.dead_letters import describe_error
from semel.errors import ConfigError, TooManyDeadLetters
from semel.session.dead_letter_box import origin
from semel.session.transaction import Row

_SCHEMA: Final = pa.schema(
    [
        ("pipeline", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("error", pa.string()),
        ("at", pa.timestamp("us", "UTC")),
    ]
)
_ERROR_CHARACTERS_MAX: Final = 2_000


class RefusedRow(NamedTuple):
    """What goes into the table for one record or row. What is None is not known."""

    topic: str | None
    partition: int | None
    offset: int | None
    key: bytes | None
    value: bytes | None
    error: str
    origin: str
    """Where it was found, in words."""

    @classmethod
    def of(cls, row: Row, error: BaseException) -> Self:
        """For a record that was read from Kafka."""
        return cls(row.topic, row.partition, row.offset, row.key, row.value, describe_error(error), origin(row))


class DeadLetterTable:
    """Counts what it takes over a run; `pending` of them belong to the transaction that is open.

    `things` is what they are called in an error: records of Kafka, or rows of Spark.
    """

    def __init__(self, table: str, limit: int | None, *, pipeline: str, target: str, things: str = "records") -> None:
        if table == target:
            raise ConfigError(f"dead_letter={table!r} is the table that rows go to: name another one.")
        if limit is not None and limit < 0:
            raise ConfigError(f"dead_letter_max={limit} must not be negative; None is no limit.")
        self.table = table
        self.committed_count = 0
        self._limit = limit
        self._pipeline = pipeline
        self._things = things
        self._pending = 0

    def prepare(self, database: Database) -> None:
        """Make the table if it is not there. Raises if it could not be written to later."""
        database.check_names(self.table)
        database.check_schema(self.table)
        found = database.columns(self.table)
        if found is None:
            columns = ", ".join(f"{quote(one.name)} {database.sql_type(one.type)}" for one in _SCHEMA)
            with database.turn(self.table):
                database.execute(f"CREATE TABLE IF NOT EXISTS {quote_table(self.table)} ({columns})")
            return
        missing = [name for name in _SCHEMA.names if name not in found]
        if missing or database.missing_rights(self.table, ["INSERT"]):
            fault = f"it has no column {missing[0]!r}" if missing else "this user may not INSERT there"
            raise ConfigError(
                f"Dead letters cannot go to table {self.table!r}: {fault}. Nothing was read. Its columns are "
                f"{', '.join(_SCHEMA.names)}; Semel makes the table if it is not there."
            )

    def write(self, database: Database, refused: Sequence[RefusedRow]) -> None:
        """In the transaction that is open. Raises if there were too many in this run."""
        if not refused:
            return
        self.check_count(refused)
        source = database.stage(self._rows(refused))
        names = ", ".join(quote(name) for name in _SCHEMA.names)
        database.execute(f"INSERT INTO {quote_table(self.table)} ({names}) SELECT {names} FROM {source}")
        self._pending = len(refused)

    def check_count(self, refused: Sequence[RefusedRow]) -> None:
        """Raises if these are too many."""
        total = self.committed_count + len(refused)
        if self._limit is not None and total > self._limit:
            raise self._too_many(refused[self._limit - total])

    def end(self, *, committed: bool) -> None:
        if committed:
            self.committed_count += self._pending
        self._pending = 0

    def _rows(self, refused: Sequence[RefusedRow]) -> pa.Table:
        now = datetime.now(UTC)
        rows = [
            (self._pipeline, row.topic, row.partition, row.offset, row.key, row.value, _storable(row.error), now)
            for row in refused
        ]
        columns = zip(zip(*rows, strict=True), _SCHEMA.types, strict=True)
        return pa.table([pa.array(values, kind) for values, kind in columns], schema=_SCHEMA)

    def _too_many(self, last: RefusedRow) -> TooManyDeadLetters:
        return TooManyDeadLetters(
            f"More than dead_letter_max={self._limit} {self._things} could not be written; the last error was: "
            f"{last.error[:_ERROR_CHARACTERS_MAX]} ({last.origin}). This transaction was rolled back, so its "
            f"{self._things} come again after a restart; the dead letters in table {self.table!r} are those of earlier "
            "transactions. Fix the cause, or raise dead_letter_max if so many are expected."
        )


def _storable(text: str) -> str:
    """Without what Postgres does not take in text.

    >>> _storable("a\\0b") == "a\\\\0b"
    True
    """
    return text.replace("\0", "\\0")[:_ERROR_CHARACTERS_MAX].encode("utf-8", "replace").decode()

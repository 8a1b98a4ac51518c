"""Rows from Spark's JVM to Python without a look at the size of the Arrow batch after each of them.

Spark looks because rows may be long, and that takes as long as to write short ones. Here the plan itself makes sure
that they are short, by the length of each text, which Spark knows. If a row is longer, the job fails, and runs again as
Spark would run it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from semel.spark.feeding import BYTES_SETTING, NO_LIMIT, ROWS_SETTING, has_other_functions, is_classic
from semel.spark.progress import log_event

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ROWS: Final = 4_096
_ROW_BYTES: Final = 64 * 1024
"""Together no more than 256 MB, which is what Spark 4.0 to 4.2 allow a batch."""
_MARK: Final = "semel: a row is longer than 64 kB, so this job runs again in smaller portions; nothing is wrong"
_LENGTHS: Final = frozenset({"string", "binary"})
_FIXED: Final = frozenset(
    {"boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "date", "timestamp", "timestamp_ntz"}
)
_have_long_rows: set[str] = set()
_lock: Final = threading.Lock()
_users: Final = Counter[int]()
_before: Final[dict[int, dict[str, str]]] = {}


def collect_mapped(df: DataFrame, function: Any, schema: str, *, name: str) -> list[Any]:
    """`df.mapInArrow(function, schema).collect()`. What was seen of rows is remembered under a name."""
    short = None if name in _have_long_rows else _short_rows_only(df)
    if short is not None:
        try:
            with _without_looking(df.sparkSession):
                return short.mapInArrow(function, schema).collect()
        except Exception as error:
            if _MARK not in str(error):
                raise
            _have_long_rows.add(name)
            log_event("a row is longer than 64 kB, so the job runs again with smaller portions", logging.INFO, of=name)
    return df.mapInArrow(function, schema).collect()


def _short_rows_only(df: DataFrame) -> DataFrame | None:
    """The same rows, and an error at a long one. None where that cannot be told, or other functions take rows too."""
    spark: Any = df.sparkSession
    if not is_classic(spark) or not spark.conf.isModifiable(BYTES_SETTING):
        return None  # Spark 3.5 does not look
    lengths: list[str] = []
    for column in df.schema:
        kind = column.dataType.simpleString()
        if kind in _LENGTHS:
            lengths.append(f"coalesce(octet_length(`{column.name.replace('`', '``')}`), 0)")
        elif kind not in _FIXED and not kind.startswith("decimal("):
            return None
    if has_other_functions(df):
        return None
    if not lengths:
        return df
    return df.where(f"if({' + '.join(lengths)} > {_ROW_BYTES}, cast(raise_error('{_MARK}') as boolean), true)")


@contextmanager
def _without_looking(spark: Any) -> Iterator[None]:
    """Spark's limits are settings of a session, which may run several jobs at a time: the last one restores them."""
    session = spark._jsparkSession.hashCode()
    with _lock:
        if _users[session] == 0:
            before = {setting: spark.conf.get(setting) for setting in (ROWS_SETTING, BYTES_SETTING)}
            rows = int(before[ROWS_SETTING])
            spark.conf.set(ROWS_SETTING, str(min(_ROWS, rows) if rows > 0 else _ROWS))
            spark.conf.set(BYTES_SETTING, NO_LIMIT)
            _before[session] = before
        _users[session] += 1
    try:
        yield
    finally:
        with _lock:
            _users[session] -= 1
            if _users[session] == 0:
                del _users[session]
                for setting, value in _before.pop(session).items():
                    spark.conf.set(setting, value)

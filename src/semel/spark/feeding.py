"""How Spark hands rows to Python: with few rows at a time instead of a look at the size after each of them.

Spark ends an Arrow batch at a number of rows, or of bytes. For the bytes it adds up all buffers after each row, which
for short rows takes longer than to write them. Both limits are settings of the session that hold for every function in
the tasks of a job, also for those of the user's own, whose rows may be long: where there is one, they stay.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from semel.spark.input_offsets import running_query
from semel.spark.progress import log_event
from semel.spark.rows import EncodeInPlan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROWS_SETTING: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
BYTES_SETTING: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
NO_LIMIT: Final = "2147483647b"
_PLAIN_BYTES: Final = re.compile(r"(\d+)b?")
_STEP: Final = re.compile(r"^[^\w\n]*(?:\*?\(\d+\) )?(\w*(?:Python|PySpark|Pandas|Arrow).*)", re.MULTILINE)
"""A step of a plan that goes through Python. Before it there are lines of the tree, and a number for generated code."""
_OUR_STEP: Final = re.compile(rf"\w*MapInArrow {EncodeInPlan.__name__}\(")
_FEWEST_ROWS: Final = 256
"""With fewer rows at a time each Arrow batch costs more than the looks at its size."""
_MOST_BYTES: Final = 2_000_000_000
"""What a column of an Arrow batch can hold."""


def feeding(df: DataFrame, row_bytes: float | None, record_bytes_max: int) -> AbstractContextManager[None]:
    """For a job that hands the rows of `df` to Python, of which an average length may be known."""
    spark: Any = df.sparkSession
    # Spark 3.5 has no such limit. Through Spark Connect a micro-batch does not know its query.
    if not spark.conf.isModifiable(BYTES_SETTING) or not is_classic(spark):
        return nullcontext()
    # A default of one's own would hide Spark's.
    limit, rows_max = spark.conf.get(BYTES_SETTING), int(spark.conf.get(ROWS_SETTING))
    rows = rows_at_a_time(limit, rows_max, row_bytes, record_bytes_max)
    if rows is None or _has_others(df):
        return nullcontext()
    return settings(spark, {ROWS_SETTING: str(rows), BYTES_SETTING: NO_LIMIT})


def rows_at_a_time(limit: str, rows: int, row_bytes: float | None, record_bytes_max: int) -> int | None:
    """How many rows stay below a limit of bytes (in Spark's notation) without counting; None if one must count.

    Few, so that they are twice the limit at most even where each is as long as a record may be. Where rows are known to
    be short, some more: that all of them are long at once is not likely then, and must only not break anything.

    >>> rows_at_a_time("268435456b", 10_000, 112.0, 1_048_576), rows_at_a_time("268435456b", 10_000, None, 1_048_576)
    (1907, 512)
    >>> rows_at_a_time("67108864b", 10_000, 112.0, 1_048_576), rows_at_a_time("67108864b", 10_000, None, 1_048_576)
    (1907, None)
    >>> rows_at_a_time("67108864b", 10_000, 50_000.0, 1_048_576), rows_at_a_time("67108864b", 300, 112.0, 1_048_576)
    (None, 300)
    """
    plain = _PLAIN_BYTES.fullmatch(limit)
    if plain is None:
        return None
    limit_bytes = int(plain[1])
    at_once = 2 * limit_bytes
    if row_bytes is not None and rows * row_bytes < limit_bytes / 4:
        at_once = max(at_once, _MOST_BYTES)
    few = min(rows, at_once // record_bytes_max)
    return few if few >= _FEWEST_ROWS else None


def is_classic(spark: Any) -> bool:
    """Whether this process has the session itself, and not one of Spark Connect."""
    return hasattr(spark, "_jsparkSession")


def has_other_functions(df: DataFrame) -> bool:
    """Whether the job that computes `df` hands rows to functions in Python: of a micro-batch, or of a plain query."""
    anyhow: Any = df
    try:
        execution = anyhow._jdf.queryExecution()
        if execution.logical().nodeName() == "LogicalRDD":
            return _has_others(df)
        return has_others(execution.executedPlan().treeString())
    except Exception as error:
        log_event("Spark's plan cannot be seen, so its Arrow limits stay", logging.DEBUG, error=str(error))
        return True


def _has_others(df: DataFrame) -> bool:
    """Whether the job may run functions besides the sink's own: none if `df` is a micro-batch as Spark hands it over,
    of a query that has none. What a version of Spark does not tell is a yes, and costs only time."""
    anyhow: Any = df
    try:
        if anyhow._jdf.queryExecution().logical().nodeName() != "LogicalRDD":
            return True
        query = running_query(df.sparkSession)
        return query is None or has_others(query.lastExecution().executedPlan().treeString())
    except Exception as error:
        log_event("Spark's plan cannot be seen, so its Arrow limits stay", logging.DEBUG, error=str(error))
        return True


def has_others(plan: str) -> bool:
    """Whether Spark's text of a plan has a step that hands rows to a function of others.

    >>> has_others("+- *(1) Project [a#1]\\n   +- ArrowEvalPython [<lambda>(a#1)#5]")
    True
    >>> has_others("+- MapInArrow EncodeInPlan(value#1)#5\\n   +- *(1) Project [python#1]")
    False
    """
    return any(not _OUR_STEP.match(step) for step in _STEP.findall(plan))


def feeding_few(spark: Any, rows: int) -> AbstractContextManager[None]:
    """For a job that hands over so many rows at a time, or fewer where the user wants fewer."""
    wanted = int(spark.conf.get(ROWS_SETTING))
    return settings(spark, {ROWS_SETTING: str(min(rows, wanted) if wanted > 0 else rows)})


@contextmanager
def settings(spark: Any, wanted: Mapping[str, str]) -> Iterator[None]:
    """Settings of a session, for a while."""
    before = {name: spark.conf.get(name) for name in wanted}
    for name, value in wanted.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)

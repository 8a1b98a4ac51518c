"""How rows of a job get from Spark to a function in Python: many at a time, if the plan knows that they are short."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from spark_sessions import small_spark

from semel.spark import short_rows
from semel.spark.short_rows import collect_mapped

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
LIMIT = "spark.sql.execution.arrow.maxBytesPerBatch"
ROWS_AT_A_TIME = "spark.sql.execution.arrow.maxRecordsPerBatch"
USUAL = [10_000]
"""What Spark hands over of 10,000 rows by itself."""
IN_PORTIONS = [4_096, 4_096, 1_808]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = small_spark()
    if not session.conf.isModifiable(LIMIT):
        session.stop()
        pytest.skip("Spark 3.5 looks at no sizes")
    yield session
    session.stop()


@pytest.fixture(autouse=True)
def check_settings(spark: SparkSession) -> Iterator[None]:
    """Whatever happens, the session is left as it was."""
    before = [spark.conf.get(name) for name in (LIMIT, ROWS_AT_A_TIME)]
    yield
    assert [spark.conf.get(name) for name in (LIMIT, ROWS_AT_A_TIME)] == before


def sizes(df: DataFrame, name: str = "any") -> list[int]:
    def size(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"rows": [batch.num_rows]})

    return [row.rows for row in collect_mapped(df, size, "rows long", name=name)]


def rows(spark: SparkSession, *columns: str) -> DataFrame:
    return spark.range(0, 10_000, 1, 1).selectExpr("id", *columns)


def test_short_rows_come_without_a_look_at_their_size(spark: SparkSession) -> None:
    """E4: that look takes as long as to write a short row. Null has no length."""
    assert sizes(rows(spark)) == IN_PORTIONS
    assert sizes(rows(spark, "if(id % 2 = 0, null, 'x') `odd name`", "cast('y' as binary) b")) == IN_PORTIONS


def test_a_long_row_makes_the_job_run_again_as_spark_would_run_it(spark: SparkSession) -> None:
    """E4: 4,096 rows of any length might not fit into memory. The next job of that name does not try."""
    long = rows(spark, "if(id = 9999, repeat('x', 70000), 'x') text")
    assert sizes(long, "long") == USUAL
    assert "long" in short_rows._have_long_rows
    assert sizes(rows(spark), "long") == USUAL


def test_rows_whose_length_the_plan_does_not_know_come_as_ever(spark: SparkSession) -> None:
    assert sizes(rows(spark, "array('x') list")) == USUAL


def test_functions_of_the_users_own_in_the_same_job_keep_their_limits(spark: SparkSession) -> None:
    """Their rows may be long."""
    own = rows(spark).mapInArrow(lambda batches: batches, "id long")
    assert sizes(own) == USUAL


def test_an_error_of_the_users_own_is_raised_as_it_is(spark: SparkSession) -> None:
    with pytest.raises(PySparkException, match="of my own"):
        sizes(rows(spark, "raise_error('of my own') failure").selectExpr("id", "cast(failure as string) text"))


def test_jobs_in_several_threads_leave_the_settings_as_they_were(spark: SparkSession) -> None:
    """The first one to end must not restore them for the other, nor the other what the first one has set."""
    both: Any = Barrier(2)

    def run(number: int) -> list[int]:
        both.wait()
        return sizes(rows(spark), f"thread {number}")

    for _ in range(3):
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(run, range(2))) == [IN_PORTIONS, IN_PORTIONS]

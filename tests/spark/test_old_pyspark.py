"""The Spark source where pyspark is too old for it: what a user is told. The sink works there.

Each test is for some versions only and named for them in `compat.py`, which runs it there.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pyspark
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType
from spark_sessions import small_spark

from semel.errors import ConfigError

pytestmark = [
    pytest.mark.old_pyspark,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
SENTENCE = rf'format\("semel"\) needs pyspark 4\.2 or later, and this is {pyspark.__version__}: upgrade pyspark'


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = small_spark()
    yield session
    session.stop()


def test_spark_4_0_hands_on_the_sentence_that_says_what_is_needed(spark: SparkSession) -> None:
    """E1: in batch and streaming queries, before anything is read."""
    options = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "orders"}
    with pytest.raises(AnalysisException, match=SENTENCE):
        spark.read.format("semel").options(**options).load()
    with pytest.raises(AnalysisException, match=SENTENCE):
        spark.readStream.format("semel").options(**options).load()


def test_spark_4_0_finds_other_python_sources_beside_it(spark: SparkSession) -> None:
    """E1: Spark imports every `pyspark_*` module when it looks for a source; one that cannot be used spoils nothing."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    class Reader(DataSourceReader):
        def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
            yield (7,)

    class Other(DataSource):
        def schema(self) -> str:
            return "id int"

        def reader(self, schema: StructType) -> DataSourceReader:
            return Reader()

    spark.dataSource.register(Other)
    assert [row.id for row in spark.read.format("Other").load().collect()] == [7]


def test_spark_3_5_knows_no_python_sources_and_says_that_it_finds_none(spark: SparkSession) -> None:
    """E1: Semel has no say in it, yet the failure comes at once and names the format."""
    with pytest.raises(Exception, match=r"DATA_SOURCE_NOT_FOUND.*semel"):
        spark.read.format("semel").option("subscribe", "orders").load()


def test_the_import_of_the_source_on_3_5_says_what_is_needed() -> None:
    """E1: also by the name under which newer Sparks find it."""
    for module in ("semel.spark.source", "pyspark_semel"):
        with pytest.raises(ConfigError, match=SENTENCE):
            importlib.import_module(module)

"""From Kafka by Semel's source into a database, with a checkpoint that is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from sink_scene import numbers
from spark_sessions import small_spark

import semel
from semel.testing.postgres import Postgres

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = small_spark()
    yield session
    session.stop()


def test_a_lost_checkpoint_goes_on_at_the_databases_position(spark: SparkSession, tmp_path: Path) -> None:
    """E8, F2: an empty checkpoint is refused, and the position of the rows is known, also for new partitions."""
    with Postgres() as server, semel.Broker() as broker:
        bootstrap, name = broker.bootstrap, "orders"
        topic, target = semel.Kafka(bootstrap, topic=name), semel.Postgres(server.uri, table=name, create=True)

        def read(start: str) -> DataFrame:
            options = {"kafka.bootstrap.servers": bootstrap, "subscribe": name, "startingOffsets": start}
            rows = spark.readStream.format("semel").options(**options).load()
            return rows.selectExpr("cast(cast(value as string) as long) id")

        def run(start: str, checkpoint: str, **more: Any) -> None:
            path = str(tmp_path / checkpoint)
            trigger = {"availableNow": True}
            semel.write_stream(
                read(start), name=name, to=target, checkpoint=path, trigger=trigger, **more
            ).awaitTermination()

        with semel.Admin({"bootstrap.servers": bootstrap}) as admin:
            admin.create_topics(name, partitions=2)
        semel.write_batch(numbers(spark, 0, 50), name=name, job_id="1", to=topic)
        run("earliest", "lost")
        with semel.Admin({"bootstrap.servers": bootstrap}) as admin:
            admin.create_partitions(name, 3)
        semel.write_batch(numbers(spark, 50, 80), name=name, job_id="2", to=topic)
        with pytest.raises(semel.ConfigError, match=r"^Pipeline 'orders' has run before with another checkpoint"):
            run("earliest", "new")
        assert not (tmp_path / "new").exists(), "the query was not started, so Spark shows no trace of its own"
        start = semel.committed_offsets(name=name, to=target, bootstrap=bootstrap)
        run(start, "newer", resume="committed")
        with target.open() as database:
            found = [int(row[0]) for row in database.execute("SELECT id FROM orders ORDER BY id").rows]
    assert found == list(range(80))

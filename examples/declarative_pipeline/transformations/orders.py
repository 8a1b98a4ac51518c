"""Orders from one topic into two, each written exactly once, however often the pipeline is killed and run again.

`BROKERS` has the addresses of the Kafka brokers. Needs `pip install 'semel[spark]' 'pyspark[pipelines]'`.
"""

import os

from pyspark import pipelines
from pyspark.sql import DataFrame, SparkSession

BROKERS = os.environ["BROKERS"]

spark = SparkSession.active()
for size in ("long", "short"):
    # The name is the pipeline's in Semel's ledger: each sink needs its own.
    options = {"name": f"orders-{size}", "topic": size, "kafka.bootstrap.servers": BROKERS}
    pipelines.create_sink(size, "semel", options)


def orders() -> DataFrame:
    stream = spark.readStream.format("semel").option("kafka.bootstrap.servers", BROKERS).option("subscribe", "orders")
    return stream.option("startingOffsets", "earliest").load().select("key", "value")


@pipelines.append_flow(target="long")
def long_orders() -> DataFrame:
    return orders().where("length(value) > 3")


@pipelines.append_flow(target="short")
def short_orders() -> DataFrame:
    return orders().where("length(value) <= 3")

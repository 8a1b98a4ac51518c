"""copy_named.py after its checkpoint was lost: go on where the last commit was."""

import sys

from pyspark.sql import SparkSession

import semel

bootstrap = sys.argv[1]
spark = SparkSession.builder.appName("copy").getOrCreate()
orders = (
    spark.readStream.format("semel")
    .option("kafka.bootstrap.servers", bootstrap)
    .option("subscribe", "orders")
    .option("startingOffsets", semel.committed_offsets(name="copy", bootstrap=bootstrap))
    .load()
)
query = semel.write_stream(
    orders.select("key", "value"),
    name="copy",
    bootstrap=bootstrap,
    topic="copied",
    checkpoint="new-checkpoint",
    resume="committed",
)
query.awaitTermination()

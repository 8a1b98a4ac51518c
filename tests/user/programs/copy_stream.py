"""Copy a topic, exactly once."""

import sys

from pyspark.sql import SparkSession

import semel

spark = SparkSession.builder.appName("copy").getOrCreate()

orders = (
    spark.readStream.format("semel")
    .option("kafka.bootstrap.servers", sys.argv[1])
    .option("subscribe", "orders")
    .option("startingOffsets", "earliest")
    .load()
)

query = semel.write_stream(
    orders,  # the row as it was read has all that it needs
    name="copy-orders",
    bootstrap=sys.argv[1],
    topic="copied",
    checkpoint="checkpoints/copy",
)
query.awaitTermination()

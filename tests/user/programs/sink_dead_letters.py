"""Orders with their receipts. Some receipts are longer than the topic allows: they go to another topic."""

import sys

from pyspark.sql import SparkSession

import semel

bootstrap = sys.argv[1]
spark = SparkSession.builder.appName("receipts").getOrCreate()
orders = (
    spark.readStream.format("semel")
    .option("kafka.bootstrap.servers", bootstrap)
    .option("subscribe", "orders")
    .option("startingOffsets", "earliest")
    .load()
)
receipts = orders.selectExpr(
    "key",
    "get_json_object(CAST(value AS STRING), '$.id') AS id",
    "get_json_object(CAST(value AS STRING), '$.product') AS product",
).selectExpr("key", "concat(id, ' ', if(product = 'salt', repeat('salt ', 1000), product)) AS value")
query = semel.write_stream(
    receipts,
    name="receipts",
    bootstrap=bootstrap,
    topic="receipts",
    checkpoint="checkpoints/receipts",
    dead_letter="too-long",
    dead_letter_max=1_000_000,
)
query.awaitTermination()

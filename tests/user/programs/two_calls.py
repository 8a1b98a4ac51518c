"""The same as one would write it first: the sink called twice."""

import sys

from pyspark.sql import SparkSession

import semel

bootstrap = sys.argv[1]
spark = SparkSession.builder.appName("even and odd").getOrCreate()
even = semel.KafkaSink(name="even-and-odd", bootstrap=bootstrap, topic="even")

orders = (
    spark.readStream.format("semel")
    .option("kafka.bootstrap.servers", bootstrap)
    .option("subscribe", "orders")
    .option("startingOffsets", "earliest")
    .load()
    .selectExpr("key", "value", "CAST(get_json_object(CAST(value AS STRING), '$.id') AS LONG) AS id")
)


def write(batch, batch_id):
    even(batch.where("id % 2 = 0").select("key", "value"), batch_id)
    even(batch.where("id % 2 = 1").select("key", "value"), batch_id)


query = orders.writeStream.foreachBatch(write).option("checkpointLocation", "checkpoints/even-and-odd").start()
query.awaitTermination()

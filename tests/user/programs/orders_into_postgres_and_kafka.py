"""Orders into a table of Postgres and into another topic, from one Spark query. Unreadable ones are put aside."""

import os
import sys

from pyspark.sql import SparkSession

import semel

spark = SparkSession.builder.appName("orders").getOrCreate()

orders = (
    spark.readStream.format("semel")
    .option("kafka.bootstrap.servers", sys.argv[1])
    .option("subscribe", "orders")
    .option("startingOffsets", "earliest")
    .load()
)
target = semel.Postgres(
    os.environ["DATABASE_URL"], table="orders", mode="upsert", key=["id"], create=True, dead_letter="unreadable"
)
table = semel.DatabaseSink(name="orders-to-table", to=target)
topic = semel.KafkaSink(name="orders-to-topic", bootstrap=sys.argv[1], topic="copied")


def each(batch, batch_id):
    order = "from_json(cast(value as string), 'id long, customer string, amount long') as o"
    table(
        batch.selectExpr(order, "topic", "partition", "offset").select("o.*", "topic", "partition", "offset"), batch_id
    )
    topic(batch.select("key", "value"), batch_id)


query = orders.writeStream.foreachBatch(each).option("checkpointLocation", "checkpoints/orders").start()
query.awaitTermination()

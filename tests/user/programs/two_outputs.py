"""One stream, two topics: even orders here, odd ones there, both of a batch or neither."""

import sys

from pyspark.sql import SparkSession

import semel

bootstrap = sys.argv[1]
spark = SparkSession.builder.appName("even and odd").getOrCreate()
sink = semel.KafkaSink(name="even-and-odd", bootstrap=bootstrap)

orders = (
    spark.readStream.format("semel")
    .option("kafka.bootstrap.servers", bootstrap)
    .option("subscribe", "orders")
    .option("startingOffsets", "earliest")
    .load()
    .selectExpr("key", "value", "CAST(get_json_object(CAST(value AS STRING), '$.id') AS LONG) AS id")
)


def write(batch, batch_id):
    batch.persist()
    with sink.batch(batch_id) as outputs:
        outputs.write(batch.where("id % 2 = 0").select("key", "value"), topic="even")
        outputs.write(batch.where("id % 2 = 1").select("key", "value"), topic="odd")
    batch.unpersist()


query = orders.writeStream.foreachBatch(write).option("checkpointLocation", "checkpoints/even-and-odd").start()
query.awaitTermination()

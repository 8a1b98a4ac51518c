"""foreachBatch that does two things: to Kafka, exactly once, and to Parquet beside it."""

import sys

from pyspark.sql import SparkSession

import semel

bootstrap = sys.argv[1]
spark = SparkSession.builder.appName("both").getOrCreate()
sink = semel.KafkaSink(name="both", bootstrap=bootstrap, topic="clean")


def write(batch, batch_id):
    batch.persist()
    # The same batch again writes the same folder again.
    batch.select("value").write.mode("overwrite").parquet(f"lake/batch={batch_id}")
    sink(batch, batch_id)
    batch.unpersist()


orders = (
    spark.readStream.format("semel")
    .option("kafka.bootstrap.servers", bootstrap)
    .option("subscribe", "orders")
    .option("startingOffsets", "earliest")
    .load()
)
query = (
    orders.selectExpr("CAST(key AS STRING) AS key", "CAST(value AS STRING) AS value")
    .writeStream.foreachBatch(write)
    .option("checkpointLocation", "checkpoints/both")
    .start()
)
query.awaitTermination()

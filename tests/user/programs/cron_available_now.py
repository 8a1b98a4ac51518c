"""What a cron job does every five minutes: take what is there, in batches of at most 1000, and end.

Here a scheduler inside the application calls it, ten times.
"""

import sys

from pyspark.sql import SparkSession

import semel

bootstrap = sys.argv[1]
spark = SparkSession.builder.appName("every five minutes").getOrCreate()


def job():
    orders = (
        spark.readStream.format("semel")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", "orders")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", 1000)
        .load()
    )
    query = semel.write_stream(
        orders.select("key", "value"),
        name="orders-every-five-minutes",
        bootstrap=bootstrap,
        topic="collected",
        checkpoint="cron-checkpoint",
        trigger={"availableNow": True},
    )
    query.awaitTermination()


for run in range(1, 11):
    job()
    print(f"run {run} is done", flush=True)

"""Orders with their prices: JSON as in Spark's guide, and a join with a static DataFrame.

A static DataFrame stays as it was when the query started, so every now and then the query is started again.
"""

import sys
import time

from pyspark.sql import SparkSession
from pyspark.sql.functions import broadcast, col, from_json, struct, to_json

import semel

bootstrap = sys.argv[1]
spark = SparkSession.builder.appName("enrich").getOrCreate()


def start():
    prices = spark.createDataFrame(
        [("tea", 3), ("coffee", 5), ("milk", 1), ("bread", 4), ("salt", 2)], "product string, price int"
    )
    orders = (
        spark.readStream.format("semel")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", "orders")
        .option("startingOffsets", "earliest")
        .load()
        .select(
            from_json(col("value").cast("string"), "id long, customer string, product string, amount int").alias("o")
        )
        .select("o.*")
    )
    enriched = orders.join(broadcast(prices), "product").withColumn("total", col("amount") * col("price"))
    return semel.write_stream(
        enriched.select(col("customer").alias("key"), to_json(struct("*")).alias("value")),
        name="orders-enriched",
        bootstrap=bootstrap,
        topic="enriched",
        checkpoint="checkpoints/enriched",
    )


while True:
    query = start()
    while len(query.recentProgress) < 4:
        if not query.isActive:
            raise SystemExit(query.exception())
        time.sleep(0.1)
    query.stop()  # wherever it is
    print("reading the prices again", flush=True)

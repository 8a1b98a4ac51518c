"""Sales a second and product, each window once when it is over."""

import sys

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, count, from_json, sum, timestamp_millis, window

import semel

bootstrap = sys.argv[1]
spark = SparkSession.builder.appName("sales").getOrCreate()

orders = (
    spark.readStream.format("semel")
    .option("kafka.bootstrap.servers", bootstrap)
    .option("subscribe", "orders")
    .option("startingOffsets", "earliest")
    .load()
    .select(from_json(col("value").cast("string"), "product string, amount int, at long").alias("o"))
    .select("o.product", "o.amount", timestamp_millis(col("o.at")).alias("at"))
)
sales = (
    orders.withWatermark("at", "2 seconds")
    .groupBy(window("at", "1 second"), "product")
    .agg(count("*").alias("orders"), sum("amount").alias("amount"))
)

query = semel.write_stream(
    sales.selectExpr(
        "product AS key",
        "to_json(struct(unix_millis(window.start) AS start, product, orders, amount)) AS value",
    ),
    name="sales-per-second",
    bootstrap=bootstrap,
    topic="sales",
    checkpoint="checkpoints/sales",
    output_mode="append",
    trigger={"processingTime": "1 second"},
)
query.awaitTermination()

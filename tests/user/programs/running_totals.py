"""What each customer has bought so far: a new record for every change (update mode)."""

import sys

from pyspark.sql import SparkSession

import semel

bootstrap = sys.argv[1]
spark = SparkSession.builder.appName("totals").getOrCreate()

orders = (
    spark.readStream.format("semel")
    .option("kafka.bootstrap.servers", bootstrap)
    .option("subscribe", "orders")
    .option("startingOffsets", "earliest")
    .option("maxOffsetsPerTrigger", 2000)
    .load()
)
totals = (
    orders.selectExpr(
        "CAST(key AS STRING) AS customer",
        "CAST(get_json_object(CAST(value AS STRING), '$.amount') AS LONG) AS amount",
    )
    .groupBy("customer")
    .agg({"*": "count", "amount": "sum"})
)

query = semel.write_stream(
    totals.selectExpr("customer AS key", "concat_ws(',', customer, `count(1)`, `sum(amount)`) AS value"),
    name="totals",
    bootstrap=bootstrap,
    topic="totals",
    checkpoint="checkpoints/totals",
    output_mode="update",
)
query.awaitTermination()

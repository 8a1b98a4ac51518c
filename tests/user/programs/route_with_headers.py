"""Each order to the topic of its product, with its headers and one more."""

import sys

from pyspark.sql import SparkSession

import semel

bootstrap = sys.argv[1]
spark = SparkSession.builder.appName("route").getOrCreate()

orders = (
    spark.readStream.format("semel")
    .option("kafka.bootstrap.servers", bootstrap)
    .option("subscribe", "orders")
    .option("startingOffsets", "earliest")
    .option("includeHeaders", "true")
    .load()
)
routed = orders.selectExpr(
    "concat('orders-', get_json_object(CAST(value AS STRING), '$.product')) AS topic",
    "key",
    "value",
    "concat(headers, array(named_struct('key', 'routed-from', 'value', CAST(topic AS BINARY)))) AS headers",
)
query = semel.write_stream(routed, name="router", bootstrap=bootstrap, checkpoint="checkpoints/router")
query.awaitTermination()

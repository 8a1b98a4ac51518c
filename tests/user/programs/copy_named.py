"""Copy a topic under a name: python copy_named.py BOOTSTRAP NAME [RESUME]."""

import sys

from pyspark.sql import SparkSession

import semel

bootstrap, name, *resume = sys.argv[1:]
spark = SparkSession.builder.appName(name).getOrCreate()
orders = (
    spark.readStream.format("semel")
    .option("kafka.bootstrap.servers", bootstrap)
    .option("subscribe", "orders")
    .option("startingOffsets", "earliest")
    .load()
)
query = semel.write_stream(
    orders.select("key", "value"),
    name=name,
    bootstrap=bootstrap,
    topic="copied",
    checkpoint="checkpoint",
    **({"resume": resume[0]} if resume else {}),
)
query.awaitTermination()

"""Every night: what came since the last run, into one more folder. A run that died is simply run again."""

import json
import os
import sys

from pyspark.sql import SparkSession

bootstrap, run = sys.argv[1:]
spark = SparkSession.builder.appName("nightly").getOrCreate()

starting = "earliest"
if os.path.exists("position.json"):
    with open("position.json") as file:
        starting = file.read()

orders = (
    spark.read.format("semel")
    .option("kafka.bootstrap.servers", bootstrap)
    .option("subscribe", "orders")
    .option("startingOffsets", starting)
    .load()
)
folder = f"nights/run={run}"
orders.selectExpr("CAST(value AS STRING) AS value", "partition", "offset").write.mode("overwrite").parquet(folder)

# The files say how far we came. (Reading the topic's end again would be wrong: it has moved on meanwhile.)
ends = {} if starting == "earliest" else json.loads(starting)["orders"]
last = spark.read.parquet(folder).groupBy("partition").agg({"offset": "max"}).collect()
ends |= {str(row["partition"]): row["max(offset)"] + 1 for row in last}
with open("position.tmp", "w") as file:
    json.dump({"orders": ends}, file)
os.replace("position.tmp", "position.json")

"""Cells of a notebook: watch a topic in a table, stop, watch again."""

import json
import sys
import time

from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()

# %%
orders = (
    spark.readStream.format("semel")
    .option("kafka.bootstrap.servers", sys.argv[1])
    .option("subscribe", "orders")
    .load()
    .selectExpr("get_json_object(CAST(value AS STRING), '$.id') AS id")
)


def watch(name, rows):
    query = orders.writeStream.format("memory").queryName(name).start()
    while spark.table(name).count() < rows:
        if not query.isActive:
            raise SystemExit(query.exception())
        time.sleep(0.2)
    query.stop()
    return [int(row.id) for row in spark.table(name).collect()]


# %%
first = watch("first_look", 300)

# %%
# Once more, from now on.
print("watching again", flush=True)
second = watch("second_look", 300)

# %%
with open("seen.json", "w") as file:
    json.dump({"first": first, "second": second}, file)

"""A notebook in which somebody presses Shift+Enter once too often."""

import sys
import time

from pyspark.sql import SparkSession

import semel

bootstrap = sys.argv[1]
spark = SparkSession.builder.getOrCreate()

# %%
orders = (
    spark.readStream.format("semel")
    .option("kafka.bootstrap.servers", bootstrap)
    .option("subscribe", "orders")
    .option("startingOffsets", "earliest")
    .load()
)


def cell():
    return semel.write_stream(
        orders.select("key", "value"), name="notebook", bootstrap=bootstrap, topic="copied", checkpoint="notebook"
    )


def wait_for_rows(query):
    while not any(progress["numInputRows"] for progress in query.recentProgress):
        if not query.isActive:
            raise SystemExit(query.exception())
        time.sleep(0.2)


# %%
query = cell()
wait_for_rows(query)

# %%
try:
    cell()
    print("the cell ran twice", flush=True)
except Exception as error:
    print(f"the second time: {error}", flush=True)
batches = query.lastProgress["batchId"]
while query.lastProgress["batchId"] < batches + 2:  # the first one must go on
    if not query.isActive:
        raise SystemExit(query.exception())
    time.sleep(0.2)

# %%
# Stop it in order, and run the cell again.
query.stop()
query = cell()
wait_for_rows(query)
print("started again", flush=True)
query.awaitTermination()

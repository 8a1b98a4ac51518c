"""Scores from pandas: a pandas UDF and mapInPandas between two topics, in a notebook."""

import json
import sys
import time

import pandas as pd
from pyspark.sql import SparkSession
from pyspark.sql.functions import col, pandas_udf

import semel

bootstrap = sys.argv[1]
spark = SparkSession.builder.appName("scores").getOrCreate()


# %%
@pandas_udf("string")
def as_text(values: pd.Series) -> pd.Series:
    return values.str.decode("utf-8")


def score(frames):
    for frame in frames:
        orders = frame["value"].map(json.loads)
        frame["value"] = orders.map(lambda order: json.dumps({"id": order["id"], "score": order["amount"] ** 2}))
        yield frame[["key", "value"]]


# %%
orders = (
    spark.readStream.format("semel")
    .option("kafka.bootstrap.servers", bootstrap)
    .option("subscribe", "orders")
    .option("startingOffsets", "earliest")
    .load()
)
scored = orders.select("key", as_text(col("value")).alias("value")).mapInPandas(score, "key binary, value string")


def start():
    return semel.write_stream(scored, name="scores", bootstrap=bootstrap, topic="scores", checkpoint="scores")


# %%
query = start()
while query.lastProgress is None:
    time.sleep(0.2)

# %%
query.stop()

# %%
query = start()
print("started again", flush=True)
query.awaitTermination()

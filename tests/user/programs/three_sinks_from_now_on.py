"""Orders from now on, to Parquet, to the console and to a writer of our own. Spark's guide with one word changed."""

import os
import sys

from pyspark.sql import SparkSession

spark = SparkSession.builder.appName("from now on").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")

df = (
    spark.readStream.format("semel").option("kafka.bootstrap.servers", sys.argv[1]).option("subscribe", "orders").load()
)

# Parquet
(
    df.selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)", "partition", "offset")
    .writeStream.format("parquet")
    .option("path", "archive")
    .option("checkpointLocation", "checkpoints/archive")
    .start()
)

# the console
(
    df.selectExpr("get_json_object(CAST(value AS STRING), '$.id') AS id")
    .writeStream.format("console")
    .option("numRows", 1000000)
    .option("truncate", False)
    .option("checkpointLocation", "checkpoints/console")
    .start()
)


# every row by hand
class FileWriter:
    def open(self, partition_id, epoch_id):
        # The same partition and epoch mean the same rows: write that file again instead of a second one.
        self.name = f"rows/{epoch_id}-{partition_id}.txt"
        self.rows = []
        return True

    def process(self, row):
        self.rows.append(row.value)

    def close(self, error):
        if error is None:
            with open(f"{self.name}.part", "w") as file:
                file.writelines(f"{value}\n" for value in self.rows)
            os.replace(f"{self.name}.part", self.name)


os.makedirs("rows", exist_ok=True)
(
    df.selectExpr("CAST(value AS STRING) AS value")
    .writeStream.foreach(FileWriter())
    .option("checkpointLocation", "checkpoints/rows")
    .start()
)

spark.streams.awaitAnyTermination()

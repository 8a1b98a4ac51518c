"""Three archives in one application: everything; from given offsets; from a point in time."""

import json
import sys

from pyspark.sql import SparkSession

bootstrap, offsets, since_ms = sys.argv[1:]
spark = SparkSession.builder.appName("archives").getOrCreate()


def archive(name, **start):
    (
        spark.readStream.format("semel")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", "orders")
        .options(**start)
        .load()
        .selectExpr("CAST(value AS STRING) AS value")
        .writeStream.format("parquet")
        .option("path", name)
        .option("checkpointLocation", f"checkpoints/{name}")
        .queryName(name)
        .start()
    )


archive("everything", startingOffsets="earliest")
archive("from-offsets", startingOffsets=json.dumps({"orders": json.loads(offsets)}))
archive("since", startingTimestamp=since_ms)
spark.streams.awaitAnyTermination()

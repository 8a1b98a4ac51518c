"""Two queries in one application: orders that came twice are dropped; orders are matched with their payments."""

import sys

from pyspark.sql import SparkSession
from pyspark.sql.functions import expr

import semel

bootstrap = sys.argv[1]
spark = SparkSession.builder.appName("clean and match").getOrCreate()


def stream(topic):
    return (
        spark.readStream.format("semel")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
        .selectExpr("key", "value", "timestamp", "get_json_object(CAST(value AS STRING), '$.id') AS id")
    )


unique = stream("orders").withWatermark("timestamp", "5 minutes").dropDuplicatesWithinWatermark(["id"])
semel.write_stream(
    unique.select("key", "value"), name="unique", bootstrap=bootstrap, topic="unique", checkpoint="checkpoints/unique"
)

# Both streams have every record once here, whichever comes first.
sent = stream("parcels").selectExpr("id AS parcel_id", "timestamp AS sent").withWatermark("sent", "5 minutes")
paid = stream("payments").selectExpr("id AS payment_id", "timestamp AS paid").withWatermark("paid", "5 minutes")
matched = sent.join(
    paid, expr("parcel_id = payment_id AND paid BETWEEN sent - INTERVAL 2 MINUTES AND sent + INTERVAL 2 MINUTES")
)
semel.write_stream(
    matched.selectExpr("parcel_id AS key", "concat(parcel_id, '=', payment_id) AS value"),
    name="matched",
    bootstrap=bootstrap,
    topic="matched",
    checkpoint="checkpoints/matched",
)

spark.streams.awaitAnyTermination()

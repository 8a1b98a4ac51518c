"""The report of one day, from topic to topic: python daily_report.py BOOTSTRAP DAY. Run it as often as you like."""

import sys

from pyspark.sql import SparkSession

import semel

bootstrap, day = sys.argv[1:]
spark = SparkSession.builder.appName("report").getOrCreate()

orders = spark.read.format("semel").option("kafka.bootstrap.servers", bootstrap).option("subscribe", "orders").load()
report = (
    orders.selectExpr("CAST(key AS STRING) AS customer", "partition")
    .groupBy("customer")
    .count()
    .selectExpr("customer AS key", f"concat_ws(',', '{day}', customer, count) AS value")
)
done = semel.write_batch(report, name="daily-report", job_id=day, bootstrap=bootstrap, topic="reports")
print("was there already" if done.skipped else f"wrote {done.records} lines", flush=True)

# The same day's list of products is another job.
products = orders.selectExpr("get_json_object(CAST(value AS STRING), '$.product') AS value").distinct()
listed = semel.write_batch(products, name="daily-products", job_id=day, bootstrap=bootstrap, topic="products")
print("products were there already" if listed.skipped else f"wrote {listed.records} products", flush=True)

"""`python -m sales_job`: a job in a package, with a function of that package in a UDF, and every default."""

import os

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, udf

import semel
from sales_job.amounts import with_vat


def main():
    bootstrap = os.environ["BROKER"]
    spark = SparkSession.builder.appName("sales").getOrCreate()
    orders = (
        spark.readStream.format("semel")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", "orders")
        .load()
    )
    amounts = orders.select("key", udf(with_vat)(col("value").cast("string")).alias("value"))
    query = semel.write_stream(amounts, name="sales", bootstrap=bootstrap, topic="sales", checkpoint="checkpoint")
    query.awaitTermination()


if __name__ == "__main__":
    main()

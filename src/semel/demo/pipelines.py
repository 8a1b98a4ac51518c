"""The pipeline of the demo, as a data engineer would write it, with Semel's sinks and with the usual ones.

Everything above the sinks is shared: read orders, look up their products, write an invoice and a parcel of each, and
add up the revenue of each category in windows. It all goes to three topics, and the invoices into a table too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from semel.bridges.spark_sink import DatabaseSink
from semel.client.producer import Producer
from semel.demo.orders import INPUT, INVOICES, LATENESS_MS, PARCELS, PRODUCTS, REVENUE, TOPICS, WINDOW_MS
from semel.demo.pipeline_names import PLAIN, SEMEL, topic_of
from semel.demo.tables import Tables
from semel.spark.sink import KafkaSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_TRIGGER: Final = {"processingTime": "1 second"}
_BATCH_ORDERS: Final = 3_000
_FLUSH_ROWS: Final = 200
_INSERT_ROWS: Final = 500

Told = Callable[[str, int | None, int], None]
"""Called with the pipeline's name, a batch's number and its records when the batch is written."""


def make_records(spark: SparkSession, bootstrap: str, pipeline: str) -> DataFrame:
    """The pipeline itself: rows of topic, key and value."""
    from pyspark.sql import functions as f

    products = f.broadcast(spark.createDataFrame(list(PRODUCTS), "product string, category string, cents long"))
    source = spark.readStream.format("semel").option("kafka.bootstrap.servers", bootstrap)
    source = source.option("subscribe", INPUT).option("startingOffsets", "earliest")
    records = source.option("maxOffsetsPerTrigger", _BATCH_ORDERS).load()
    schema = "order long, product string, quantity long, at_ms long"
    orders = records.select(f.from_json(f.col("value").cast("string"), schema).alias("o")).select("o.*")
    enriched = orders.join(products, "product").withColumn("cents", f.col("cents") * f.col("quantity"))

    def record(topic: str, key: str, *columns: Any) -> Any:
        name = f.lit(topic_of(pipeline, topic)).alias("topic")
        return f.struct(name, f.col(key).cast("string").alias("key"), f.to_json(f.struct(*columns)).alias("value"))

    documents = enriched.select(
        f.explode(
            f.array(
                record(INVOICES, "order", "order", "product", "category", "cents"),
                record(PARCELS, "order", "order", "product", "quantity"),
            )
        ).alias("record")
    ).select("record.*")
    windows = (
        enriched.withColumn("at", f.timestamp_millis("at_ms"))
        .withWatermark("at", f"{LATENESS_MS} milliseconds")
        .groupBy(f.window("at", f"{WINDOW_MS} milliseconds"), "category")
        .agg(f.count("*").alias("orders"), f.sum("cents").alias("cents"))
        .withColumn("start", f.unix_millis("window.start"))
    )
    revenue = windows.select(
        record(REVENUE, "category", f.col("start").alias("window"), "category", "orders", "cents").alias("record")
    ).select("record.*")
    return documents.union(revenue)


def sales_of(df: DataFrame, pipeline: str) -> DataFrame:
    """Of a micro-batch, the rows for the table: its invoices."""
    from pyspark.sql import functions as f

    schema = "order long, product string, category string, cents long"
    invoices = df.where(df["topic"] == topic_of(pipeline, INVOICES))
    sales = invoices.select(f.from_json("value", schema).alias("sale")).select("sale.*")
    return sales.withColumnRenamed("order", "order_number")


def start_semel(spark: SparkSession, tables: Tables, bootstrap: str, checkpoint: str, tell: Told) -> StreamingQuery:
    """Exactly once: each micro-batch is one transaction of the database, and one of Kafka over all three topics."""
    table = DatabaseSink(name="semel-shop-table", to=tables.target(SEMEL))
    topics = KafkaSink(
        name="semel-shop",
        bootstrap=bootstrap,
        on_progress=lambda batch: tell(SEMEL, batch.batch_id, batch.records),
    )

    def write(df: DataFrame, batch_id: int) -> None:
        table(sales_of(df, SEMEL), batch_id)
        topics(df, batch_id)

    return _start(make_records(spark, bootstrap, SEMEL), write, "semel-shop", checkpoint)


def start_plain(spark: SparkSession, tables: Tables, bootstrap: str, checkpoint: str, tell: Told) -> StreamingQuery:
    """At least once, with the usual recipe: `foreachBatch`, and in it the table and then one topic after another.

    Its producer is idempotent and waits for all acknowledgements, so what it repeats is not the network's doing.
    """
    statement = tables.insert_into(PLAIN)

    def insert(rows: Iterable[Any]) -> None:
        with closing(tables.connect(PLAIN)) as connection:
            rows = iter(rows)
            while chunk := list(islice(rows, _INSERT_ROWS)):
                connection.cursor().executemany(statement, [tuple(row) for row in chunk])
                connection.commit()

    def produce(rows: Iterable[Any]) -> None:
        with Producer({"bootstrap.servers": bootstrap}) as producer:
            for count, row in enumerate(rows, 1):
                producer.send(row.topic, row.value.encode(), key=row.key.encode())
                if count % _FLUSH_ROWS == 0:
                    producer.flush()

    def write(df: DataFrame, batch_id: int) -> None:
        sales_of(df, PLAIN).foreachPartition(insert)
        for topic in TOPICS:
            df.where(df["topic"] == topic_of(PLAIN, topic)).foreachPartition(produce)
        tell(PLAIN, batch_id, df.count())

    return _start(make_records(spark, bootstrap, PLAIN), write, "plain-shop", checkpoint)


def _start(records: DataFrame, write: Callable[[DataFrame, int], None], name: str, checkpoint: str) -> StreamingQuery:
    def each(df: DataFrame, batch_id: int) -> None:
        df.persist()  # it is written in several steps, and computed once
        try:
            write(df, batch_id)
        finally:
            df.unpersist()

    writer = records.writeStream.foreachBatch(each).queryName(name).option("checkpointLocation", checkpoint)
    return writer.trigger(**_TRIGGER).start()


START: Final[dict[str, Callable[[SparkSession, Tables, str, str, Told], StreamingQuery]]] = {
    PLAIN: start_plain,
    SEMEL: start_semel,
}

"""The pipeline of the demo, as a data engineer would write it, and its two sinks: Semel's, and the usual one.

Everything above the sinks is shared: read orders, look up their products, write an invoice and a parcel of each, and
add up the revenue of each category in windows. It all goes to three topics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from semel.client.producer import Producer
from semel.demo.orders import INPUT, INVOICES, LATENESS_MS, PARCELS, PRODUCTS, REVENUE, TOPICS, WINDOW_MS
from semel.spark.stream import write_stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

PLAIN: Final = "plain"
SEMEL: Final = "semel"
PIPELINES: Final = (PLAIN, SEMEL)
_TRIGGER: Final = {"processingTime": "1 second"}
_BATCH_ORDERS: Final = 3_000
_FLUSH_ROWS: Final = 200

Told = Callable[[str, int, int], None]
"""Called with the pipeline's name, a batch's number and its records when the batch is written."""


def topic_of(pipeline: str, topic: str) -> str:
    """
    >>> topic_of("semel", "invoices")
    'semel-invoices'
    """
    return f"{pipeline}-{topic}"


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


def start_semel(spark: SparkSession, bootstrap: str, checkpoint: str, tell: Told) -> StreamingQuery:
    """Exactly once: each micro-batch is one transaction over all three topics."""
    return write_stream(
        make_records(spark, bootstrap, SEMEL),
        name="semel-shop",
        bootstrap=bootstrap,
        checkpoint=checkpoint,
        trigger=_TRIGGER,
        on_progress=lambda batch: tell(SEMEL, batch.batch_id, batch.records),
    )


def start_plain(spark: SparkSession, bootstrap: str, checkpoint: str, tell: Told) -> StreamingQuery:
    """At least once, with the usual recipe: `foreachBatch`, and in it one topic after another.

    Its producer is idempotent and waits for all acknowledgements, so what it repeats is not the network's doing.
    """

    def produce(rows: Iterable[Any]) -> None:
        with Producer({"bootstrap.servers": bootstrap}) as producer:
            for count, row in enumerate(rows, 1):
                producer.send(row.topic, row.value.encode(), key=row.key.encode())
                if count % _FLUSH_ROWS == 0:
                    producer.flush()

    def write(df: DataFrame, batch_id: int) -> None:
        df.persist()
        for topic in TOPICS:
            df.where(df["topic"] == topic_of(PLAIN, topic)).foreachPartition(produce)
        tell(PLAIN, batch_id, df.count())
        df.unpersist()

    records = make_records(spark, bootstrap, PLAIN)
    writer = records.writeStream.foreachBatch(write).queryName("plain-shop").option("checkpointLocation", checkpoint)
    return writer.trigger(**_TRIGGER).start()


START: Final[dict[str, Callable[[SparkSession, str, str, Told], StreamingQuery]]] = {
    PLAIN: start_plain,
    SEMEL: start_semel,
}

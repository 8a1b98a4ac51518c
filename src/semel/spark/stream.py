"""`write_stream`: a streaming DataFrame to Kafka or a database, exactly once, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from semel.errors import ConfigError
from semel.spark.columns import record_columns
from semel.spark.rows import PlannedRows, can_encode_in_plan, encode_in_plan
from semel.spark.sink import KafkaSink
from semel.spark.target import Target, check_one_target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

OBSERVED: Final = "semel"
"""The name of Semel's figures among the observed metrics of Spark's own progress."""

_UNFIT_TRIGGERS: Final = {
    "realTime": "Real-Time Mode shows records before their batch is over, which no transaction can",
    "continuous": "continuous processing has no micro-batches that a transaction could hold",
}


def write_stream(
    df: DataFrame,
    *,
    name: str,
    checkpoint: str,
    to: Target | None = None,
    bootstrap: str | None = None,
    topic: str | None = None,
    trigger: Mapping[str, Any] | None = None,
    output_mode: str | None = None,
    **sink_options: Any,
) -> StreamingQuery:
    """Start a query that writes `df` exactly once, and return it: to Kafka, or to the target `to`.

    `trigger` has the names of `DataStreamWriter.trigger`, such as `{"availableNow": True}`; `output_mode` is one of
    "append", "update" and "complete". Everything else is as in `KafkaSink`. Mistakes are found before the query starts
    where they can be: the topic must be there, and this user allowed to write to it.

    >>> write_stream(df, name="orders-enriched", bootstrap="127.0.0.1:9092", topic="out",
    ...              checkpoint="/data/checkpoints/orders-enriched")  # doctest: +SKIP
    >>> write_stream(df, name="orders", to=semel.Postgres(url, table="orders", mode="upsert", key=["id"]),
    ...              checkpoint="/data/checkpoints/orders")  # doctest: +SKIP
    """
    check_one_target(to, bootstrap, topic)
    check_stream(df, trigger)
    if to is not None:
        return to.write_stream(
            df, name=name, checkpoint=checkpoint, trigger=trigger, output_mode=output_mode, **sink_options
        )
    assert bootstrap is not None, "check_one_target has seen to that"
    record_columns(df.schema, topic)
    sink = KafkaSink(name=name, bootstrap=bootstrap, topic=topic, checkpoint=checkpoint, **sink_options)
    if hasattr(df.sparkSession, "_jsparkSession"):
        sink.check()  # through Spark Connect the sink lives elsewhere, and this process may not reach the brokers
    return start_query(_into(sink, df), name, checkpoint, trigger, output_mode)


def check_stream(df: DataFrame, trigger: Mapping[str, Any] | None) -> None:
    """Refuse what no target can write exactly once."""
    if not df.isStreaming:
        raise ConfigError("This DataFrame does not stream; nothing was written. Use semel.write_batch for it.")
    if trigger is not None and not isinstance(trigger, Mapping):
        raise ConfigError(
            f"trigger={trigger!r} is not understood; nothing was written. Pass the arguments of Spark's trigger(), "
            'such as trigger={"processingTime": "10 seconds"} or trigger={"availableNow": True}.'
        )
    for word, reason in _UNFIT_TRIGGERS.items():
        if trigger is not None and trigger.get(word) is not None:
            raise ConfigError(f"trigger {word} cannot be exactly-once: {reason}. Use processingTime or availableNow.")


def start_query(
    writer: DataStreamWriter, name: str, checkpoint: str, trigger: Mapping[str, Any] | None, output_mode: str | None
) -> StreamingQuery:
    writer = writer.queryName(name).option("checkpointLocation", checkpoint)
    if output_mode is not None:
        writer = writer.outputMode(output_mode)
    if trigger is not None:
        writer = writer.trigger(**trigger)
    return writer.start()


def _into(sink: KafkaSink, df: DataFrame) -> DataStreamWriter:
    """The query, such that Spark's own progress shows what comes to the sink.

    Spark adds up row by row. Blobs are few; where there are rows, to look at their lengths would cost a tenth of all.
    """
    from pyspark.sql import functions

    if not can_encode_in_plan(df):
        return count_rows(df).writeStream.foreachBatch(sink)
    blobs = encode_in_plan(df, sink.options.settings, sink.options.topic)
    names = ("records", "bytes", "dead_letters")
    figures = [functions.coalesce(functions.sum(name), functions.lit(0)).alias(name) for name in names]
    return blobs.observe(OBSERVED, *figures).writeStream.foreachBatch(
        lambda df, batch_id: sink.write_rows(PlannedRows(df), batch_id)
    )


def count_rows(df: DataFrame) -> DataFrame:
    """The same rows; Spark's own progress shows how many came."""
    from pyspark.sql import functions

    return df.observe(OBSERVED, functions.count(functions.lit(1)).alias("records"))

"""Where the rows of a micro-batch or job are encoded: in a job of the sink's own, or in the plan of the user's query.

In the query's plan Spark passes each row on once less, and its progress can count blobs, of which there are few. But a
plan is made before there is any micro-batch: what holds for one comes with its tasks, as a property of their job.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from semel.errors import SemelError
from semel.spark.blobs import BLOB_DDL, Slots
from semel.spark.columns import record_columns
from semel.spark.dead_letters import DeadLetterTerms
from semel.spark.encode import Encode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_PROPERTY: Final = "semel.encode"
_NOTHING: Final = "nothing"


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Rows as the user has them."""

    df: DataFrame

    @contextmanager
    def encoded(self, encode: Encode) -> Iterator[DataFrame]:
        """The blobs, for as long as Spark may have to compute them anew."""
        yield _selected(self.df, encode.topic).mapInArrow(encode, BLOB_DDL)

    def compute(self) -> None:
        """Let Spark go through the rows, of which nothing is wanted."""
        _compute(self.df)


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """A micro-batch of a query that encodes in its own plan (`encode_in_plan`): blobs, as far as Spark knows."""

    df: DataFrame

    @contextmanager
    def encoded(self, encode: Encode) -> Iterator[DataFrame]:
        """As in `PlainRows`."""
        with _property(self.df, _to_property(encode)):
            yield self.df

    def compute(self) -> None:
        """As in `PlainRows`."""
        with _property(self.df, _NOTHING):
            _compute(self.df)


Rows = PlainRows | PlannedRows


@dataclass(frozen=True, slots=True)
class EncodeInPlan:
    """The function for `mapInArrow` in the plan of a query: rows in, blobs out, as its micro-batch wants them."""

    settings: Mapping[str, object] = field(repr=False)
    topic: str | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "mapInArrow runs its function inside a task"
        wanted = context.getLocalProperty(_PROPERTY)
        if wanted is None:
            raise SemelError("This query's rows were asked for by another than its sink; nothing was written.")
        if wanted == _NOTHING:
            for _ in batches:
                continue
            return
        yield from self._encode(wanted)(batches)

    def _encode(self, wanted: str) -> Encode:
        terms = json.loads(wanted)
        terms["slots"] = Slots(tuple(terms["slots"]))
        terms["dead_letters"] = DeadLetterTerms.from_json(terms["dead_letters"])
        return Encode(self.settings, self.topic, **terms)


def encode_in_plan(df: DataFrame, settings: Mapping[str, object], topic: str | None) -> DataFrame:
    """Blobs of a streaming DataFrame, for `PlannedRows`."""
    return _selected(df, topic).mapInArrow(EncodeInPlan(settings, topic), BLOB_DDL)


def can_encode_in_plan(df: DataFrame) -> bool:
    """Whether what Python sets for a job reaches its tasks: not through Spark Connect, and only if each thread of
    Python has one in Java."""
    if not hasattr(df.sparkSession, "_jsparkSession"):
        return False
    from py4j.clientserver import ClientServer

    gateway: Any = df.sparkSession.sparkContext._gateway  # pyright: ignore[reportPrivateUsage]
    return isinstance(gateway, ClientServer)


def _to_property(encode: Encode) -> str:
    """Without settings and topic, which are in the plan: Spark shows the properties of its jobs."""
    return json.dumps(
        {
            "partition_counts": encode.partition_counts,
            "slots": encode.slots.values,
            "now_ms": encode.now_ms,
            "seed": encode.seed,
            "spool": encode.spool,
            "dead_letters": None if encode.dead_letters is None else asdict(encode.dead_letters),
        }
    )


@contextmanager
def _property(df: DataFrame, value: str) -> Iterator[None]:
    context = df.sparkSession.sparkContext
    context.setLocalProperty(_PROPERTY, value)
    try:
        yield
    finally:
        context.setLocalProperty(_PROPERTY, None)  # pyright: ignore[reportArgumentType]


def _selected(df: DataFrame, topic: str | None) -> Any:
    wanted = record_columns(df.schema, topic)
    # To let Spark plan a selection of everything took 5 ms of each micro-batch.
    return df if df.columns == wanted else df.select(*wanted)


def _compute(df: DataFrame) -> None:
    df.write.format("noop").mode("overwrite").save()

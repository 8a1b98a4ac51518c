"""The sink for streaming queries: a callable for `foreachBatch` that writes each micro-batch exactly once."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.dead_letters import DEAD_LETTER_MAX
from semel.client.settings import parse_config
from semel.errors import ConfigError, InvalidState, NotAuthorized
from semel.spark.calls import Calls
from semel.spark.columns import record_columns
from semel.spark.failpoints import reach
from semel.spark.input_offsets import Input, read_input, running_query
from semel.spark.ledger import Entry
from semel.spark.once import OneWrite
from semel.spark.options import DEFAULT_LEDGER, Resume, SinkOptions, make_options
from semel.spark.outputs import Output, combine, name_output, named_topics
from semel.spark.owner import PipelineOwner
from semel.spark.pipeline import KafkaPipeline
from semel.spark.progress import BatchProgress, report_times
from semel.spark.replays import Question
from semel.spark.rows import PlainRows, Rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_REMEMBERED: Final = 100
_STATEFUL: Final = re.compile(
    r"StateStore|GroupsWithState|TransformWithState|Streaming(?:SymmetricHashJoin|Dedup|Global)"
)
"""Steps of a plan that keep state in the checkpoint."""
_MAX_TIMEOUT: Final = "transaction.max.timeout.ms"


class KafkaSink:
    """Writes each micro-batch in one Kafka transaction, with the query's input offsets inside it.

    >>> sink = KafkaSink(name="orders-enriched", bootstrap="127.0.0.1:9092", topic="out")
    >>> df.writeStream.foreachBatch(sink).option("checkpointLocation", path).start()  # doctest: +SKIP

    Several outputs of one batch go into one transaction by `batch`. One sink serves one query.

    `name` belongs to one running query: when a second one of that name writes its first batch, the first one stops.
    Rows have a column `value` and, if wanted, `key`, `headers`, `partition`, and `topic` unless it is given here.
    `group` (by default the name) is the consumer group under which lag can be seen; None commits no offsets. `resume`
    says how to go on where the ledger does not know the checkpoint: "committed" after the last committed batch (start
    the source at `committed_offsets`), "checkpoint" as the checkpoint says. More settings have Kafka's names, in a
    mapping or as keywords with underscores, such as `compression_type="zstd"`. Rows that cannot be written
    are an error, or go to the topic `dead_letter`, up to `dead_letter_max` of a micro-batch. Through Spark Connect pass
    `checkpoint` too.
    """

    def __init__(
        self,
        *,
        name: str,
        bootstrap: str,
        topic: str | None = None,
        checkpoint: str | None = None,
        group: str | EllipsisType | None = ...,
        ledger: str = DEFAULT_LEDGER,
        writers: int | None = None,
        attempts: int = 3,
        dead_letter: str | None = None,
        dead_letter_max: int = DEAD_LETTER_MAX,
        resume: Resume | None = None,
        on_progress: Callable[[BatchProgress], None] | None = None,
        settings: Mapping[str, object] | None = None,
        **more_settings: object,
    ) -> None:
        self.options = make_options(
            name=name,
            bootstrap=bootstrap,
            topic=topic,
            settings=settings,
            more_settings=more_settings,
            group=group,
            ledger=ledger,
            writers=writers,
            attempts=attempts,
            dead_letter=dead_letter,
            dead_letter_max=dead_letter_max,
            checkpoint=checkpoint,
            resume=resume,
        )
        self._on_progress = on_progress
        self._start_over()

    def _start_over(self) -> None:
        self.recent: deque[BatchProgress] = deque(maxlen=_REMEMBERED)
        """The last hundred micro-batches that this object has seen."""
        self._calls = Calls(self.options.name, "KafkaSink", self.options.settings["bootstrap.servers"])
        self._pipeline = KafkaPipeline(self.options)

    def __getstate__(self) -> dict[str, Any]:
        # Spark Connect runs it in another process: only what the user has said goes there.
        return {"options": self.options, "_on_progress": self._on_progress}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_over()

    def __repr__(self) -> str:
        return f"KafkaSink(name={self.options.name!r}, topic={self.options.topic!r})"

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """Write a micro-batch, unless it has been committed before."""
        with self.batch(batch_id) as batch:
            batch.write(df)

    def batch(self, batch_id: int) -> Batch:
        """Several outputs of one micro-batch in one transaction, which is written at the end of the block.

        >>> def each(df, batch_id):
        ...     with sink.batch(batch_id) as batch:
        ...         batch.write(df.where("id % 2 = 0"), topic="even")
        ...         batch.write(df.where("id % 2 = 1"), topic="odd")
        """
        return Batch(self, batch_id)

    def check(self) -> None:
        """Find mistakes that can be found before the first batch. Stops no other run of the pipeline."""
        with Cluster(parse_config(self.options.settings).client) as cluster:
            self._pipeline.check_topics(cluster)
            _check_timeout(cluster, self.options.producer_config.transaction_timeout_ms)

    def close(self) -> None:
        """Close the connections. An open transaction is ended by the next run, or by its timeout."""
        self._pipeline.close()

    # -- one batch -------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Begin a batch; `write_outputs` and `release` must follow in the same thread."""
        self._calls.claim()

    def release(self) -> None:
        self._calls.release()

    def write_rows(self, rows: Rows, batch_id: int) -> None:
        """Write a micro-batch with one output, wherever its rows are encoded."""
        self.claim()
        try:
            self.write_outputs([Output(name_output(self.options.topic, []), rows, self.options.topic)], batch_id)
        finally:
            self.release()

    def write_outputs(self, outputs: Sequence[Output], batch_id: int) -> None:
        """Write those outputs of a micro-batch that have not been committed before."""
        df = outputs[0].rows.df
        batch_input = read_input(df, batch_id, self.options.checkpoint)
        self._calls.check(batch_input, batch_id)
        asked = Question(
            self.options.name, batch_id, batch_input, self.options.resume, is_stateful=lambda: is_stateful(df)
        )
        progress = self._pipeline.write(asked, PlannedOutputs(self.options, outputs, asked.input, self._row_bytes()))
        self._calls.finish(batch_input, batch_id)
        self.recent.append(progress)
        report_times(df, progress)
        if self._on_progress is not None:
            self._on_progress(progress)
        reach("before_return", self.options.name)

    def _row_bytes(self) -> float | None:
        last = next((done for done in reversed(self.recent) if done.records and not done.skipped), None)
        return None if last is None else last.input_bytes / last.records


@dataclass(frozen=True, slots=True)
class PlannedOutputs:
    """Outputs whose rows Spark has not computed yet."""

    options: SinkOptions
    outputs: Sequence[Output]
    batch_input: Input
    row_bytes: float | None

    @property
    def names(self) -> Sequence[str]:
        return [output.name for output in self.outputs]

    def pass_over(self, names: Collection[str]) -> None:
        """State stores and the watermark must move on as they would have."""
        for output in self.outputs:
            if output.name in names:
                output.rows.compute()

    def transaction(
        self, names: Collection[str], owner: PipelineOwner, entry: Entry, progress: BatchProgress
    ) -> OneWrite:
        chosen = [output for output in self.outputs if output.name in names]
        rows, topic = combine(chosen)
        return OneWrite(
            self.options, owner, entry, progress, rows, topic, named_topics(chosen), self.batch_input, self.row_bytes
        )


class Batch:
    """The outputs of one micro-batch; `KafkaSink.batch` makes it."""

    def __init__(self, sink: KafkaSink, batch_id: int) -> None:
        self._sink = sink
        self._batch_id = batch_id
        self._outputs: list[Output] | None = None

    def __enter__(self) -> Self:
        if self._outputs is not None:
            raise InvalidState("This batch was used before: call sink.batch(batch_id) for each micro-batch.")
        self._sink.claim()
        self._outputs = []
        return self

    def write(self, df: DataFrame, *, topic: str | None = None) -> None:
        """Add an output. `topic` wins over the sink's, and that over the column `topic`."""
        if self._outputs is None:
            raise InvalidState("A batch is written inside of its block: `with sink.batch(batch_id) as batch: ...`.")
        chosen = self._sink.options.topic if topic is None else topic
        record_columns(df.schema, chosen)
        self._outputs.append(Output(name_output(chosen, self._outputs), PlainRows(df), chosen))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outputs, self._outputs = self._outputs, None
        try:
            if error is None and outputs:
                self._sink.write_outputs(outputs, self._batch_id)
        finally:
            self._sink.release()


def is_stateful(df: DataFrame) -> bool:
    """Whether the running query keeps state, as far as Spark tells: not through Spark Connect."""
    spark: Any = df.sparkSession
    query = running_query(spark) if hasattr(spark, "_jsparkSession") else None
    return query is not None and _STATEFUL.search(query.lastExecution().executedPlan().treeString()) is not None


def _check_timeout(cluster: Cluster, timeout_ms: int) -> None:
    """A broker refuses a longer transaction.timeout.ms than its own, when the first transaction is about to begin."""
    try:
        node = next(iter(cluster.nodes()))
        found = Admin(cluster).describe_configs("broker", str(node), [_MAX_TIMEOUT]).get(_MAX_TIMEOUT)
    except NotAuthorized:
        return  # then the first batch finds out
    if found is not None and found.value and timeout_ms > int(found.value):
        raise ConfigError(
            f"transaction.timeout.ms={timeout_ms} is above the broker's {_MAX_TIMEOUT}={found.value}; nothing was "
            "written. Lower it, or raise the broker's."
        )

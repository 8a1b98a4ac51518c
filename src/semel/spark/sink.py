"""The sink for streaming queries: a callable for `foreachBatch` that writes each micro-batch exactly once."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.dead_letters import DEAD_LETTER_MAX
from semel.client.settings import parse_config
from semel.errors import ConfigError, InvalidState, KafkaError, NotAuthorized
from semel.metrics.parts import SINK
from semel.observe import Pipeline
from semel.spark.calls import Calls
from semel.spark.checkpoint import Home, read_home
from semel.spark.columns import record_columns
from semel.spark.dead_letters import check_dead_letter_topic
from semel.spark.failpoints import reach
from semel.spark.input_offsets import read_input, running_query
from semel.spark.ledger import Entry, Ledger, query_key
from semel.spark.once import OneWrite
from semel.spark.options import DEFAULT_LEDGER, Resume, make_options
from semel.spark.outputs import Output, check_same_kind, combine, name_output, named_topics
from semel.spark.owner import PipelineOwner, check_writable, fenced
from semel.spark.progress import BatchProgress, report_skipped, report_times
from semel.spark.replays import Question, Written, decide
from semel.spark.rows import PlainRows, Rows
from semel.wire import ErrorCode

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
        self._owner: PipelineOwner | None = None

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
            self._check_topics(cluster)
            _check_timeout(cluster, self.options.producer_config.transaction_timeout_ms)

    def _check_topics(self, cluster: Cluster) -> None:
        if self.options.topic is not None:
            check_writable(cluster, self.options.topic)
        if self.options.dead_letter is not None:
            check_dead_letter_topic(self.options, cluster, self.options.topic)

    def close(self) -> None:
        """Close the connections. An open transaction is ended by the next run, or by its timeout."""
        if self._owner is not None:
            self._owner.close()
            self._owner = None

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
        try:
            try:
                progress = self._write_or_skip(asked, outputs)
            except KafkaError as error:
                if error.code != ErrorCode.invalid_producer_id_mapping:
                    raise
                self._own_again(asked)
                progress = self._write_or_skip(asked, outputs)
        except BaseException as error:
            Pipeline(SINK, self.options.name).failed(error)
            self.close()  # the next call owns the pipeline again, and reads the ledger
            raise
        self._calls.finish(batch_input, batch_id)
        self.recent.append(progress)
        report_times(df, progress)
        if self._on_progress is not None:
            self._on_progress(progress)
        reach("before_return", self.options.name)

    def _write_or_skip(self, asked: Question, outputs: Sequence[Output]) -> BatchProgress:
        owner = self._owner or self.take_over(asked)
        mine = owner.committed_of(asked.input.query)
        written = decide(replace(asked, is_home=True), mine, owner.committed)
        for output in outputs:
            if written.has(output.name):
                # It is there, yet state stores and the watermark must move on as they would have.
                output.rows.compute()
        missing = [output for output in outputs if not written.has(output.name)]
        if not missing:
            progress = BatchProgress(self.options.name, asked.batch, skipped=True)
            report_skipped(progress)
            return progress
        if self.options.resume != "checkpoint":
            check_same_kind(self.options.name, written.outputs, missing)
        return self._write(owner, asked, missing, written, mine)

    def take_over(self, asked: Question) -> PipelineOwner:
        """Own the pipeline: every older run of it is fenced from here on. A run that may not go on fences nobody."""
        options = self.options
        with Cluster(parse_config(options.settings).client) as cluster:
            self._check_topics(cluster)
            ledger = Ledger(cluster, options.ledger)
            ledger.ensure()
            latest = ledger.read(options.name, is_owner=False)
            mine = ledger.read(query_key(asked.input.query), is_owner=False)
            if mine is None and latest is not None and latest.query == asked.input.query:
                mine = latest  # from a release that had one record for each pipeline
            here = Home.of(cluster, options.ledger)
        here = replace(here, pipeline=options.name)
        noted = read_home(asked.input.files, asked.input.checkpoint)
        is_home = None if noted is None else noted.is_same(here)
        decide(replace(asked, is_home=is_home), mine, latest)
        names = {"" if noted is None else noted.pipeline, "" if mine is None else mine.pipeline}
        owner = PipelineOwner(options, options.name, others=names - {"", options.name})
        if noted != here:
            # Only now that a run under the earlier name is fenced: until its first commit, the note alone knows it.
            try:
                here.write(asked.input.files, asked.input.checkpoint)
            except BaseException:
                owner.close()
                raise
        self._owner = owner
        return owner

    def _own_again(self, asked: Question) -> None:
        """The coordinator forgets an id after a week of silence: go on, if nobody else has committed anything since."""
        before = None if self._owner is None else self._owner.committed
        self.close()
        if _batch_of(self.take_over(asked).committed) != _batch_of(before):
            raise fenced(self.options.name)

    def _write(
        self, owner: PipelineOwner, asked: Question, outputs: Sequence[Output], written: Written, mine: Entry | None
    ) -> BatchProgress:
        entry = Entry(
            query=asked.input.query,
            batch=asked.batch,
            offsets=asked.input.digest,
            outputs=sorted(written.outputs | {output.name for output in outputs}),
            ends=[replace(end, start=None) for end in asked.input.ends],
            pipeline=self.options.name,
            records=mine.records if mine is not None and written.outputs else 0,
        )
        rows, topic = combine(outputs)
        progress = BatchProgress(self.options.name, asked.batch)
        return OneWrite(
            self.options, owner, rows, topic, named_topics(outputs), entry, progress, asked.input, self._row_bytes()
        ).run()

    def _row_bytes(self) -> float | None:
        last = next((done for done in reversed(self.recent) if done.records and not done.skipped), None)
        return None if last is None else last.input_bytes / last.records


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


def _batch_of(entry: Entry | None) -> tuple[str, int] | None:
    return None if entry is None else (entry.query, entry.batch)


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

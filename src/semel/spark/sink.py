"""The sink for streaming queries: a callable for `foreachBatch` that writes each micro-batch exactly once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from semel.errors import ConfigError, KafkaError
from semel.spark.columns import record_columns
from semel.spark.failpoints import reach
from semel.spark.input_offsets import Input, read_input
from semel.spark.ledger import Entry
from semel.spark.once import OneWrite
from semel.spark.options import DEFAULT_LEDGER, make_options
from semel.spark.owner import PipelineOwner, fenced
from semel.spark.progress import BatchProgress, log_progress, report_times
from semel.spark.rows import PlainRows, Rows
from semel.wire import ErrorCode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_REMEMBERED: Final = 100


class KafkaSink:
    """Writes each micro-batch in one Kafka transaction, with the query's input offsets inside it.

    >>> sink = KafkaSink(name="orders-enriched", bootstrap="127.0.0.1:9092", topic="out")
    >>> df.writeStream.foreachBatch(sink).option("checkpointLocation", path).start()  # doctest: +SKIP

    `name` belongs to one running query: whoever starts a second one of that name stops the first. Rows have a column
    `value` and, if wanted, `key`, `headers`, `partition`, and `topic` unless it is given here. `group` (by default the
    name) is the consumer group under which lag can be seen. More settings have Kafka's names, in a mapping or as
    keywords with underscores, such as `compression_type="zstd"`. Through Spark Connect pass `checkpoint` too.
    """

    def __init__(
        self,
        *,
        name: str,
        bootstrap: str,
        topic: str | None = None,
        checkpoint: str | None = None,
        group: str | None = None,
        ledger: str = DEFAULT_LEDGER,
        writers: int | None = None,
        attempts: int = 3,
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
            checkpoint=checkpoint,
        )
        self.recent: deque[BatchProgress] = deque(maxlen=_REMEMBERED)
        """The last hundred micro-batches that this object has seen."""
        self._on_progress = on_progress
        self._owner: PipelineOwner | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Spark Connect runs it in another process: what is connected stays behind.
        return {**self.__dict__, "_owner": None, "recent": deque(maxlen=_REMEMBERED)}

    def __repr__(self) -> str:
        return f"KafkaSink(name={self.options.name!r}, topic={self.options.topic!r})"

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """Write a micro-batch, unless it has been committed before."""
        record_columns(df.schema, self.options.topic)
        self.write_rows(PlainRows(df), batch_id)

    def write_rows(self, rows: Rows, batch_id: int) -> None:
        """The same, wherever its rows are encoded."""
        batch_input = read_input(rows.df, batch_id, self.options.checkpoint)
        try:
            try:
                progress = self._write_or_skip(rows, batch_id, batch_input)
            except KafkaError as error:
                if error.code != ErrorCode.invalid_producer_id_mapping:
                    raise
                self._own_anew()
                progress = self._write_or_skip(rows, batch_id, batch_input)
        except BaseException:
            self.close()  # whoever calls again owns the pipeline anew, and reads the ledger
            raise
        self.recent.append(progress)
        report_times(rows.df, progress)
        if self._on_progress is not None:
            self._on_progress(progress)
        reach("before_return", self.options.name)

    def open(self) -> PipelineOwner:
        """Take the pipeline over, if that has not been done: from here on every older run of it is fenced."""
        if self._owner is None:
            self._owner = PipelineOwner(self.options, self.options.name)
            if self.options.topic is not None:
                self._owner.check_writable(self.options.topic)
        return self._owner

    def close(self) -> None:
        """Close the connections. An open transaction is ended by the next run, or by its time-out."""
        if self._owner is not None:
            self._owner.close()
            self._owner = None

    def _own_anew(self) -> None:
        """The coordinator forgets an id after a week of silence: go on, if nobody else has committed anything since."""
        before = None if self._owner is None else self._owner.committed
        self.close()
        if _batch_of(self.open().committed) != _batch_of(before):
            raise fenced(self.options.name)

    def _write_or_skip(self, rows: Rows, batch_id: int, batch_input: Input) -> BatchProgress:
        owner = self.open()
        if self._is_committed(owner.committed, batch_input, batch_id):
            return self._skip(rows, batch_id)
        return self._write(owner, rows, batch_id, batch_input)

    def _is_committed(self, last: Entry | None, batch_input: Input, batch_id: int) -> bool:
        if last is None or last.query != batch_input.query or batch_id > last.batch:
            return False
        if batch_id == last.batch and last.offsets == batch_input.digest:
            return True
        raise ConfigError(
            f"Pipeline {self.options.name!r} has committed batch {last.batch}, and Spark now asks for batch {batch_id} "
            "with other input: the checkpoint is older than the output, as after a restore from a copy. Nothing was "
            "written, for some of it would be repeated. Restore the newer checkpoint, or begin with an empty one at "
            "the group's committed offsets."
        )

    def _skip(self, rows: Rows, batch_id: int) -> BatchProgress:
        # The output is there, yet state stores and the watermark must move on as they would have.
        rows.compute()
        progress = BatchProgress(self.options.name, batch_id, skipped=True)
        log_progress(progress)
        return progress

    def _write(self, owner: PipelineOwner, rows: Rows, batch_id: int, batch_input: Input) -> BatchProgress:
        entry = Entry(query=batch_input.query, batch=batch_id, offsets=batch_input.digest)
        progress = BatchProgress(self.options.name, batch_id)
        return OneWrite(self.options, owner, rows, entry, batch_input.ends, progress, self._row_bytes()).run()

    def _row_bytes(self) -> float | None:
        last = next((done for done in reversed(self.recent) if done.records and not done.skipped), None)
        return None if last is None else last.input_bytes / last.records


def _batch_of(entry: Entry | None) -> tuple[str, int] | None:
    return None if entry is None else (entry.query, entry.batch)

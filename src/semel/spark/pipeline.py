"""One pipeline into Kafka: whether it may go on, what of a micro-batch is there already, and the writing of the rest.

However Spark hands over the rows, through `foreachBatch` or `format("semel")`, this decides, with one ledger for both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from semel.client.cluster import Cluster
from semel.client.ownership import ProducerIdentity
from semel.client.settings import parse_config
from semel.errors import KafkaError
from semel.metrics.parts import SINK
from semel.observe import Pipeline
from semel.spark.checkpoint import Home, read_home
from semel.spark.dead_letters import check_dead_letter_topic
from semel.spark.ledger import Entry, Ledger, query_key
from semel.spark.once import OneTransaction
from semel.spark.options import SinkOptions
from semel.spark.outputs import check_same_kind
from semel.spark.owner import PipelineOwner, check_writable, fenced
from semel.spark.progress import BatchProgress, report_skipped
from semel.spark.replays import Question, Written, decide
from semel.wire import ErrorCode


class Outputs(Protocol):
    """The outputs of one micro-batch, in whatever form its rows are."""

    @property
    def names(self) -> Sequence[str]:
        """What the ledger calls them."""
        ...

    def pass_over(self, names: Collection[str]) -> None:
        """These were committed before."""
        ...

    def transaction(
        self, names: Collection[str], owner: PipelineOwner, entry: Entry, progress: BatchProgress
    ) -> OneTransaction:
        """What writes these."""
        ...


class KafkaPipeline:
    """The transactions of one pipeline, and what its ledger says of them. One thread uses it at a time."""

    def __init__(self, options: SinkOptions) -> None:
        self.options = options
        self._owner: PipelineOwner | None = None

    @property
    def identity(self) -> ProducerIdentity | None:
        """Under which the last transaction left the pipeline, if there was one."""
        return None if self._owner is None else self._owner.identity

    def close(self) -> None:
        """Close the connections. An open transaction is ended by the next run, or by its timeout."""
        if self._owner is not None:
            self._owner.close()
            self._owner = None

    def check_topics(self, cluster: Cluster) -> None:
        if self.options.topic is not None:
            check_writable(cluster, self.options.topic)
        if self.options.dead_letter is not None:
            check_dead_letter_topic(self.options, cluster, self.options.topic)

    def write(self, asked: Question, outputs: Outputs, resumed: ProducerIdentity | None = None) -> BatchProgress:
        """Write those outputs of a micro-batch that have not been committed before.

        `resumed` is the identity that the same run has left, perhaps in another process.
        """
        try:
            try:
                return self._write_or_skip(asked, outputs, resumed)
            except KafkaError as error:
                if error.code != ErrorCode.invalid_producer_id_mapping:
                    raise
                self._own_again(asked)
                return self._write_or_skip(asked, outputs, None)
        except BaseException as error:
            Pipeline(SINK, self.options.name).failed(error)
            self.close()  # the next call owns the pipeline again, and reads the ledger
            raise

    def _write_or_skip(self, asked: Question, outputs: Outputs, resumed: ProducerIdentity | None) -> BatchProgress:
        if self._owner is not None and resumed not in (None, self._owner.identity):
            self.close()  # the same run has written in another process since
        owner = self._owner or self.take_over(asked, resumed)
        mine = owner.committed_of(asked.input.query)
        written = decide(replace(asked, is_home=True), mine, owner.committed)
        outputs.pass_over([name for name in outputs.names if written.has(name)])
        missing = [name for name in outputs.names if not written.has(name)]
        if not missing:
            progress = BatchProgress(self.options.name, asked.batch, skipped=True)
            report_skipped(progress)
            return progress
        if self.options.resume != "checkpoint":
            check_same_kind(self.options.name, written.outputs, missing)
        entry = self._entry(asked, missing, written, mine)
        return outputs.transaction(missing, owner, entry, BatchProgress(self.options.name, asked.batch)).run()

    def take_over(self, asked: Question, resumed: ProducerIdentity | None = None) -> PipelineOwner:
        """Own the pipeline: every older run of it is fenced from here on. A run that may not go on fences nobody."""
        options = self.options
        with Cluster(parse_config(options.settings).client) as cluster:
            self.check_topics(cluster)
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
        owner = PipelineOwner(options, options.name, others=names - {"", options.name}, resumed=resumed)
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

    def _entry(self, asked: Question, missing: Sequence[str], written: Written, mine: Entry | None) -> Entry:
        return Entry(
            query=asked.input.query,
            batch=asked.batch,
            offsets=asked.input.digest,
            outputs=sorted(written.outputs | set(missing)),
            ends=[replace(end, start=None) for end in asked.input.ends],
            pipeline=self.options.name,
            records=mine.records if mine is not None and written.outputs else 0,
        )


def _batch_of(entry: Entry | None) -> tuple[str, int] | None:
    return None if entry is None else (entry.query, entry.batch)

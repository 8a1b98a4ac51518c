"""What `format("semel")` commits: the encoded rows of all tasks, in one transaction with the ledger's record.

This runs in a process beside the driver, without Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from semel.client.partitions import TopicPartition
from semel.client.sender import Stored
from semel.client.shared import SharedTransaction
from semel.spark.batch import committed_outputs
from semel.spark.blobs import Manifest, Piece, read_manifest, read_pieces
from semel.spark.dead_letters import DeadLetterTerms, check_count
from semel.spark.failpoints import reach
from semel.spark.input_offsets import Input, input_of, query_id_in
from semel.spark.ledger import Entry
from semel.spark.once import Encoded, OneTransaction, check_stored
from semel.spark.options import SinkOptions
from semel.spark.outputs import check_same_kind, name_output
from semel.spark.owner import PipelineOwner
from semel.spark.pipeline import KafkaPipeline
from semel.spark.progress import BatchProgress, report_skipped
from semel.spark.python_files import PythonFiles
from semel.spark.replays import Question
from semel.spark.run_notes import RunNote

_pipelines: Final[dict[tuple[str, str], tuple[str | None, KafkaPipeline]]] = {}
"""The pipelines that this process has committed for, by name and brokers, and the run of the query each belongs to."""


def commit_batch(options: SinkOptions, blobs: Sequence[Any], run: str | None, batch_id: int) -> BatchProgress:
    """Write a micro-batch, unless it has been committed before."""
    assert options.checkpoint is not None, "the options were parsed as those of a stream"
    files = PythonFiles()
    bootstrap = str(options.settings["bootstrap.servers"])
    note = None if run is None else RunNote(run, options.name, bootstrap)
    left = None if note is None else note.read()
    query = query_id_in(files, options.checkpoint)
    batch_input = input_of(files, options.checkpoint, batch_id, query, run or "", is_first=left is None)
    asked = Question(
        options.name,
        batch_id,
        batch_input,
        options.resume,
        is_stateful=lambda: files.has_state(batch_input.checkpoint),
    )
    pipeline = _pipeline_of(options, bootstrap, run)
    if left is None:
        pipeline.close()  # the first micro-batch of a run takes over
    progress = pipeline.write(asked, EncodedOutput(options, blobs, batch_input, batch_id), left)
    if note is not None and pipeline.identity is not None:
        note.write(pipeline.identity)
    reach("before_return", options.name)
    return progress


def _pipeline_of(options: SinkOptions, bootstrap: str, run: str | None) -> KafkaPipeline:
    key = (options.name, bootstrap)
    if key in _pipelines:
        known_run, known = _pipelines[key]
        if known_run == run and known.options == options:
            return known
        known.close()
    _pipelines[key] = (run, KafkaPipeline(options))
    return _pipelines[key][1]


def commit_job(options: SinkOptions, blobs: Sequence[Any], job_id: str) -> BatchProgress:
    """Write a job, unless one of its id has been committed before."""
    owner = PipelineOwner(options, f"{options.name}/{job_id}")
    try:
        written, records = committed_outputs(owner)
        output = EncodedOutput(options, blobs, None, None)
        [name] = output.names
        progress = BatchProgress(options.name, job_id=job_id, records=records, skipped=True)
        if written.has(name):
            report_skipped(progress)
            return progress
        check_same_kind(f"{options.name}/{job_id}", written.outputs, [name])
        entry = Entry(outputs=sorted(written.outputs | {name}), pipeline=options.name, records=records)
        return output.transaction([name], owner, entry, BatchProgress(options.name, job_id=job_id)).run()
    finally:
        owner.close()


@dataclass(frozen=True, slots=True)
class EncodedOutput:
    """The one output of a query or job whose rows the tasks have encoded."""

    options: SinkOptions
    blobs: Sequence[Any]
    batch_input: Input | None
    batch_id: int | None

    @property
    def names(self) -> Sequence[str]:
        return [name_output(self.options.topic, [])]

    def pass_over(self, names: Collection[str]) -> None:
        """The tasks have run, so state stores and the watermark have moved on."""

    def transaction(
        self, names: Collection[str], owner: PipelineOwner, entry: Entry, progress: BatchProgress
    ) -> OneCommit:
        return OneCommit(self.options, owner, entry, progress, self.blobs, self.batch_input)


@dataclass(frozen=True, slots=True)
class OneCommit(OneTransaction):
    """Written by the process that commits, from what the tasks have returned."""

    blobs: Sequence[Any]
    batch_input: Input | None

    @contextmanager
    def _prepared(self) -> Iterator[Callable[[], Encoded]]:
        yield self._encoded

    def _encoded(self) -> Encoded:
        manifest = read_manifest(self.blobs)
        check_count(manifest, self._terms(manifest))
        return Encoded(manifest, read_pieces(self.blobs), None, 0, 0)

    def _terms(self, manifest: Manifest) -> DeadLetterTerms | None:
        options = self.options
        if options.dead_letter is None:
            return None
        ids = (self.progress.batch_id, self.progress.job_id)
        return DeadLetterTerms(options.dead_letter, options.dead_letter_max, options.name, *ids, {})

    def _write_blobs(self, encoded: Encoded, shared: SharedTransaction) -> list[Stored]:
        pieces: list[Piece] | None = encoded.pieces
        assert pieces is not None, "the tasks have returned all of their data"
        return check_stored(self.owner.write(pieces), encoded.manifest) if pieces else []

    def _offsets(self) -> Mapping[TopicPartition, int]:
        if self.batch_input is None:
            return {}
        # Where a source does not tell its cluster, only Spark could say which brokers it reads from.
        return self.owner.lag.offsets(self.batch_input, self.owner.cluster, set)

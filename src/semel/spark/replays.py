"""What the ledger says about a micro-batch: new, a replay, or of a checkpoint that must not go on. Pure.

A batch is new to the ledger for one of three reasons: the query is new, it has come further, or the ledger is not the
one that knows it. The last one loses or repeats records, so it is refused unless the user has said how to go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from semel.errors import ConfigError
from semel.spark.input_offsets import Input, InputEnd, merge_ends, parse_ends
from semel.spark.ledger import Entry
from semel.spark.options import Resume
from semel.spark.source_offsets import Offsets, split_note


@dataclass(frozen=True, slots=True)
class Written:
    """The outputs of a batch that were committed before."""

    outputs: frozenset[str] = frozenset()
    all: bool = False
    """From a release that wrote one output for each batch and did not name it."""

    def has(self, output: str) -> bool:
        return self.all or output in self.outputs


NOTHING: Final = Written()


@dataclass(frozen=True, slots=True)
class Question:
    """A micro-batch that Spark asks for."""

    pipeline: str
    batch: int
    input: Input
    resume: Resume | None = None
    is_home: bool | None = None
    """Whether the checkpoint says that all of its batches are in this ledger; None if it says nothing."""
    is_stateful: Callable[[], bool] = lambda: False
    is_database: bool = False
    """Whether the ledger is in the database that the rows go to, and has every batch that the sink was called for."""
    done: int | None = None
    """The last batch that this run of the query has committed to a database."""


def decide(asked: Question, mine: Entry | None, latest: Entry | None) -> Written:
    """Which outputs of the batch need not be written; raises if this checkpoint must not go on.

    `mine` is the ledger's entry of this query, `latest` the last one of the pipeline, whichever query wrote it.
    """
    if asked.is_database:
        _check_database(asked, mine)
    elif asked.is_home is False and asked.resume != "checkpoint":
        raise ConfigError(
            "This checkpoint belongs to another ledger: ledger= or the cluster was changed, or the ledger topic was "
            "deleted and created again. The batch may have been written already, so nothing was written. Name the old "
            'ledger=, or pass resume="checkpoint" once if the last batch before this start was completed.'
        )
    if mine is not None and asked.batch <= mine.batch:
        return _decide_replay(asked, mine)
    if mine is None and latest is not None:
        _check_takeover(asked, latest)
    elif asked.is_home is None and asked.resume is None:
        _check_gap(asked, mine)
    return NOTHING


def _check_database(asked: Question, mine: Entry | None) -> None:
    """A database can be another one, or an older copy of itself, rows and ledger alike."""
    if asked.is_home is False and asked.resume != "checkpoint":
        raise ConfigError(
            "This checkpoint belongs to another database: the target was changed, or Semel's tables were made again. "
            "The batch may have been written there, so nothing was written. Name the old database, or pass "
            'resume="checkpoint" once to go on in this one with what comes from here on.'
        )
    known_to = -1 if mine is None else mine.batch
    is_older = asked.done is not None and known_to < asked.done
    if asked.done is None and asked.is_home and asked.resume != "checkpoint":
        is_older = asked.batch > known_to + 1
    if is_older:
        raise ConfigError(
            f"Spark asks for batch {asked.batch}, and the database knows this query up to batch {known_to} only: it is "
            "an older copy of itself, or the sink was not called for every batch. Rows of the batches between may be "
            "missing, so nothing was written. To write them again, begin with an empty checkpoint at "
            'semel.committed_offsets(..., to=...) and pass resume="committed"; to go on without them, pass '
            'resume="checkpoint" once.'
        )


def _check_gap(asked: Question, mine: Entry | None) -> None:
    """Batches that the ledger does not know may have been written elsewhere, and this one with them."""
    known_to = -1 if mine is None else mine.batch
    # Only the first batch of a run can be a replay.
    if asked.batch == known_to + 1 or not asked.input.is_first:
        return
    if may_have_input(asked.input.earlier(), since=mine):
        raise ConfigError(
            f"Spark asks for batch {asked.batch}, and the ledger knows this query up to batch {known_to} only: another "
            "sink or another ledger= was used since. If this batch was written already it would be repeated, so "
            'nothing was written. Name the right ledger=, or pass resume="checkpoint" once if the batch before this '
            "start was completed."
        )


def _decide_replay(asked: Question, mine: Entry) -> Written:
    if asked.batch == mine.batch and mine.offsets == asked.input.digest:
        return Written(all=True) if mine.outputs is None else Written(frozenset(mine.outputs))
    raise ConfigError(
        f"Pipeline {asked.pipeline!r} has committed batch {mine.batch}, and Spark now asks for batch {asked.batch} "
        "with other input: the checkpoint is older than the output, as after a restore from a copy. Nothing was "
        "written, because some of it would be repeated. Restore the newer checkpoint, or begin with an empty one and "
        'resume="committed".'
    )


def _check_takeover(asked: Question, latest: Entry) -> None:
    """The name has run before, with another checkpoint."""
    if asked.resume is None:
        raise checkpoint_is_new(asked.pipeline)
    if asked.resume == "committed":
        _check_start(asked, latest)


def checkpoint_is_new(pipeline: str) -> ConfigError:
    return ConfigError(
        f"Pipeline {pipeline!r} has run before with another checkpoint, and this one is new: the old one may be lost, "
        "or two queries have one name. Nothing was written. To go on after the last committed batch, start the source "
        'at semel.committed_offsets(...) and pass resume="committed". To start over on purpose, pass '
        'resume="checkpoint". For another pipeline, use another name.'
    )


def _check_start(asked: Question, latest: Entry) -> None:
    if not latest.ends:
        raise ConfigError(
            f'resume="committed" has no position to go on from: the last batch of pipeline {asked.pipeline!r} had no '
            'input from Kafka. Nothing was written. Restore the checkpoint, or pass resume="checkpoint" to start over.'
        )
    if asked.is_stateful():
        raise ConfigError(
            'resume="committed" is for queries without state: the aggregates, joins or seen keys of this one were in '
            "the lost checkpoint. Nothing was written. Restore the checkpoint, or start over under a new name from the "
            "beginning of the input."
        )
    starts = known_starts(asked.input.ends)
    if starts is None:
        return  # the source does not tell where it began, so the user's word counts
    for named, committed in sorted(merge_ends(latest.ends).items()):
        if starts.get(named) != committed:
            raise ConfigError(
                f"{named.topic}-{named.partition} was committed up to offset {committed}, and this query begins at "
                f"{starts.get(named, 'none')}: records would be lost or repeated. Nothing was written. Use an empty "
                "checkpoint and set startingOffsets to semel.committed_offsets(...)."
            )


def known_starts(ends: list[InputEnd]) -> Offsets | None:
    """Where the query began to read, if all of its Kafka sources tell.

    >>> known_starts([InputEnd({"a": {"0": 9}}, "c", {"a": {"0": 4}})])
    {TopicPartition(topic='a', partition=0): 4}
    """
    starts: Offsets = {}
    for end in ends:
        if end.start is None:
            return None
        for named, offset in split_note(end.start)[0].items():
            starts[named] = min(offset, starts.get(named, offset))
    return starts


def may_have_input(offset_log: str, *, since: Entry | None) -> bool:
    """Whether batches up to this entry of Spark's offset log can have had input since the ledger's, or since the start.

    >>> may_have_input('v1\\n{}\\n{"logOffset":0}', since=None)
    True
    >>> may_have_input('v1\\n{}\\n{"a":{"0":7}}', since=Entry(ends=[InputEnd({"a": {"0": 7}})]))
    False
    """
    ends = parse_ends(offset_log)
    if len(ends) < sum(1 for line in offset_log.split("\n")[2:] if line):
        return True  # a source whose offsets only Spark understands
    before = [end.start for end in ends] if since is None else [end.topics for end in since.ends]
    return before != [end.topics for end in ends]

"""One run of a change capture: a relay's run whose beginning is a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Final

from semel.bridges.capture.options import CaptureOptions
from semel.bridges.capture.portions import CapturedPortion
from semel.bridges.capture.positions import SNAPSHOT
from semel.bridges.capture.replication import Stopped
from semel.bridges.capture.source import CaptureSource
from semel.bridges.relay.options import Resume
from semel.bridges.relay.progress import RelayProgress
from semel.bridges.relay.publisher import Part, Publisher
from semel.bridges.relay.routes import route
from semel.bridges.relay.row_source import Position
from semel.bridges.relay.runs import PASSING, RelayRun, now_ms
from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.dead_letter_topic import check_usable
from semel.client.topic_rules import TopicLookup
from semel.errors import ConfigError, DatabaseError, Fenced, KafkaError, SemelError
from semel.wire import ErrorCode

_SNAPSHOT_TIMEOUT_MS: Final = 900_000
"""The most that brokers allow unless they are told otherwise. The snapshot is one transaction."""


class CaptureRun(RelayRun):
    """As a relay's run; before the first change it writes the rows that are there."""

    def __init__(self, source: CaptureSource, options: CaptureOptions, is_stopping: Callable[[], bool]) -> None:
        super().__init__(source, options.relay, is_stopping, source.make_waker())
        self._capture = source
        self._chosen = options

    def go(self, idle_ms: float | None, on_ready: Callable[[], None] | None = None) -> None:
        with suppress(Stopped):
            super().go(idle_ms, on_ready)

    # -- the start ---------------------------------------------------------------------------------------------------

    def _check_topics(self, cluster: Cluster) -> None:
        """Those of the tables must be there. That of the ends is made, as nobody would know what it needs."""
        lookup = TopicLookup(lambda: cluster)
        for topic in self._capture.known_topics():
            check_usable(lookup.rules(topic), "Events", "topic=", "Nothing was captured.")
        ends = self._chosen.transactions_topic
        try:
            Admin(cluster).create_topics(ends, partitions=1)
        except KafkaError as error:
            if error.code != ErrorCode.topic_already_exists:
                check_usable(lookup.rules(ends), "Ends of transactions", "name=", "Nothing was captured.")
        if (count := len(cluster.leaders(ends))) != 1:
            raise ConfigError(
                f"Topic {ends!r} has {count} partitions, and the ends of transactions need a topic with one. Nothing "
                "was captured. Delete it, and it is made as it must be."
            )

    def _decide(self, progress: RelayProgress | None, resume: Resume | None) -> Position | None:
        position = self._capture.decide(progress)
        return None if position is None else position.encode()

    def _take_over(self, publisher: Publisher) -> None:
        progress = publisher.progress()
        if progress is None or progress.position is None:
            self._capture.ensure_publication()
        super()._take_over(publisher)

    # -- the snapshot ------------------------------------------------------------------------------------------------

    def _step(self, publisher: Publisher) -> bool:
        if self._position is not None:
            return super()._step(publisher)
        self._write_snapshot(publisher)
        return False

    def _write_snapshot(self, publisher: Publisher) -> None:
        """One Kafka transaction, so that it is seen whole, and can begin again from a new slot if anything fails."""
        publisher.reopen(**{"transaction.timeout.ms": _SNAPSHOT_TIMEOUT_MS})
        self._recover(publisher)
        if self._position is not None:
            return  # another capture of the name was here between, and has written it
        try:
            with closing(self._capture.begin()) as portions:
                parts = _SnapshotParts(self, publisher, portions)
                written = publisher.publish_parts(parts, self._letter_topic, parts.progress)
        except DatabaseError:
            publisher.recover()
            raise
        except SemelError as error:
            # Of one that was fenced, the slot may be that of its successor.
            if not isinstance(error, (*PASSING, Fenced)):
                publisher.close()
                self._capture.drop_slot()
            raise
        publisher.reopen()
        self._committed(written, parts.events, parts.letters)
        self._position = written.position

    def snapshot_part(self, publisher: Publisher, portion: CapturedPortion) -> tuple[Part, Position]:
        rows = portion.rows
        routed = route(rows, self._options.topic, self._lookup(publisher), self._config, now_ms())
        if routed.bad and self._letters is None:
            raise self._refuse(rows.slice(routed.bad[0].row, 1), routed.bad[0].reason)
        routed, position = portion.finish(routed, rows.num_rows)
        letters = self._letters.make(rows, routed) if self._letters is not None else []
        return (routed.without_bad(), letters), position

    def snapshot_progress(self, position: Position | None, rows: int) -> RelayProgress:
        assert self._identity is not None
        return RelayProgress(self._identity, position, rows)


class _SnapshotParts:
    """The parts of the transaction, one after the other, and what was in them."""

    def __init__(self, run: CaptureRun, publisher: Publisher, portions: Iterator[CapturedPortion]) -> None:
        self.events = 0
        self.letters = 0
        self._run = run
        self._publisher = publisher
        self._portions = portions
        self._position: Position | None = None

    def __iter__(self) -> Iterator[Part]:
        topics: dict[str, int] = {}
        for portion in self._portions:
            counted = replace(portion, topics=topics)
            part, self._position = self._run.snapshot_part(self._publisher, counted)
            topics = dict(self._position["topics"])
            self.events += portion.events(portion.rows.num_rows)
            self.letters += len(part[1])
            yield part
        assert self._position is not None
        assert self._position["number"] == SNAPSHOT + 1

    def progress(self) -> RelayProgress:
        return self._run.snapshot_progress(self._position, self.events)

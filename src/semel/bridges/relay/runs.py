"""One run of a relay, from the first connection to the last commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from semel.bridges.failpoints import reach
from semel.bridges.relay.letters import RelayLetters
from semel.bridges.relay.options import RelayOptions, Resume
from semel.bridges.relay.progress import RelayProgress, decide_start
from semel.bridges.relay.publisher import Publisher, progress_topic, read_progress
from semel.bridges.relay.read_ahead import ReadAhead
from semel.bridges.relay.routes import Routed, route
from semel.bridges.relay.row_source import Identity, Portion, Position, RowSource
from semel.bridges.relay.waking import Clock, Waker
from semel.bridges.retries import Retries
from semel.client.cluster import Cluster
from semel.client.dead_letter_topic import check_usable
from semel.client.settings import parse_config
from semel.client.topic_rules import TopicLookup, TopicRules, keeps_progress
from semel.errors import (
    BrokerUnreachable,
    CommitUnknown,
    ConnectionLost,
    DatabaseError,
    KafkaError,
    NotAuthorized,
    RecordFailed,
    RecordTooLarge,
    RequestTimedOut,
    SemelError,
    TransactionAborted,
    UnknownTopic,
)
from semel.metrics.parts import RELAY, RELAY_RETRIES
from semel.observe import Pipeline
from semel.session.trace_headers import with_context
from semel.spark.bad_rows import BadRow
from semel.wire import ErrorCode

_KEEP_ALIVE_S: Final = 3600.0
"""How long an idle relay writes nothing. After a week the coordinator forgets it, and could not name a successor."""
_RULES_KEPT_S: Final = 30.0
"""How long a topic is believed to be as it was."""
_NAP_S: Final = 0.1
PASSING: Final = (BrokerUnreachable, CommitUnknown, ConnectionLost, RequestTimedOut, TransactionAborted)
"""Errors of Kafka's side that say nothing about the rows."""
_REFUSED: Final = frozenset(
    {
        ErrorCode.message_too_large,
        ErrorCode.record_list_too_large,
        ErrorCode.invalid_record,
        ErrorCode.invalid_timestamp,
    }
)
"""A broker refuses batches, not rows: which row is at fault is found by halves."""
_AFTER: Final = "Progress is in Kafka together with the events, so a new start goes on from there and repeats nothing."


@dataclass(slots=True)
class RelayReport:
    """What a run has done."""

    rows: int = 0
    """How many were relayed, dead letters too."""
    transactions: int = 0
    dead_letters: int = 0
    deleted: int = 0


class RelayRun:
    """Reads portions of a source and publishes them, and goes on after lost connections on either side."""

    def __init__(
        self, source: RowSource, options: RelayOptions, is_stopping: Callable[[], bool], waker: Waker | None = None
    ) -> None:
        self.report = RelayReport()
        self._source = source
        self._options = options
        self._config = options.producer_config
        self._is_stopping = is_stopping
        self._waker = waker or Clock()
        self._ahead = ReadAhead(source)
        self._letters = None
        if options.dead_letter is not None:
            self._letters = RelayLetters(options.dead_letter, options.dead_letter_max, options.table)
        self._database_retries = Retries(options.retry_s, is_stopping, after=_AFTER)
        self._broker_retries = Retries(options.retry_s, is_stopping, what="Kafka", after=_AFTER)
        self._identity: Identity | None = None
        self._position: Position | None = None
        self._progress: RelayProgress | None = None
        self._rules: dict[str, TopicRules] = {}
        self._rules_until = 0.0
        self._published_at = time.monotonic()
        self._pipeline = Pipeline(RELAY, options.name)

    def go(self, idle_ms: float | None, on_ready: Callable[[], None] | None = None) -> None:
        """Relay until it is stopped, or nothing has come for `idle_ms`."""
        try:
            self._go(idle_ms, on_ready)
        except Exception as error:
            self._pipeline.failed(error)
            raise

    def _go(self, idle_ms: float | None, on_ready: Callable[[], None] | None) -> None:
        with ExitStack() as stack:
            stack.callback(self._source.close)
            stack.callback(self._ahead.close)
            stack.callback(self._waker.close)
            if self._until_the_database_answers(self._look_before) is None:
                return
            publisher = Publisher(self._options.settings, self._options.name, self._options.progress_topic)
            stack.callback(publisher.close)
            if self._until_the_database_answers(lambda: self._take_over(publisher)) is None:
                return
            if on_ready is not None:
                on_ready()
            self._relay(publisher, idle_ms)

    def _until_the_database_answers(self, action: Callable[[], object]) -> object | None:
        """None if the run is asked to end before it does."""
        while not self._is_stopping():
            try:
                action()
            except DatabaseError as error:
                self._source.close()
                RELAY_RETRIES.add(self._options.name, "database")
                self._database_retries.failed(error)
            else:
                self._database_retries.succeeded()
                return True
        return None

    # -- the start ---------------------------------------------------------------------------------------------------

    def _look_before(self) -> None:
        """Find out what can be wrong before a relay of this name that works is fenced."""
        options = self._options
        self._identity = self._source.prepare()
        cluster = Cluster(parse_config(options.settings).client)
        try:
            self._check_topics(cluster)
            if self._letters is not None:
                self._letters.check_writable(cluster, self._config)
            topic = progress_topic(cluster, options.progress_topic)
            if topic.exists():
                self._decide(read_progress(topic, options.name, is_owner=False), options.resume)
        finally:
            cluster.close()

    def _check_topics(self, cluster: Cluster) -> None:
        if (topic := self._options.topic.fixed) is not None:
            rules = TopicLookup(lambda: cluster).rules(topic)
            check_usable(rules, "Events", "topic=", "Nothing was relayed.")

    def _decide(self, progress: RelayProgress | None, resume: Resume | None) -> Position | None:
        """Where to go on. Raises if the progress does not belong to what the source is now."""
        assert self._identity is not None
        position = None if progress is None else progress.position
        return decide_start(
            self._options.name,
            progress,
            self._identity,
            resume,
            is_behind=position is not None and self._is_comparable(progress) and self._source.is_behind(position),
            advice=self._source.advice_after_restore,
        )

    def _is_comparable(self, progress: RelayProgress | None) -> bool:
        return progress is not None and self._identity is not None and progress.source["kind"] == self._identity["kind"]

    def _take_over(self, publisher: Publisher) -> None:
        reach("relay_taken_over")
        self._identity = self._source.prepare()
        self._progress = publisher.progress()
        self._position = self._decide(self._progress, self._options.resume)
        if self._progress is None or self._progress.source != self._identity:
            # From now on the name belongs to this table, also if no row comes for a long time.
            self._publish(publisher, pa.table({}), Routed(pa.table({}), []), self._position, 0)
        if self._options.delete and self._position is not None:
            self.report.deleted += self._source.delete_done(self._position)

    # -- one portion after the other ---------------------------------------------------------------------------------

    def _relay(self, publisher: Publisher, idle_ms: float | None) -> None:
        last_row = time.monotonic()
        must_prepare = must_recover = False
        while not self._is_stopping():
            try:
                if must_recover or must_prepare:
                    self._ahead.forget()
                if must_recover:
                    self._recover(publisher)
                    must_recover = False
                if must_prepare:
                    self._prepare_again()
                    must_prepare = False
                is_idle = self._step(publisher)
                if is_idle and self._must_write():
                    self._publish(publisher, pa.table({}), Routed(pa.table({}), []), self._position, 0)
            except DatabaseError as error:
                self._ahead.forget()
                self._source.close()
                must_prepare = True
                RELAY_RETRIES.add(self._options.name, "database")
                self._database_retries.failed(error)
                continue
            except PASSING as error:
                must_recover = True
                RELAY_RETRIES.add(self._options.name, "kafka")
                self._broker_retries.wait_after(error)
                continue
            self._database_retries.succeeded()
            self._broker_retries.succeeded()
            now = time.monotonic()
            if not is_idle:
                last_row = now
                continue
            if idle_ms is not None and (now - last_row) * 1000 >= idle_ms:
                return
            self._nap()

    def _must_write(self) -> bool:
        """Whether progress is due though no row came."""
        since_s, heartbeat_s = time.monotonic() - self._published_at, self._source.heartbeat_s
        has_moved = self._progress is not None and self._position != self._progress.position
        return since_s >= _KEEP_ALIVE_S or (heartbeat_s is not None and has_moved and since_s >= heartbeat_s)

    def _nap(self) -> None:
        until = time.monotonic() + self._options.poll_ms / 1000
        while (left_s := until - time.monotonic()) > 0 and not self._is_stopping():
            if self._waker.wait(min(left_s, _NAP_S)):
                return

    def _recover(self, publisher: Publisher) -> None:
        """What was committed says where to go on: the last transaction may be there or not."""
        self._progress = publisher.recover()
        self._position = None if self._progress is None else self._progress.position

    def _prepare_again(self) -> None:
        """The connection may lead to another server now, where neither the committed position nor ours counts."""
        self._identity = self._source.prepare()
        if self._progress is not None and self._position is not None:
            self._decide(replace(self._progress, position=self._position), None)

    def _step(self, publisher: Publisher) -> bool:
        """Relay the next rows. True if there were none."""
        self._pipeline.looked()
        portion = self._ahead.next(self._position, self._options.rows_max)
        if portion.is_idle or not portion.rows.num_rows:
            self._position = portion.end  # no row lies between, so it need not be written
            return portion.is_idle
        reach("relay_rows_read")
        if portion.has_more and not self._options.delete:  # which takes its turn at the same connection
            self._ahead.begin(portion.end, self._options.rows_max)
        self._position = self._relay_portion(publisher, portion)
        if self._options.delete:
            self.report.deleted += self._source.delete_done(self._position)
            reach("relay_deleted")
        return False

    def _relay_portion(self, publisher: Publisher, portion: Portion) -> Position:
        """Publish the rows, or as many from the beginning as a broker takes. Returns where the relay stands then."""
        count = portion.rows.num_rows
        is_looked_up_again = False
        while True:
            rows = portion.rows.slice(0, count)
            routed = route(rows, self._options.topic, self._lookup(publisher), self._config, now_ms())
            if routed.bad and self._letters is None:
                count = routed.bad[0].row
                if count == 0:
                    raise self._refuse(rows, routed.bad[0].reason)
                continue  # those before it first: then the row that stops the relay is the only one that waits
            finished, position = portion.finish(routed, count)
            try:
                self._publish(publisher, rows, finished, position, portion.events(count))
                return position
            except SemelError as error:
                is_topic_gone = isinstance(error, UnknownTopic | NotAuthorized) and not is_looked_up_again
                if not is_topic_gone and not _is_refusal(error):
                    raise
                publisher.recover()
                if is_topic_gone:  # since it was looked up: then the rows that name it are the bad ones
                    is_looked_up_again = True
                    self._rules_until = 0.0
                    continue
                if count > 1:
                    count //= 2
                    continue
                if self._letters is None:
                    raise self._refuse(rows, str(error)) from error
                finished, position = portion.finish(Routed(routed.records, [BadRow(0, str(error))]), 1)
                self._publish(publisher, rows, finished, position, portion.events(1))
                return position

    def _publish(
        self, publisher: Publisher, rows: pa.Table, routed: Routed, position: Position | None, count: int
    ) -> None:
        letters = self._letters.make(rows, routed) if self._letters is not None else []
        assert self._identity is not None
        done = count + (0 if self._progress is None else self._progress.rows)
        progress = RelayProgress(self._identity, position, done)
        with self._pipeline.begin(transactional_id=publisher.transactional_id) as work:
            records = with_context(routed.without_bad())
            written = publisher.publish(records, letters, self._letter_topic, progress)
            work.note(producer_id=written.producer_id)
            work.committed(count, dead_letters=len(letters))
        self._committed(written, count, len(letters))

    @property
    def _letter_topic(self) -> str | None:
        return None if self._letters is None else self._letters.topic

    def _committed(self, progress: RelayProgress, rows: int, letters: int) -> None:
        self._progress = progress
        self._published_at = time.monotonic()
        self.report.rows += rows
        self.report.transactions += 1
        self.report.dead_letters += letters
        if self._letters is not None:
            self._letters.count += letters
        if progress.position is not None:
            self._source.committed(progress.position)

    def _lookup(self, publisher: Publisher) -> TopicLookup:
        """Topics that take records are not asked for again at once; those that do not are, each time."""
        now = time.monotonic()
        if now >= self._rules_until:
            barred = self._options.progress_topic
            self._rules, self._rules_until = {barred: keeps_progress(barred)}, now + _RULES_KEPT_S
        return _RememberingLookup(publisher.cluster, self._rules)

    def _refuse(self, rows: pa.Table, reason: str) -> RecordFailed:
        return RecordFailed(
            f"Row {rows.column('id')[0].as_py()} of {self._options.table!r} cannot be relayed: {reason} The rows "
            "before it are in Kafka. The relay stops here, so that nothing overtakes the row. Mend the row or the "
            'topic, or give the relay dead_letter="topic" to put such rows aside.'
        )


class _RememberingLookup(TopicLookup):
    def __init__(self, cluster: Cluster, remembered: dict[str, TopicRules]) -> None:
        super().__init__(lambda: cluster, remembered)
        self._remembered = remembered

    def rules(self, topic: str) -> TopicRules:
        found = super().rules(topic)
        if found.problem is None:
            self._remembered[topic] = found
        return found


def _is_refusal(error: SemelError) -> bool:
    return isinstance(error, RecordTooLarge) or (isinstance(error, KafkaError) and error.code in _REFUSED)


def now_ms() -> int:
    return int(time.time() * 1000)

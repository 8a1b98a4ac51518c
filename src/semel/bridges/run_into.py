"""`semel.run(transform, to=semel.Postgres(...))`: from Kafka through a function into a database table, exactly once.

One database transaction holds the rows, the dead letters and the position in Kafka. The function runs before it begins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any, Final, Literal

from semel.bridges.dead_letter_table import DeadLetterTable, RefusedRow
from semel.bridges.failpoints import reach
from semel.bridges.guarded_positions import GuardedPositions
from semel.bridges.inbox import Delivery, Inbox
from semel.bridges.lag_offsets import LagOffsets
from semel.bridges.portions import Failed, Function, Portion
from semel.bridges.positions import Position
from semel.bridges.retries import LOG, Retries
from semel.bridges.run_owner import (
    check_no_inbox,
    check_table,
    claim,
    find_other_writer,
    home_of,
    note_table,
    refuse_other_writer,
)
from semel.bridges.sigterm_end import ends_on_sigterm
from semel.bridges.source_inbox import SourceDelivery, SourceInbox
from semel.bridges.starting_point import Resume, compare, describe_ahead, refuse_missing
from semel.bridges.table_writer import TableWriter
from semel.client.admin import Admin
from semel.client.admin_topics import TopicDescription
from semel.client.offsets import Edge
from semel.client.partitions import TopicPartition
from semel.client.settings import check_option_names, parse_config
from semel.errors import ConfigError, DatabaseError, DatabaseUnreachable, OffsetOutOfRange, ValueDoesNotFit
from semel.session.dead_letter_box import origin
from semel.session.row_pace import RunStopped
from semel.session.runner import RunReport
from semel.session.source_reader import MEMORY_BYTES_MAX, SourceOptions

if TYPE_CHECKING:
    from semel.bridges.targets import DatabaseTarget

_POLL_MS: Final = 500
_AS_NAMED: Final = "the pipeline's name"
_ELSEWHERE: Final = {
    "instance": "one process reads all partitions, and a new one takes over from the last; leave it out",
    "group.id": "write group=",
}
"""Options of sessions that are written in another way here."""
_DELETED: Final = (
    'To go on without the deleted records, pass auto_offset_reset="earliest": the log tells how many were skipped.'
)


@dataclass(frozen=True, slots=True)
class _Options:
    """How a run reads."""

    settings: Mapping[str, object]
    topics: Collection[str]
    name: str
    group: str | None
    start: Edge
    resume: Resume | None
    records_max: int
    source: SourceOptions | None = None
    """Whose transactions are applied whole, if the topics are those of a source database."""

    @property
    def all_topics(self) -> list[str]:
        return sorted(set(self.topics)) if self.source is None else self.source.all_topics


@dataclass(slots=True)
class _Work:
    """A delivery and what the function has made of it, until it is committed."""

    delivery: Delivery | SourceDelivery
    portion: Portion | None
    """None if there are so many records that the function runs on parts of them, inside of the transaction."""
    failed: Failed = field(default_factory=list[Any])
    """Records at which the function has failed."""


def run_into(
    target: DatabaseTarget,
    transform: Callable[[Any], Any],
    *,
    by: Literal["table", "row"] = "table",
    stop: threading.Event | None = None,
    idle_ms: float | None = None,
    settings: Mapping[str, object] | None = None,
    topics: Collection[str],
    name: str,
    group: str | None = _AS_NAMED,
    start: Edge = "earliest",
    resume: Resume | None = None,
    transaction_records_max: int = 100_000,
    end_on_sigterm: bool = True,
    source_transactions: str | None = None,
    transactions_topic: str | None = None,
    after: int | None = None,
    memory_bytes_max: int = MEMORY_BYTES_MAX,
    spill_folder: str | None = None,
    **more_settings: object,
) -> RunReport:
    """Read, transform and write until `stop` is set, or until nothing has come for `idle_ms`.

    `name` is the pipeline's: its progress is kept in the database under it. `group` is where offsets are committed
    afterwards, so that lag shows; None for none. `start` is where to begin without a position.

    `source_transactions` is the name of a relay whose transactions are applied whole: see `SourceInbox` for the options
    after it.
    """
    if by not in ("table", "row"):
        raise ConfigError(f'by={by!r} is not supported: write "table" or "row".')
    if isinstance(topics, str) or not topics:
        raise ConfigError('topics must be a list of at least one name, such as ["orders"].')
    check_option_names(more_settings, [*signature(run_into).parameters, *_ELSEWHERE], "A run into a database")
    given = {**(settings or {}), **more_settings}
    _check(given, resume)
    group = name if group is _AS_NAMED else group
    source = None
    if source_transactions is not None:
        source = SourceOptions(source_transactions, topics, transactions_topic, after, memory_bytes_max, spill_folder)
        source.check(given)
        _check_source(target, start, resume)
    elif transactions_topic is not None or after is not None:
        raise ConfigError(
            "transactions_topic= and after= belong to source_transactions=, which names the relay. Nothing was read."
        )
    options = _Options(given, topics, name, group, start, resume, transaction_records_max, source)
    with ends_on_sigterm("run", stop, watches=end_on_sigterm) as is_over:
        run = _Run(target, transform, by, options, is_over)
        run.go(idle_ms)
    return run.report


def _check(given: Mapping[str, object], resume: str | None) -> None:
    for name in given:
        instead = _ELSEWHERE.get(name) or _ELSEWHERE.get(name.replace("_", "."))
        if instead is not None:
            raise ConfigError(f"{name}= is not an option of a run into a database: {instead}. Nothing was read.")
    reset = given.get("auto.offset.reset", given.get("auto_offset_reset", "earliest"))
    if reset != "earliest":
        raise ConfigError(
            f"auto.offset.reset={reset!r} is not an option of a run into a database; nothing was read. Where the "
            'database has no position, start="earliest" or "latest" counts. auto.offset.reset="earliest" goes on '
            "behind records that were deleted before they were read; without it they are an error."
        )
    if resume not in (None, "database", "group"):
        raise ConfigError(f'resume={resume!r} is not supported: write "database" or "group", or leave it out.')
    parse_config(given)


def _check_source(target: DatabaseTarget, start: Edge, resume: str | None) -> None:
    wrong = None
    if target.dead_letter is not None:
        wrong = "dead_letter= would put a part of a transaction aside and apply the rest: leave it out"
    elif start != "earliest":
        wrong = "start= cannot be in the middle of transactions: write after= with the last one that the table has"
    elif resume == "group":
        wrong = 'the offsets of a group do not tell which transaction was the last: write resume="database"'
    if wrong is not None:
        raise ConfigError(f"With source_transactions= {wrong}. Nothing was read.")


class _Run:
    """One run, from the first connection to the last commit."""

    def __init__(
        self,
        target: DatabaseTarget,
        transform: Callable[[Any], Any],
        by: Literal["table", "row"],
        options: _Options,
        is_stopping: Callable[[], bool],
    ) -> None:
        self.report = RunReport()
        self._options = options
        self._is_stopping = is_stopping
        self._writer = TableWriter(target.options, types_are_guessed=by == "row")
        self._dead_letters = None
        if target.dead_letter is not None:
            self._dead_letters = DeadLetterTable(
                target.dead_letter, target.dead_letter_max, pipeline=options.name, target=target.options.rule.table
            )
        rule = target.options.rule
        event_id = rule.key if rule.mode == "dedup" else ()
        self._function = Function(
            transform, by, keeps_failed=self._dead_letters is not None, event_id=event_id, is_stopping=is_stopping
        )
        self._retries = Retries(target.retry_s, is_stopping)
        self._target = target
        self._database = target.open()
        self._work: _Work | None = None

    def go(self, idle_ms: float | None) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._database)
            home = self._until_it_works(self._prepare)
            if home is None:
                return
            admin = stack.enter_context(Admin(self._options.settings))
            offsets = LagOffsets(admin, self._options.group)
            topics = admin.describe_topics(*self._options.all_topics)  # raises if one is not there
            committed = offsets.committed(topics)
            store = self._until_it_works(lambda: self._take_over(home, committed, topics))
            if store is None:
                return
            inbox = self._open_inbox(store)
            if self._until_it_works(lambda: stack.enter_context(inbox)) is None:
                return
            offsets.commit({place: at for place, at in inbox.positions.items() if place in store.known})
            self._read(inbox, offsets, idle_ms)

    def _until_it_works(self, action: Callable[[], Any]) -> Any:
        """None if the run is asked to end before it has."""
        while not self._is_stopping():
            try:
                result = action()
            except DatabaseError as error:
                self._database.close()
                self._retries.failed(error)
            else:
                self._retries.succeeded()
                return result
        return None

    # -- the start ---------------------------------------------------------------------------------------------------

    def _prepare(self) -> str:
        """Everything that can be wrong with the database, before anything is read. Returns its id."""
        self._database.ensure_tables()
        self._writer.check_table(self._database)
        if self._dead_letters is not None:
            self._dead_letters.prepare(self._database)
        return home_of(self._database)

    def _take_over(
        self, home: str, committed: Mapping[TopicPartition, Position], topics: Mapping[str, TopicDescription]
    ) -> GuardedPositions:
        """Compare with what Kafka knows, and become the one that may write."""
        options, database = self._options, self._database
        missing, ahead = compare(database.load(options.name), committed)
        if missing and options.resume is None:
            assert options.group is not None
            raise refuse_missing(options.name, options.group, repr(self._target), missing)
        if ahead:
            LOG.warning(
                "The offsets of group %r are ahead of the database: it was restored to an earlier state, or another "
                "program commits in this group. The database decides, so pipeline %r goes back to it: %s.",
                options.group,
                options.name,
                describe_ahead(ahead),
            )
        table = self._target.options.rule.table
        check_no_inbox(database, options.name, options.resume)
        is_there = self._is_table_there()
        check_table(database, options.name, table, options.resume, is_there=is_there)
        if is_there and not missing:
            self._check_only_writer(topics)
        store = GuardedPositions(database, options.name, epoch=claim(database, options.name), home=home)
        note_table(database, options.name, table, was_there=is_there)
        self._writer.may_create = not is_there
        if not missing and not database.load(options.name):
            self._writer.begin_new(database)
        if missing:
            self._resume(store, missing)
        return store

    def _check_only_writer(self, topics: Mapping[str, TopicDescription]) -> None:
        """A pipeline that was renamed begins again, and a plain INSERT would write every row a second time."""
        options, rule = self._options, self._target.options.rule
        begins_later = options.start != "earliest" or (options.source is not None and options.source.after is not None)
        if rule.mode != "append" or options.resume is not None or begins_later or self._database.load(options.name):
            return
        ids = {name: None if one.topic_id is None else str(one.topic_id) for name, one in topics.items()}
        other = find_other_writer(self._database, options.name, rule.table, ids)
        if other is None:
            return
        if rule.statement is None:
            raise refuse_other_writer(options.name, other, rule.table)
        LOG.warning("Pipeline %r begins with the first records, which %r has read too.", options.name, other)

    def _is_table_there(self) -> bool:
        """With a statement of the user's own, which may write anywhere: true."""
        rule = self._target.options.rule
        return rule.statement is not None or self._database.columns(rule.table) is not None

    def _resume(self, store: GuardedPositions, missing: Mapping[TopicPartition, Position]) -> None:
        options = self._options
        LOG.warning(
            "The database has no position of pipeline %r though group %r has; by resume=%r it begins %s.",
            options.name,
            options.group,
            options.resume,
            "at the group's offsets" if options.resume == "group" else f"at the {options.start} records",
        )
        if options.resume == "database":
            with store.transaction():
                self._writer.restart(self._database)
        if options.resume == "group":
            with store.transaction() as handle:
                store.move(handle, options.name, {place: (at, at) for place, at in missing.items()})

    def _open_inbox(self, store: GuardedPositions) -> Inbox | SourceInbox:
        options, source = self._options, self._options.source
        if source is not None:
            return SourceInbox(
                store,
                options.settings,
                source=source.source,
                topics=source.topics,
                name=options.name,
                transactions_topic=source.transactions_topic,
                after=source.after,
                delivery_events_max=options.records_max,
                memory_bytes_max=source.memory_bytes_max,
                spill_folder=source.spill_folder,
            )
        return Inbox(
            store,
            options.settings,
            topics=options.topics,
            name=options.name,
            start=options.start,
            delivery_records_max=options.records_max,
        )

    # -- one batch after the other -----------------------------------------------------------------------------------

    def _read(self, inbox: Inbox | SourceInbox, offsets: LagOffsets, idle_ms: float | None) -> None:
        poll_ms = _POLL_MS if idle_ms is None else min(_POLL_MS, idle_ms)
        last_record = time.monotonic()
        while not self._is_stopping():
            try:
                committed = self._step(inbox, poll_ms)
            except DatabaseError as error:
                self._after(error)
                last_record = time.monotonic()
                continue
            except RunStopped:
                return
            except OffsetOutOfRange as error:
                error.add_note(_DELETED)
                raise
            self._retries.succeeded()
            now = time.monotonic()
            if committed is not None:
                offsets.commit(committed.next_offsets)
                last_record = time.monotonic()
            elif idle_ms is not None and (now - last_record) * 1000 >= idle_ms and inbox.is_at_end():
                return  # and not because the broker was slow to answer

    def _step(self, inbox: Inbox | SourceInbox, timeout_ms: float) -> Delivery | SourceDelivery | None:
        """The next records, written and committed; None if none came in time."""
        if self._work is None:
            delivery = self._next(inbox, timeout_ms)
            if delivery is None:
                return None
            failed: Failed = []
            portion = self._function.run(delivery.table, failed) if delivery.is_small else None
            self._work = _Work(delivery, portion, failed)
        work = self._work
        self._commit(work)
        self._work = None
        self.report.committed += 1
        self.report.records += work.delivery.count
        return work.delivery

    def _next(self, inbox: Inbox | SourceInbox, timeout_ms: float) -> Delivery | SourceDelivery | None:
        if isinstance(inbox, SourceInbox):
            return inbox.next(timeout_ms)  # whole transactions, however long they take
        return inbox.next(timeout_ms, records_max=self._function.records_max)

    def _after(self, error: DatabaseError) -> None:
        self.report.aborted += 1
        if isinstance(error, DatabaseUnreachable):
            # Whether the last commit arrived is not known here. The inbox asks the database before it goes on.
            self._work = None
            self._database.close()
        self._retries.failed(error)

    def _commit(self, work: _Work) -> None:
        failed = list(work.failed)
        made = None if work.portion is None else work.portion.made
        if made is not None and made.num_rows:
            self._writer.ensure(self._database, made.schema)
        try:
            with work.delivery:
                reach("before_write")
                if work.portion is not None:
                    self._write(work.portion, failed)
                else:
                    self._write_parts(work.delivery, failed)
                self._writer.finish(self._database)
                self._note_new_table()
                if self._dead_letters is not None:
                    self._dead_letters.write(self._database, [RefusedRow.of(row, error) for row, error in failed])
        except BaseException:
            self._end(committed=False)
            raise
        self._end(committed=True)

    def _note_new_table(self) -> None:
        """In the transaction of its first rows, so that a crash before them leaves a pipeline that may make it."""
        if self._writer.may_create and self._writer.columns:
            note_table(self._database, self._options.name, self._target.options.rule.table, was_there=True)

    def _end(self, *, committed: bool) -> None:
        self._writer.forget()
        if committed and self._writer.columns:
            self._writer.may_create = False
        if self._dead_letters is not None:
            self._dead_letters.end(committed=committed)
            self.report.dead_letters = self._dead_letters.committed_count

    def _write_parts(self, delivery: Delivery | SourceDelivery, failed: Failed) -> None:
        """What does not fit into memory at once: part by part, all within the present transaction."""
        self._database.allow_idle()  # the function takes its time in between
        for table in delivery.tables():
            self._write(self._function.run(table, failed), failed)

    def _write(self, portion: Portion, failed: Failed) -> None:
        """Write the rows of a portion. If one is refused, find the record by halves and go on without it."""
        made = portion.made
        if made is None or not made.num_rows:
            return
        try:
            with self._database.savepoint():
                self._writer.ensure(self._database, made.schema)
                for part in self._writer.part(made, portion.columns):
                    self._writer.ensure(self._database, part.schema)
                    self._writer.write_part(self._database, part)
                self._database.check_constraints()
        except ValueDoesNotFit as error:
            if portion.count > 1:
                if portion.runs_again:
                    self._database.allow_idle()
                for half in portion.halves(failed):
                    self._write(half, failed)
                return
            row = portion.first()
            named = self._writer.name_column(self._database, made, error)
            if self._dead_letters is None:
                raise ValueDoesNotFit(
                    f"{origin(row)}: {named} The transaction was rolled back and nothing of it was written; its "
                    "records come again after a restart. Fix the row in your function, or give the target "
                    'dead_letter="table" to put such records aside.',
                    row=named.row,
                    column=named.column,
                    sqlstate=named.sqlstate,
                ) from error
            failed.append((row, named))

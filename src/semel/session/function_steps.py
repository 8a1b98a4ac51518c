"""One transaction of `semel.run`: the function runs first, then what it returned is written.

So nothing is open while the function computes, and a record at which it fails is known before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import pyarrow as pa

from semel.client.cluster import Cluster
from semel.client.dead_letters import text_of
from semel.client.topic_rules import is_legal_name
from semel.errors import ConfigError, KafkaError, RecordFailed, RecordTooLarge, SemelError, UnknownTopic
from semel.session.claims import LOG
from semel.session.dead_letter_box import origin
from semel.session.outputs import (
    REFUSALS,
    NoTopicToGoTo,
    Output,
    OutputCheck,
    WrongProgram,
    as_sentence,
    outputs_of_rows,
    outputs_of_table,
    rows_made,
)
from semel.session.row_pace import RowPace
from semel.session.session import Session
from semel.session.suspects import Suspects
from semel.session.transaction import Row, Transaction, origins, rows_of
from semel.wire import ErrorCode

_REFUSED_RECORDS: Final = frozenset(
    {
        ErrorCode.message_too_large,
        ErrorCode.record_list_too_large,
        ErrorCode.invalid_record,
        ErrorCode.invalid_timestamp,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.invalid_topic_exception,
    }
)
"""What a broker answers because of the records in a batch, and not because of its own state or of rights."""


class FunctionSteps:
    """Calls the function, a transaction at a time."""

    def __init__(
        self,
        session: Session,
        transform: Callable[[Any], Any],
        *,
        to: str | None,
        by_row: bool,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._session = session
        self._transform = transform
        self._to = to
        self._check = OutputCheck(session.config.producer, _Topics(session.cluster).find, to)
        if to is not None:
            self._check_output(to)
        self._suspects = Suspects()
        self._pace = RowPace(is_stopping) if by_row else None

    def _check_output(self, to: str) -> None:
        """Find a mistyped topic before anything is read."""
        try:
            self._check.find(to)
        except NoTopicToGoTo as error:
            raise ConfigError(f"{error} Nothing was read. Create the topic, or correct to=.") from error
        if to in self._session.topics:
            LOG.warning("%r is read and written by one pipeline: what is written there is read again.", to)

    def step(self, timeout_ms: float) -> Transaction:
        """The next records, processed and committed; the transaction is empty if none came in time.

        Raises `RunStopped` if the run is to end and a function of rows is too slow to wait for the end of its portion.
        """
        transaction = self._session.transaction(timeout_ms, records_max=self._limit)
        try:
            with transaction:
                if not transaction.is_empty:
                    self._process(transaction)
        except WrongProgram as error:
            raise ConfigError(str(error)) from None
        except SemelError as error:
            if not self._is_about_records(error) or not self._session.has_dead_letters:
                raise
            if not self._suspects.failed(transaction.table, error):
                raise
            LOG.info("A transaction could not be written (%s); looking for the record that is at fault.", error)
        else:
            self._suspects.passed(transaction.table.num_rows)
        return transaction

    @property
    def _limit(self) -> int | None:
        limits = [self._suspects.limit, None if self._pace is None else self._pace.limit]
        return min((limit for limit in limits if limit is not None), default=None)

    @staticmethod
    def _is_about_records(error: SemelError) -> bool:
        if isinstance(error, KafkaError):
            return error.code in _REFUSED_RECORDS
        return isinstance(error, RecordTooLarge | ConfigError)

    def _process(self, transaction: Transaction) -> None:
        table, known_to_fail = self._suspects.split(transaction.table)
        failed = [(next(rows_of(one)), error) for one, error in known_to_fail]
        if self._pace is not None:
            outputs = self._run_on_rows(self._pace.rows(table), failed)
            self._put_aside(transaction, failed)
            for topic, row in outputs:
                timestamp_ms = row.timestamp_ms if row.timestamp_ms >= 0 else None
                transaction.send(topic, row.value, key=row.key, headers=row.headers, timestamp_ms=timestamp_ms)
        else:
            tables = self._run_on_table(table, failed)
            self._put_aside(transaction, failed)
            for topic, made in tables:
                transaction.send_table(topic, made)

    def _put_aside(self, transaction: Transaction, failed: list[tuple[Row, BaseException]]) -> None:
        """Write the dead letters, and wait for them before anything else is written.

        So if they are refused it is known that no result is at fault: to look for a record would never end.
        """
        if not failed:
            return
        row = failed[0][0]
        try:
            for row, error in failed:
                transaction.dead_letter(row, error)
            transaction.flush()
        except SemelError as error:
            if not self._is_about_records(error):
                raise
            raise self._session.dead_letters.refused(row, error) from error

    def _run_on_rows(self, rows: Iterable[Row], failed: list[tuple[Row, BaseException]]) -> list[Output]:
        outputs: list[Output] = []
        for row in rows:
            try:
                made = rows_made(self._transform(row), row)
            except WrongProgram:
                raise
            except Exception as error:
                self._fail_at(row, error, failed)
                continue
            try:
                outputs += outputs_of_rows(made, row, self._to, self._check)
            except REFUSALS as error:
                self._fail_at(row, error, failed)
        return outputs

    def _fail_at(self, row: Row, error: Exception, failed: list[tuple[Row, BaseException]]) -> None:
        if not self._session.has_dead_letters:
            raise _failed_at(row, error) from error
        failed.append((row, error))

    def _run_on_table(
        self, table: pa.Table, failed: list[tuple[Row, BaseException]]
    ) -> list[tuple[str | None, pa.Table]]:
        if not table.num_rows:
            return []
        try:
            made = self._transform(table)
        except Exception as error:
            refuse_row_function(error)
            return self._halve(table, error, failed)
        try:
            return outputs_of_table(made, self._to, self._check)
        except REFUSALS as error:
            return self._halve(table, error, failed)

    def _halve(
        self, table: pa.Table, error: Exception, failed: list[tuple[Row, BaseException]]
    ) -> list[tuple[str | None, pa.Table]]:
        if not self._session.has_dead_letters:
            raise _failed_in(table, error) from error
        # Halves, down to single records.
        if table.num_rows == 1:
            failed.append((next(rows_of(table)), error))
            return []
        half = table.num_rows // 2
        return self._run_on_table(table.slice(0, half), failed) + self._run_on_table(table.slice(half), failed)


class _Topics:
    """Whether topics are there. One that is not is asked for once a run, since the answer takes its time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._missing: dict[str, str] = {}

    def find(self, topic: str) -> object:
        if not is_legal_name(topic):
            raise UnknownTopic(
                f"{topic[:100]!r} is not a legal name for a topic; nothing was written to it.",
                code=ErrorCode.invalid_topic_exception,
            )
        if topic in self._missing:
            raise UnknownTopic(self._missing[topic], code=ErrorCode.unknown_topic_or_partition)
        try:
            return self._cluster.leaders(topic)
        except UnknownTopic as error:
            self._missing[topic] = str(error)
            raise


_WHAT_NOW: Final = (
    "The transaction was aborted and nothing of it was written; its records come again after a restart. Mend the "
    'cause, or write dead_letter="topic" to put such records aside.'
)


def refuse_row_function(error: Exception) -> None:
    """A function of rows that was given a table: no record is at fault."""
    if isinstance(error, AttributeError) and isinstance(error.obj, pa.Table) and error.name in Row._fields:
        raise WrongProgram(
            f"The function asked a table of records for its {error.name!r}, which only a single record has. To be "
            'called once for each record, write by="row"; nothing was written.'
        ) from error


def _failed_at(row: Row, error: Exception) -> RecordFailed:
    return RecordFailed(
        f"{type(error).__name__} at {origin(row)}: {as_sentence(text_of(error))} {_WHAT_NOW}",
        topic=row.topic,
        partition=row.partition,
        offset=row.offset,
    )


def _failed_in(table: pa.Table, error: Exception) -> RecordFailed:
    where = f"a table of {table.num_rows} records ({origins(table)})"
    return RecordFailed(f"{type(error).__name__} in {where}: {as_sentence(text_of(error))} {_WHAT_NOW}")

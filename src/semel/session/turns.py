"""What happens in one turn of a session: take records, write, and end the transaction, as committed or as aborted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import pyarrow as pa

from semel.client.membership import Membership
from semel.client.producer import Outcome, Producer
from semel.client.transaction_state import State
from semel.client.transactions import GroupMember
from semel.errors import CommitUnknown, Fenced, InvalidState, KafkaError, SemelError, TransactionAborted
from semel.observe import Pipeline, Work
from semel.session.claims import LOG, Claims, Safety
from semel.session.dead_letter_box import DeadLetterBox
from semel.session.inputs import Inputs, Portion, PortionLimits
from semel.session.pace import Pace
from semel.session.trace_headers import carried_contexts, with_context, with_context_row
from semel.session.transaction import Headers, Row, Transaction, origins
from semel.wire import ErrorCode

_REMOVED: Final = frozenset(
    {
        ErrorCode.illegal_generation,
        ErrorCode.unknown_member_id,
        ErrorCode.fenced_member_epoch,
        ErrorCode.stale_member_epoch,
        ErrorCode.rebalance_in_progress,
        ErrorCode.fenced_instance_id,
    }
)
"""What the coordinator says to offsets of a member that the group has gone on without."""


class Turns:
    """Belongs to the thread of the session's user."""

    def __init__(
        self,
        producer: Producer,
        inputs: Inputs,
        membership: Membership,
        claims: Claims,
        safety: Safety,
        pace: Pace,
        dead_letters: DeadLetterBox,
        pipeline: Pipeline,
    ) -> None:
        self.committed_count = 0
        self.aborted_count = 0
        self.pace = pace
        self._producer = producer
        self._inputs = inputs
        self._membership = membership
        self._claims = claims
        self._safety = safety
        self._dead_letters = dead_letters
        self._pipeline = pipeline
        self._work: Work | None = None
        self._leave_work: Callable[[], None] | None = None
        self._is_open = False
        self._began_s = 0.0
        self._ended_by_coordinator = False

    # -- reading and writing ---------------------------------------------------------------------------------------

    def take(self, timeout_ms: float, limits: PortionLimits) -> Portion:
        if self._is_open:
            raise InvalidState("A transaction of this session is open already: leave its block first.")
        self._pipeline.looked()
        fitting = replace(limits, records_max=min(limits.records_max, self.pace.limit))
        try:
            portion = self._inputs.take(timeout_ms, fitting)
        except Fenced as error:
            self._leave_if_fenced(error)
            raise
        self._claims.begin(portion.tenures)
        self._is_open = True
        self._began_s = self._producer.cluster.clock()
        self._ended_by_coordinator = False
        if not portion.is_empty:
            self._begin_work(portion.table)
        return portion

    def _begin_work(self, table: pa.Table | None) -> None:
        carried = () if table is None else carried_contexts(table)
        self._work = self._pipeline.begin(carried, transactional_id=self._producer.config.transactional_id)
        self._leave_work = self._work.enter()

    def enter_work(self) -> Callable[[], None] | None:
        """Let log and trace of this task know the open transaction too, until what is returned is called."""
        return None if self._work is None else self._work.enter()

    def _begin(self) -> None:
        self._producer.begin()
        if self._work is None:
            self._begin_work(None)
        assert self._work is not None
        identity = self._producer.identity
        self._work.note(producer_id=identity.producer_id, producer_epoch=identity.producer_epoch)

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None,
        headers: Headers,
        partition: int | None,
        timestamp_ms: int | None,
    ) -> None:
        with self._writing(topic) as producer:
            if producer is not None:
                carrying = with_context_row(headers)
                producer.send(topic, value, key=key, headers=carrying, partition=partition, timestamp_ms=timestamp_ms)

    def send_table(self, topic: str | None, table: pa.Table, *, partition: int | None) -> None:
        with self._writing(topic or "the topics that the table names") as producer:
            if producer is not None:
                producer.send_table(topic, with_context(table), partition=partition)

    def dead_letter(self, row: Row, error: BaseException | str) -> None:
        letter = self._dead_letters.take(row, error)
        if not letter.fits:  # a broker would refuse a batch of them all
            self.flush()
        self.send(letter.topic, letter.value, key=letter.key, headers=letter.headers, partition=None, timestamp_ms=None)

    def flush(self) -> None:
        """Wait until everything that was written is acknowledged; raises if it was refused."""
        with self._writing() as producer:
            if producer is not None:
                producer.flush()

    @contextmanager
    def _writing(self, topic: str | None = None) -> Iterator[Producer | None]:
        """None if the transaction can only be aborted: what is written to it then is dropped without a word."""
        if self._claims.doomed is not None:
            yield None
            return
        try:
            if self._producer.state is State.READY:
                self._begin()
            if topic is not None:
                self._claims.note_write(topic)
            yield self._producer
        except TransactionAborted as error:
            self._ended_by_coordinator = True
            self._claims.doom(str(error))

    # -- the end of a turn -----------------------------------------------------------------------------------------

    def settle(self, transaction: Transaction) -> None:
        """Commit, or abort if it must be; any other failure aborts and is raised."""
        portion = transaction.portion
        if not portion.next_offsets and self._producer.state is State.READY:
            self._end(committed=False)
            return
        try:
            reason = self._try_commit(portion)
        except CommitUnknown as error:
            reason = self._resolve(error)
        except TransactionAborted as error:
            self._ended_by_coordinator = True
            reason = str(error)
        except KafkaError as error:
            if error.code not in _REMOVED:
                self.give_up(transaction, error)
                raise
            self._membership.look_soon()
            reason = f"the group has gone on without this member ({error.code.name.upper()})"
        except BaseException as error:
            self.give_up(transaction, error)
            raise
        if reason is None:
            self._inputs.committed(portion)
            self.committed_count += 1
            transaction.outcome = Outcome.COMMITTED
            if self._work is not None:
                self._work.committed(portion.table.num_rows, dead_letters=self._dead_letters.pending_count)
            self._end(committed=True)
            self.pace.committed(portion.table.num_rows, self._took_s)
        else:
            self._abort(transaction, reason)
            if self._ended_by_coordinator and self._claims.is_overdue(took_s := self._took_s):
                self.pace.timed_out(portion.table.num_rows, took_s)
                LOG.info("The next transactions take at most %d records, so that they fit.", self.pace.limit)

    @property
    def _took_s(self) -> float:
        return self._producer.cluster.clock() - self._began_s

    def _try_commit(self, portion: Portion) -> str | None:
        """None if it is committed, or why it can only be aborted."""
        producer, claims = self._producer, self._claims
        if claims.doomed is not None:
            return claims.doomed
        if producer.state is State.READY:
            self._begin()
        producer.flush()
        claims.start_commit()
        claims.check_tenures(self._membership.tenures)
        if claims.doomed is None and (change := self._inputs.find_change(portion)) is not None:
            claims.doom(change)
        if claims.doomed is None and portion.next_offsets:
            self._send_offsets(portion)
        if claims.doomed is not None:
            return claims.doomed
        producer.commit()
        return None

    def _send_offsets(self, portion: Portion) -> None:
        membership, config, claims = self._membership, self._membership.config, self._claims
        with membership.held_still():
            # The answer to the heartbeat is on its way while the offsets are.
            is_confirmed = self._ask_to_confirm()
            identity = membership.identity
            if not self._safety.generation_fencing:
                identity = GroupMember(config.group_id or "")
            if identity is None:
                claims.doom("this session is no longer a member of its group")
            if claims.doomed is None and identity is not None:
                self._producer.send_offsets(portion.next_offsets, identity, notes=portion.notes)
            if not is_confirmed():
                claims.doom("the group did not confirm that this session is still a member of it")

    def _ask_to_confirm(self) -> Callable[[], bool]:
        if not self._safety.confirmed_commits:
            return lambda: True
        timeout_ms = self._membership.config.session_timeout_ms / 3
        return self._membership.ask_to_confirm(self._producer.cluster, timeout_ms)

    def _resolve(self, lost: CommitUnknown) -> str | None:
        LOG.info("The answer to a commit was lost; finding out what became of it.")
        try:
            outcome = self._producer.resolve()
        except SemelError as error:
            if self._work is not None:
                self._work.unknown(error)
            self._end(committed=False)
            raise CommitUnknown(
                f"A commit was sent and its answer was lost, and what became of it cannot be found out now ({error}). "
                "Make a new session: it begins at what is committed, so nothing is lost or repeated."
            ) from lost
        return None if outcome is Outcome.COMMITTED else "its commit did not arrive"

    def _abort(self, transaction: Transaction, reason: str) -> None:
        LOG.info("A transaction was aborted and its records will come again: %s.", reason.rstrip("."))
        transaction.reason = reason
        transaction.outcome = Outcome.ABORTED
        self.aborted_count += 1
        if self._work is not None:
            self._work.aborted(reason)
        try:
            if self._producer.state in (State.OPEN, State.DOOMED):
                self._producer.abort()
        except Fenced as error:
            self._leave_if_fenced(error)
            raise
        finally:
            self._inputs.rewind()
            self._end(committed=False)

    def give_up(self, transaction: Transaction, error: BaseException) -> None:
        """Abort because of `error`, which must reach the caller even if the abort fails as well."""
        if isinstance(error, Exception) and not transaction.is_empty:
            error.add_note(f"In a transaction with {origins(transaction.table)}; it is aborted, and they come again.")
        if self._work is not None:
            self._work.aborted(error)
        try:
            self._abort(transaction, f"{type(error).__name__} in the transaction")
        except SemelError as second:
            error.add_note(
                f"The abort was not confirmed ({second}); the coordinator aborts it after transaction.timeout.ms."
            )
        self._leave_if_fenced(error)

    def _leave_if_fenced(self, error: BaseException) -> None:
        """The new owner of the name needs the partitions, and this session can never use them again."""
        if isinstance(error, Fenced):
            self._membership.close()

    def _end(self, *, committed: bool) -> None:
        self._is_open = False
        self._work = None
        if self._leave_work is not None:
            self._leave_work()
            self._leave_work = None
        self._dead_letters.end(committed=committed)
        self._claims.end(committed=committed)
        self._membership.wake()

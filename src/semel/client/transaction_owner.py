"""The life of one producer's transactions: begin, commit, abort, and finding out what a lost commit became.

What may follow what is the table in `transaction_state.py`; which epoch may be claimed is decided in `ownership.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.early_writes import EarlyWrites
from semel.client.failures import failure
from semel.client.fetcher import find_marker
from semel.client.ownership import NOBODY, Owner, ProducerIdentity, decide_claim
from semel.client.partitions import TopicPartition
from semel.client.sender import Sender, Stored
from semel.client.shared import SharedTransaction
from semel.client.transaction_state import Event, State, next_state
from semel.client.transactions import GroupMember, TransactionCalls
from semel.errors import (
    BrokerUnreachable,
    CommitUnknown,
    Fenced,
    InvalidState,
    KafkaError,
    RequestTimedOut,
    SemelError,
    TransactionAborted,
)
from semel.wire import TWO_PHASE_COMMIT_VERSION, Api, ErrorCode, verdict

_DISCARD_PATIENCE_MS = 500
_TWO_PHASE_NOT_OFFERED = (ErrorCode.transactional_id_authorization_failed, ErrorCode.unsupported_version)
"""The answers of a cluster that has it switched off, does not allow it to this user, or cannot keep transactions."""
_SUCCESSOR_MS = 2_000
"""A new owner is refused while it lets the coordinator abort what is open, and comes again within so long."""


class Outcome(Enum):
    """How a transaction ended. There is no third value here: `CommitUnknown` is raised instead of told."""

    COMMITTED = "committed"
    ABORTED = "aborted"


class TransactionOwner:
    """Holds a `transactional.id` from its first InitProducerId on, which fences every older owner.

    With `resumed`, the identity after the last transaction of another process, it goes on for that one instead. It is
    fenced when it begins, if anybody else had the id in between.
    """

    def __init__(
        self,
        cluster: Cluster,
        sender: Sender,
        transactional_id: str,
        timeout_ms: int,
        resumed: ProducerIdentity | None = None,
    ) -> None:
        self.state = State.READY
        self._cluster = cluster
        self._sender = sender
        self._calls = TransactionCalls(cluster, transactional_id, timeout_ms, cluster.transaction_protocol)
        self._reason_dead: SemelError | None = None
        self._reason_doomed: SemelError | None = None
        self._may_be_open = False  # at the coordinator
        self._open_since_s = 0.0
        self._surely_open = False  # the coordinator, or a leader that asked it, has confirmed it
        self._is_ended = False  # by the coordinator itself, and known to be so
        self._in_doubt = NOBODY  # under which identity a commit was lost
        self._early_writes = EarlyWrites()
        self._written: dict[TopicPartition, int] = {}
        self._offsets_sent: dict[str, dict[TopicPartition, int]] = {}
        self._needs_new_epoch = resumed is not None
        identity, self.prepared = (resumed, None) if resumed is not None else self._take_id()
        sender.start_over(identity)

    def _take_id(self) -> tuple[ProducerIdentity, ProducerIdentity | None]:
        """Fence every older owner and abort its transaction, unless that is a two-phase one (KIP-939).

        That may be prepared, and decided elsewhere: `end_prepared` is for whoever knows the decision.
        """
        if not self._cluster.speaks(Api.INIT_PRODUCER_ID, TWO_PHASE_COMMIT_VERSION):
            return self._calls.init_producer_id(), None
        try:
            identity, kept = self._calls.keep_prepared()
        except KafkaError as error:
            if error.code != ErrorCode.unsupported_version:
                raise
            return self._calls.init_producer_id(), None  # Apache Kafka 4.1 with unstable versions switched on
        if kept is None:
            return identity, None
        owner = self._calls.owner()
        if owner is not None and owner.is_two_phase:
            return identity, kept
        return self._calls.init_producer_id(identity), None

    # -- two-phase commit ------------------------------------------------------------------------------------------

    def try_two_phase_commit(self) -> bool:
        """Let no timeout end this owner's transactions from the next one on; False if the cluster does not offer it.

        Raises `Fenced` if another owner has come.
        """
        if not self._calls.two_phase and self._cluster.speaks(Api.INIT_PRODUCER_ID, TWO_PHASE_COMMIT_VERSION):
            self._calls.two_phase = True
            try:
                identity, self.prepared = self._calls.keep_prepared(self._mine)
            except BaseException as error:
                self._calls.two_phase = False
                if isinstance(error, KafkaError) and error.code in _TWO_PHASE_NOT_OFFERED:
                    return False
                if isinstance(error, Fenced):
                    self._die(error)
                raise
            self._sender.start_over(identity)
        return self._calls.two_phase

    def end_prepared(self, *, commit: bool) -> None:
        """Carry out what was decided about the transaction that an earlier owner has prepared.

        Can be called again with the same decision if it fails.
        """
        self._check_alive()
        try:
            self._sender.start_over(self._calls.end(self._mine, commit=commit))
            self.prepared = None
            if not self._calls.two_phase:  # what was kept had no timeout, and the next transaction needs one
                self._sender.start_over(self._calls.init_producer_id(self._mine))
        except Fenced as error:
            self._die(error)
            raise

    @property
    def _mine(self) -> ProducerIdentity:
        return self._sender.identity

    @property
    def can_abort(self) -> bool:
        return self.state in (State.OPEN, State.DOOMED)

    def check_open(self) -> None:
        self._check_alive()
        if self.state is State.OPEN:
            return
        if self.state is State.DOOMED:
            why = f" Earlier: {self._reason_doomed}" if self._reason_doomed is not None else ""
            raise InvalidState(
                "An earlier call failed in this transaction, so it can only be aborted; nothing of it will be seen. "
                "Call abort(), or let the exception leave the `with` block, and begin again with records that can be "
                f"sent.{why}"
            ) from self._reason_doomed
        raise InvalidState(f"Begin a transaction before writing: this producer is {self.state.value}.")

    def doom(self, error: SemelError) -> None:
        """A record was refused before it was sent. It belongs to the transaction, which therefore cannot commit."""
        if self.state is State.OPEN:
            self._fail(error)

    def _check_alive(self) -> None:
        if self._reason_dead is not None:
            raise self._reason_dead

    def _move(self, event: Event) -> None:
        self.state = next_state(self.state, event)

    @contextmanager
    def doomed_by_failure(self) -> Iterator[None]:
        """Whatever fails inside leaves the transaction with nothing but an abort, or the producer dead."""
        try:
            yield
        except Fenced as error:
            # An epoch that the coordinator took for its own abort looks the same as that of a newer owner.
            try:
                was_ended = self.state is State.OPEN and self._was_ended_by_coordinator()
            except SemelError as second:  # the id is forgotten, or nobody answers: open is what it must not stay
                self._fail(second)
                raise
            if was_ended:
                self._move(Event.FAIL)
                raise self._ended(error) from error
            self._fail(error)
            raise
        except SemelError as error:
            self._fail(error)
            raise

    def _ended(self, error: KafkaError) -> TransactionAborted:
        self._is_ended = True
        limit = f"transaction.timeout.ms ({self._calls.timeout_ms} ms)"
        why = f"it was open for longer than {limit}" if self._is_overdue else f"it was told to, before {limit}"
        return TransactionAborted(
            f"The coordinator has aborted this transaction: {why}. Nothing of it will be seen; abort and begin again.",
            code=error.code,
        )

    def _fail(self, error: SemelError) -> None:
        if isinstance(error, KafkaError) and error.is_fatal:
            self._die(error)
        else:
            self._move(Event.FAIL)
            self._reason_doomed = self._reason_doomed or error

    def _die(self, error: SemelError) -> None:
        self._move(Event.DIE)
        self._reason_dead = error

    # -- what is in the transaction --------------------------------------------------------------------------------

    def begin(self) -> None:
        self._check_alive()
        following = next_state(self.state, Event.BEGIN)
        if self.prepared is not None:
            self.end_prepared(commit=False)
        if self._needs_new_epoch:
            self._renew_epoch()
        self._calls.protocol = self._sender.protocol = self._cluster.transaction_protocol
        self._may_be_open = self._surely_open = self._is_ended = False
        self._offsets_sent = {}
        self._written = {}
        self._reason_doomed = None
        self.state = following

    def note_sending(self) -> None:
        """Records are about to leave: from now on the transaction may be open at the coordinator."""
        if not self._may_be_open:
            if self._calls.protocol == 2:
                self._wait_for_last_markers()
            self._may_be_open, self._open_since_s = True, self._cluster.clock()

    def _wait_for_last_markers(self) -> None:
        """Only to be quicker: whatever goes wrong here, the write itself will meet and tell."""
        patience = self._cluster.patience()
        while self._early_writes.is_likely(self._cluster.clock()):
            try:
                owner = self._calls.owner(patience=self._cluster.patience(0))
            except SemelError:
                return
            if owner is None or not owner.is_undecided:
                return
            patience.pause(verdict(ErrorCode.concurrent_transactions, Api.END_TXN))

    def note_stored(self, stored: Iterable[Stored]) -> None:
        """Leaders have records of this transaction: it is open, and there its marker will be."""
        for batch in stored:
            if not self._written:
                self._early_writes.note_first_write(self._cluster.clock() - self._open_since_s)
            self._surely_open = True
            if batch.base_offset >= 0:
                self._written.setdefault(TopicPartition(batch.topic, batch.partition), batch.base_offset)

    def add_partitions(self, partitions: Collection[TopicPartition]) -> None:
        self._calls.add_partitions(self._mine, partitions)
        self._surely_open = True

    def send_offsets(
        self,
        offsets: Mapping[TopicPartition, int],
        member: GroupMember,
        notes: Mapping[TopicPartition, str] | None = None,
    ) -> None:
        self.check_open()
        self.note_sending()
        with self.doomed_by_failure():
            self._calls.commit_offsets(self._mine, offsets, member, notes or {})
        self._surely_open = True
        self._offsets_sent.setdefault(member.group_id, {}).update(offsets)

    def share(self) -> SharedTransaction:
        self.check_open()
        self.note_sending()
        calls = self._calls
        return SharedTransaction(calls.transactional_id, self._mine, calls.protocol, calls.timeout_ms)

    # -- commit ----------------------------------------------------------------------------------------------------

    def commit(self, timeout_ms: float | None) -> None:
        self._move(Event.COMMIT)
        if self._may_be_open:
            try:
                following = self._calls.end(self._mine, commit=True, patience=self._cluster.patience(timeout_ms))
            except BaseException as error:
                self._explain_commit(error)
                raise
            self._next_transaction(following)
        self._move(Event.COMMITTED)

    def _explain_commit(self, error: BaseException) -> None:
        """What a failed commit means; raises in its place where that must be said in other words."""
        if isinstance(error, KafkaError) and not error.is_earlier_try_open:
            self._explain_refusal(error)
        elif isinstance(error, BrokerUnreachable):
            self._move(Event.COMMIT_REFUSED)  # nothing was sent
        else:
            # Besides a lost answer: one that cannot be read, a login that was refused before a repeat, the refusal of a
            # repeat whose first try may have committed, an interrupt.
            self._move(Event.COMMIT_LOST)
            self._in_doubt = self._mine
            if isinstance(error, SemelError):
                raise CommitUnknown(
                    "The commit was sent and no answer tells what became of it: it may be committed or aborted. "
                    f"Call resolve() to find out, and do not write its records again before. Last: {error}"
                ) from error

    def _explain_refusal(self, error: KafkaError) -> None:
        try:
            was_ended = error.is_fatal and self._was_ended_by_coordinator()
            is_taken_over = error.is_fatal and not was_ended and self._is_taken_over()
        except BaseException as second:
            # Who has ended it is not known; the abort finds out, and in this state alone it is allowed.
            self._move(Event.COMMIT_REFUSED)
            if not isinstance(second, SemelError):
                raise
            raise TransactionAborted(
                "The coordinator has ended this transaction: it ran longer than transaction.timeout.ms, or another "
                f"producer took over. Nothing of it will be seen; abort and begin again. Last: {second}",
                code=error.code,
            ) from second
        if was_ended:
            self._move(Event.COMMIT_REFUSED)
            raise self._ended(error) from error
        if is_taken_over and not isinstance(error, Fenced):
            error = self._fenced()
            self._die(error)
            raise error
        self._fail(error)

    @property
    def _is_overdue(self) -> bool:
        """Whether the coordinator may have ended the transaction because it took too long."""
        return (
            not self._calls.two_phase and (self._cluster.clock() - self._open_since_s) * 1000 >= self._calls.timeout_ms
        )

    def _was_ended_by_coordinator(self) -> bool:
        """Whether the epoch is one that the coordinator took for its own abort, and no new owner has come.

        What has ended before its time was most likely ended for a new owner, who is about to get its epoch: until then
        nothing tells it from a time-out, so that is waited for.
        """
        if not self._surely_open:
            return False
        patience = self._cluster.patience(0 if self._is_overdue else _SUCCESSOR_MS)
        while self._stands_at_its_own_abort():
            if patience.is_spent:
                return True
            patience.pause()
        return False

    def _stands_at_its_own_abort(self) -> bool:
        owner = self._calls.owner()
        if owner is None:
            return self._try_whose_epoch(next_epoch_is_free=True) == self._mine.following
        return owner.identity == self._mine.following and not owner.is_open

    def _is_taken_over(self) -> bool:
        """Whether an epoch is there that is neither this producer's nor one for the coordinator's own abort."""
        owner = self._calls.owner()
        if owner is None or owner.identity == self._mine:
            return False
        return owner.identity != self._mine.following or owner.is_open

    def _fenced(self) -> KafkaError:
        return failure(ErrorCode.producer_fenced, Api.INIT_PRODUCER_ID, self._calls.transactional_id)

    def _next_transaction(self, following: ProducerIdentity) -> None:
        # Protocol 1 keeps the epoch at EndTxn, and a delayed EndTxn could then end the *next* transaction.
        self._needs_new_epoch = following == self._mine
        self._surely_open = False
        self._early_writes.note_end(self._cluster.clock())
        self._sender.start_over(following)

    # -- abort -----------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        was_doomed = self.state is State.DOOMED
        self._move(Event.ABORT)
        self.note_stored(self._sender.stored)
        self._sender.discard(patience_ms=_DISCARD_PATIENCE_MS)
        if self._may_be_open:
            with self.doomed_by_failure():
                if was_doomed and not self._is_ended and not self._was_ended_by_coordinator() and self._is_taken_over():
                    # Without a look the coordinator would take the abort for a repeat of its own, and let us go on.
                    raise self._fenced()
                self._end_by_abort()
        self._move(Event.ABORTED)

    def _end_by_abort(self) -> None:
        # On protocol 1 EndTxn leaves the epoch as it is, and a write that is still under way could slip into the next
        # transaction. InitProducerId aborts with markers of a higher epoch, which every leader then insists on. Only
        # where the owner cannot be asked for (before Kafka 3.0) is EndTxn the safer of the two, as it checks the epoch.
        if self._calls.protocol == 1 and (owner := self._calls.owner()) is not None:
            self._renew_epoch(owner)
            return
        try:
            self._next_transaction(self._calls.end(self._mine, commit=False))
        except KafkaError as error:
            if not isinstance(error, Fenced) and error.code != ErrorCode.invalid_txn_state:
                raise
            # The coordinator ended it before us (time-out), or it never began there, or we are fenced indeed.
            self._renew_epoch()

    # -- finding out -----------------------------------------------------------------------------------------------

    def resolve(self) -> Outcome:
        if self.state is not State.UNKNOWN:
            raise InvalidState(f"There is nothing to resolve: this producer is {self.state.value}.")
        try:
            owner = self._wait_until_decided(self._calls.owner())
        except Fenced as error:  # the id is forgotten: nothing is open, and the markers are where they were
            outcome = self._look_up_marker(self._in_doubt) or self._look_up_offsets()
            self._die(error)
            return outcome
        if owner is None:
            self._claim(None, next_epoch_is_free=False)  # it cannot be asked for: this alone ends what is open
        outcome = self._look_up_marker(self._in_doubt) or self._look_up_offsets()
        if owner is not None:
            # After an abort the next epoch is nobody's; after a commit it is ours on protocol 2, and on protocol 1 it
            # may be a successor's.
            free = outcome is Outcome.ABORTED or self._calls.protocol == 2
            self._claim(owner, next_epoch_is_free=free)
        if self.state is State.UNKNOWN:  # not before all is done: whatever has raised until here can be called again
            self._move(Event.RESOLVED)
        return outcome

    def _look_up_marker(self, identity: ProducerIdentity) -> Outcome | None:
        config, calls = self._cluster.config, self._calls
        # Protocol 2 ends a transaction under the next epoch; this one is on the marker of the transaction before.
        epoch = identity.producer_epoch + (1 if calls.protocol == 2 else 0)
        for (topic, partition), offset in self._written.items():
            marker = find_marker(
                self._cluster,
                topic,
                partition,
                identity.producer_id,
                offset,
                timeout_ms=config.api_timeout_ms,
                producer_epoch_min=epoch,
            )
            if marker is not None:
                return Outcome.COMMITTED if marker.kind == "commit" else Outcome.ABORTED
        return None

    def _look_up_offsets(self) -> Outcome:
        """A transaction of offsets alone leaves its trace only in the group: there they are, or they are not."""
        if self._written or not self._offsets_sent:
            raise CommitUnknown(
                "The partitions written in this transaction hold no marker of it (yet): its outcome cannot be told. "
                "Call resolve() again, and do not write its records again before."
            )
        admin = Admin(self._cluster)
        has_moved_on = False
        for group, offsets in self._offsets_sent.items():
            committed = admin.committed_offsets(group, list(offsets), require_stable=True)
            if any(tp not in committed or committed[tp].offset < offset for tp, offset in offsets.items()):
                return Outcome.ABORTED
            has_moved_on = has_moved_on or any(committed[tp].offset > offset for tp, offset in offsets.items())
        if has_moved_on:
            raise CommitUnknown(
                "Another member has moved the group's offsets on since, so whether this commit was carried out cannot "
                "be told. Make a new producer and read from the committed offsets: nothing is lost or repeated then."
            )
        return Outcome.COMMITTED

    # -- epochs ----------------------------------------------------------------------------------------------------

    def _renew_epoch(self, owner: Owner | None = None) -> None:
        """End what is open and raise the epoch; `Fenced` if another producer took over or the id is forgotten.

        `owner` is who was seen last, if anybody has looked.
        """
        try:
            owner = owner or self._calls.owner()
            is_open = owner is not None and owner.is_open and owner.identity == self._mine
            owner = self._wait_until_decided(owner)
        except Fenced as error:
            # To take the id anew could fence a producer that has come since: that is for a new one to decide.
            self._die(error)
            raise
        self._claim(owner, next_epoch_is_free=is_open or self._surely_open)
        self._check_alive()

    def _wait_until_decided(self, owner: Owner | None) -> Owner | None:
        """Abort the transaction if it is ours and open; wait for its markers; returns who owns the id then.

        `owner` was seen just now, and is not asked for once more where nothing is left to wait for.
        """
        patience = self._cluster.patience()
        while owner is not None and (owner.is_undecided or (owner.is_open and owner.identity == self._mine)):
            if patience.is_spent:
                raise RequestTimedOut(
                    f"The coordinator has not ended the transaction of {self._calls.transactional_id!r} in time; what "
                    "is decided will be carried out, the rest is aborted after transaction.timeout.ms. Try again."
                )
            if owner.is_open:
                self._abort_open()
            patience.pause(verdict(ErrorCode.concurrent_transactions, Api.END_TXN))
            owner = self._calls.owner()
        return owner

    def _abort_open(self) -> None:
        try:
            self._calls.init_producer_id(self._mine, patience=self._cluster.patience(0))
        except KafkaError as error:
            # CONCURRENT_TRANSACTIONS is the answer to expect: the abort is under way.
            if error.code != ErrorCode.concurrent_transactions and not isinstance(error, Fenced):
                raise

    def _claim(self, owner: Owner | None, *, next_epoch_is_free: bool) -> None:
        """Get the next epoch, or be dead if it is another producer's."""
        mine = self._mine
        try:
            if owner is None:
                claimed = self._try_whose_epoch(next_epoch_is_free=next_epoch_is_free)
            else:
                claimed = decide_claim(mine, owner, next_epoch_is_free=next_epoch_is_free)
            if claimed is None:
                raise self._fenced()
            self._sender.start_over(self._calls.init_producer_id(claimed))
        except Fenced as error:
            self._die(error)
        self._needs_new_epoch = False

    def _try_whose_epoch(self, *, next_epoch_is_free: bool) -> ProducerIdentity | None:
        """`decide_claim` where the owner cannot be asked for (before Kafka 3.0): end what is open under these epochs.

        InitProducerId must not be the first to be asked: it would abort a newer owner's open transaction. Nor must the
        next epoch come before our own: Kafka 2.5 takes a higher one for that of the open transaction, whose markers it
        then never writes.
        """
        candidates = (self._mine, self._mine.following) if next_epoch_is_free else (self._mine,)
        return next((identity for identity in candidates if self._calls.try_end_as(identity)), None)

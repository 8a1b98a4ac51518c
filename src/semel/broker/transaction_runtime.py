"""Carries out what the transaction coordinator decides: makes it durable, writes the markers, answers then.

The order is what makes a commit atomic under any crash: first the records and offsets of the transaction are safe, and
what it has consumed; then the decision is logged and safe; only then are the markers written that show it to readers.
Recovery finds either no decision, and the time-out aborts; or a decision, and its markers are written again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from kio.schema.errors import ErrorCode

from semel.broker.durability import Fsync
from semel.broker.failpoints import reach
from semel.broker.held_memory import TRANSACTIONAL_IDS_SHARE, Table
from semel.broker.pacing import Slices, finish
from semel.broker.storage.failures import StorageError
from semel.core.coordinator_hash import coordinator_partition
from semel.core.refusal import Refused
from semel.core.transaction_metadata import AT_REST, NO_IDENTITY, PROTOCOL_2
from semel.core.transaction_records import (
    TransactionTombstone,
    decode_transaction,
    encode_tombstone,
    encode_transaction,
)
from semel.core.transactions import (
    Decision,
    ProducerIdentity,
    TopicPartition,
    TransactionCoordinator,
    TransactionMetadata,
    TransactionSettings,
    TransactionStatus,
    marker_of,
)
from semel.records import reference

if TYPE_CHECKING:
    from semel.broker.configs import BrokerSettings
    from semel.broker.state import Broker
    from semel.broker.storage.partition import Partition

_LOG: Final = logging.getLogger("semel.broker")
_Response = TypeVar("_Response")

TRANSACTION_STATE: Final = "__transaction_state"
CONSUMER_OFFSETS: Final = "__consumer_offsets"
COORDINATOR_EPOCH: Final = 0
FIRST_VERSION_WITH_TAGS: Final = 1
_ID_BYTES: Final = 1_500
"""About what a transactional id takes besides its name, also while its transaction is open."""
_PARTITION_BYTES: Final = 200
"""About what each partition of an open transaction takes there."""
_MARKERS_AT_ONCE: Final = 8
"""Each of them may begin a new segment."""
_ENDED_AT_ONCE: Final = 16


class TransactionRuntime:
    """The coordinator of all transactional ids, and its log."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.coordinator = TransactionCoordinator(_settings_of(broker.settings))
        self._table = Table(
            "transactional ids",
            broker.held_memory.bytes_max // TRANSACTIONAL_IDS_SHARE,
            lambda: sum(
                _ID_BYTES + len(one.transactional_id) + _PARTITION_BYTES * len(one.partitions)
                for one in self.coordinator
            ),
            broker.clock.now_ms,
        )
        self._changing: set[str] = set()
        """Ids whose next state is on its way to the disk. Whoever asks meanwhile is told to come again."""
        self._committed_ends: dict[tuple[int, TopicPartition], int] = {}
        """Where a producer's last decided commit ended in a partition, as the log had it at the start."""

    # Requests.

    async def init_producer_id(
        self,
        transactional_id: str,
        timeout_ms: int,
        producer_id: int,
        producer_epoch: int,
        *,
        two_phase: bool = False,
        keep_prepared: bool = False,
    ) -> tuple[ProducerIdentity, ProducerIdentity]:
        """Who the asker is from now on, and under which identity the transaction was begun that it keeps, if any."""
        if not self._broker.topics.is_ready(TRANSACTION_STATE):
            await finish(
                self._broker.topics.ensure_internal_in_slices(TRANSACTION_STATE, self._broker.settings),
                self._broker.lane,
            )
        self._refuse_while_changing(transactional_id)
        if self.coordinator.get(transactional_id) is None:
            self._table.take(_ID_BYTES + len(transactional_id), ErrorCode.policy_violation)
        decision = self.coordinator.decide_init_producer_id(
            transactional_id,
            timeout_ms,
            producer_id,
            producer_epoch,
            now_ms=self._broker.clock.now_ms(),
            new_producer_id=self._broker.producer_ids.next_id,
            two_phase=two_phase,
            keep_prepared=keep_prepared,
        )
        is_kept = decision.record is not None and decision.record.status is TransactionStatus.ONGOING
        kept = decision.record.identity if is_kept and decision.record is not None else NO_IDENTITY
        return await self._carry_out(decision), kept

    def add_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Collection[TopicPartition],
        *,
        client_version: int,
    ) -> None:
        self._refuse_while_changing(transactional_id)
        decision = self.coordinator.decide_add_partitions(
            transactional_id,
            producer_id,
            producer_epoch,
            partitions,
            now_ms=self._broker.clock.now_ms(),
            client_version=client_version,
        )
        if decision.record is not None:
            before = self.coordinator.get(transactional_id)
            added = len(decision.record.partitions) - (0 if before is None else len(before.partitions))
            self._table.take(_PARTITION_BYTES * added, ErrorCode.policy_violation)
            # Not synced: after a loss of power every open transaction is aborted, whatever is known of it; and of a
            # two-phase transaction nothing is acknowledged before `wait_prepared`.
            self._log(decision.record)

    def is_two_phase(self, transactional_id: str | None) -> bool:
        """Whether what is written under this id must be safe when it is acknowledged: it may be decided elsewhere."""
        metadata = None if transactional_id is None else self.coordinator.get(transactional_id)
        return metadata is not None and metadata.is_two_phase

    async def wait_prepared(self, transactional_id: str) -> None:
        """Return when all of the transaction survives the loss of power: its producer may call it prepared then."""
        metadata = self.coordinator.get(transactional_id)
        if metadata is not None:
            written = self._existing(metadata.partitions | self._consumed_by(metadata))
            await self._broker.durability.wait_committed([*written, self._log_partition(transactional_id)])

    def verify_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Collection[TopicPartition],
        *,
        code_if_missing: ErrorCode,
    ) -> dict[TopicPartition, ErrorCode]:
        self._refuse_while_changing(transactional_id)
        return self.coordinator.decide_verify_partitions(
            transactional_id, producer_id, producer_epoch, partitions, code_if_missing=code_if_missing
        )

    async def end(
        self, transactional_id: str, producer_id: int, producer_epoch: int, committed: bool, *, client_version: int
    ) -> ProducerIdentity:
        self._refuse_while_changing(transactional_id)
        decision = self.coordinator.decide_end(
            transactional_id,
            producer_id,
            producer_epoch,
            committed,
            now_ms=self._broker.clock.now_ms(),
            client_version=client_version,
            new_producer_id=self._broker.producer_ids.next_id,
        )
        return await self._carry_out(decision)

    # Time.

    async def tick(self) -> None:
        """Abort what is over its time, finish what a full disk has held up."""
        now_ms = self._broker.clock.now_ms()
        if (deadline_ms := self.coordinator.next_deadline_ms()) is not None and deadline_ms <= now_ms:
            late = self.coordinator.late_ids(now_ms)
            for start in range(0, len(late), _ENDED_AT_ONCE):
                if start > 0:
                    await self._broker.lane.wait_turn()
                await self._time_out(late[start : start + _ENDED_AT_ONCE], now_ms)
        for number, metadata in enumerate(self.coordinator.unfinished()):
            if number > 0 and number % _ENDED_AT_ONCE == 0:
                await self._broker.lane.wait_turn()
            if self._is_still(metadata):
                self._changing.add(metadata.transactional_id)
                try:
                    await self._finish(metadata)
                finally:
                    self._changing.discard(metadata.transactional_id)

    async def _time_out(self, transactional_ids: Sequence[str], now_ms: int) -> None:
        decisions = self.coordinator.decide_timeouts(
            now_ms=now_ms, new_producer_id=self._broker.producer_ids.next_id, among=transactional_ids
        )
        judged = [(self.coordinator.get(one.record.transactional_id), one) for one in decisions if one.record]
        for metadata, decision in judged:
            if metadata is not None and self._is_still(metadata):
                self._broker.metrics.transactions_timed_out += 1
                await self._try_carry_out(decision)

    def _is_still(self, metadata: TransactionMetadata) -> bool:
        """While the one before it was waited for, its owner may have gone on: what was decided then is void."""
        name = metadata.transactional_id
        return name not in self._changing and self.coordinator.get(name) is metadata

    def try_expire(self) -> Slices[bool]:
        """Forget ids that nobody has used for long. False where the disk was full: the rest is for the next time."""
        expired = self.coordinator.decide_expirations(now_ms=self._broker.clock.now_ms())
        known = [self.coordinator.get(transactional_id) for transactional_id in expired]
        for number, (transactional_id, metadata) in enumerate(zip(expired, known, strict=True)):
            if number > 0 and number % _ENDED_AT_ONCE == 0:
                yield
            if metadata is None or not self._is_still(metadata):
                continue
            try:
                self._append(transactional_id, [encode_tombstone(transactional_id)])
            except Refused:  # it is logged, and nothing depends on forgetting
                return False
            self.coordinator.replay_tombstone(transactional_id)
        return True

    # Recovery.

    def load(self, partitions: Iterable[Partition]) -> None:
        """Replay the log, as it was replayed when it was written."""
        for partition in partitions:
            for header, batch in partition.batches():
                if header.is_control:
                    continue
                for record in reference.decode_batch(batch, check_crc=False)[1]:
                    if record.key is None:
                        continue
                    decoded = decode_transaction(record.key, record.value)
                    if isinstance(decoded, TransactionTombstone):
                        self.coordinator.replay_tombstone(decoded.transactional_id)
                    elif decoded is not None:
                        self.coordinator.replay(decoded)
                        self._note_committed_ends(decoded)
        for transactional_id in self.coordinator.replay_loaded(self._broker.clock.now_ms()):
            _LOG.warning(
                "the clock was set back since the transaction of %s began: its time-out counts from now",
                transactional_id,
            )

    def _note_committed_ends(self, metadata: TransactionMetadata) -> None:
        if metadata.status is TransactionStatus.PREPARE_COMMIT and metadata.end_offsets:
            for partition, end in zip(sorted(metadata.partitions), metadata.end_offsets, strict=True):
                self._committed_ends[metadata.producer_id, partition] = end

    async def recover(self, *, power_was_lost: bool) -> None:
        """Carry out what was decided, and abort what can no longer be completed faithfully."""
        if power_was_lost:
            await self._restore_lost_markers()
        for metadata in self.coordinator.unfinished():
            _LOG.info("completing the transaction of %s, decided before the restart", metadata.transactional_id)
            # A killed process may have left the decision unsynced. Nobody may see what the next power cut could undo.
            decided_in = self._log_partition(metadata.transactional_id)
            await self._broker.durability.wait_committed([*self._existing(metadata.partitions), decided_in])
            await self._finish(metadata)
        if power_was_lost:
            for metadata in list(self.coordinator):
                if metadata.is_two_phase and self._broker.durability.mode is not Fsync.NEVER:
                    await self._take_in_what_was_written(metadata)
                elif metadata.status is TransactionStatus.ONGOING:
                    await self._abort(metadata, "records of it may have been lost with the power")
                await self._shut_out(metadata)
        self._end_hanging()

    async def _restore_lost_markers(self) -> None:
        """Commit what was decided so and lies open, its marker having gone with the power.

        Before anything else: a transaction of the same producer that came after it may have to be aborted.
        """
        found = [
            (partition, entry)
            for partition in self._broker.all_partitions()
            for entry in partition.log.open_transactions()
            if (entry.transaction_first_offset or 0)
            < self._committed_ends.get((entry.producer_id, (partition.topic, partition.index)), 0)
        ]
        for partition, entry in found:
            _LOG.info("writing the lost commit marker of producer %d in %s", entry.producer_id, partition.path)
            try:
                self._mark(partition, entry.producer_id, entry.producer_epoch, committed=True, protocol_2=False)
            except StorageError as error:
                raise StorageError(
                    f"A committed transaction in {partition.path} cannot be shown to readers ({error}), and starting "
                    "without would lose it: free some space and start again."
                ) from error

    async def _abort(self, metadata: TransactionMetadata, reason: str) -> None:
        _LOG.warning("aborting the transaction of %s: %s", metadata.transactional_id, reason)
        decision = self.coordinator.decide_abort(
            metadata.transactional_id,
            now_ms=self._broker.clock.now_ms(),
            new_producer_id=self._broker.producer_ids.next_id,
        )
        await self._try_carry_out(decision)

    async def _take_in_what_was_written(self, metadata: TransactionMetadata) -> None:
        """A two-phase transaction goes on after a loss of power: what was acknowledged of it is there.

        That a partition came in may be lost though its records are not. Its owner has no answer yet and sends them
        again, and they would be taken for repeats; so they must be part of the transaction.
        """
        if metadata.status is not TransactionStatus.ONGOING or metadata.is_kept:
            return
        found = {
            (partition.topic, partition.index)
            for partition in self._broker.all_partitions()
            for entry in partition.log.open_transactions()
            if (entry.producer_id, entry.producer_epoch) == metadata.identity
        }
        if found <= metadata.partitions:
            return
        decision = self.coordinator.decide_add_partitions(
            metadata.transactional_id,
            *metadata.identity,
            found,
            now_ms=self._broker.clock.now_ms(),
            client_version=metadata.client_transaction_version,
        )
        await self._try_carry_out(decision)

    async def _shut_out(self, metadata: TransactionMetadata) -> None:
        """An owner that has lost the beginning of its transaction must not commit the rest of it."""
        now = self.coordinator.get(metadata.transactional_id)
        if now is None or now.status not in AT_REST:
            return  # a full disk holds up the end of its transaction
        decision = self.coordinator.decide_shut_out(
            metadata.transactional_id,
            now_ms=self._broker.clock.now_ms(),
            new_producer_id=self._broker.producer_ids.next_id,
        )
        await self._try_carry_out(decision)

    def _end_hanging(self) -> None:
        """Abort what is open in a partition and in no coordinator: nobody else ever would, and readers would wait."""
        known = {
            (one.producer_id, partition)
            for one in self.coordinator
            if one.status not in AT_REST  # one that is decided may wait for space to write its markers
            for partition in one.partitions
        }
        for partition in self._broker.all_partitions():
            for entry in partition.log.open_transactions():
                if (entry.producer_id, (partition.topic, partition.index)) not in known:
                    _LOG.warning(
                        "aborting a transaction of producer %d in %s-%d that no coordinator knows",
                        entry.producer_id,
                        partition.topic,
                        partition.index,
                    )
                    try:
                        self._mark(
                            partition, entry.producer_id, entry.producer_epoch, committed=False, protocol_2=False
                        )
                    except StorageError as error:
                        _LOG.error("readers of committed records stop there until the next start: %s", error)

    # Carrying out.

    async def _carry_out(self, decision: Decision[_Response]) -> _Response:
        record = decision.record
        if record is None:
            return decision.response
        self._changing.add(record.transactional_id)
        try:
            if record.status is TransactionStatus.PREPARE_COMMIT:
                reach("before_data_sync")
                await self._broker.durability.wait_committed(
                    self._existing(record.partitions | self._consumed_by(record))
                )
                reach("after_data_sync")
                record = self._with_end_offsets(record)
            self._log(record)
            if decision.needs_markers:
                reach("after_prepare_logged")
            await self._broker.durability.wait_committed([self._log_partition(record.transactional_id)])
            if decision.needs_markers:
                reach("after_prepare_synced")
                await self._finish(record)
        finally:
            self._changing.discard(record.transactional_id)
        if decision.refusal is not None:
            raise Refused(decision.refusal, f"{record.transactional_id!r} had an open transaction, now aborted")
        return decision.response

    def _consumed_by(self, record: TransactionMetadata) -> set[TopicPartition]:
        """Where the transaction moves positions.

        Were records below them lost with the power, others would come in their places and never be consumed, and one
        that its producer sends again would be consumed twice.
        """
        return {
            where
            for topic, index in record.partitions
            if topic == CONSUMER_OFFSETS
            for where in self._broker.groups.coordinator.offsets.pending_positions(record.producer_id, index)
        }

    def _with_end_offsets(self, record: TransactionMetadata) -> TransactionMetadata:
        if self.coordinator.settings.transaction_version < FIRST_VERSION_WITH_TAGS:
            return record
        partitions = (self._broker.partition(topic, index) for topic, index in sorted(record.partitions))
        return replace(record, end_offsets=tuple(-1 if one is None else one.log.log_end_offset for one in partitions))

    async def _try_carry_out(self, decision: Decision[_Response]) -> None:
        try:
            await self._carry_out(decision)
        except Refused as refusal:
            _LOG.warning("a transaction could not be ended yet: %s", refusal)

    async def _finish(self, metadata: TransactionMetadata) -> None:
        """Write the markers and log that they are written. With a full disk it is tried again at the next tick."""
        marker = marker_of(metadata)
        partitions = self._existing(metadata.partitions)
        ends = dict(zip(sorted(metadata.partitions), metadata.end_offsets, strict=False))
        try:
            for number, partition in enumerate(partitions):
                if number > 0:
                    reach("between_markers")
                if number > 0 and number % _MARKERS_AT_ONCE == 0:
                    await self._broker.lane.wait_turn()
                if _is_of_a_later_transaction(partition, metadata.producer_id, ends):
                    continue
                self._mark(
                    partition,
                    marker.producer_id,
                    marker.producer_epoch,
                    committed=marker.committed,
                    protocol_2=metadata.client_transaction_version >= PROTOCOL_2,
                )
            is_restorable = bool(metadata.end_offsets)
            if marker.committed and not is_restorable:
                # Once it is logged as complete, nobody would write a marker again that is lost with the power, and the
                # records before it would be aborted as left over.
                await self._broker.durability.wait_committed(partitions)
            reach("after_markers")
            decision = self.coordinator.decide_complete(metadata.transactional_id, now_ms=self._broker.clock.now_ms())
            if decision.record is not None:
                self._log(decision.record)
            reach("after_complete_logged")
            if marker.committed and not is_restorable and metadata.client_transaction_version < PROTOCOL_2:
                # The next transaction has the same epoch. Were its records to outlive the power and this one's end not,
                # the marker that is then written again would commit them.
                await self._broker.durability.wait_committed([self._log_partition(metadata.transactional_id)])
        except (StorageError, Refused) as error:
            _LOG.warning(
                "the end of %s's transaction is decided, its markers wait: %s", metadata.transactional_id, error
            )
        else:
            self._broker.metrics.count_transaction(marker.committed)

    def write_marker(
        self,
        partition: Partition,
        producer_id: int,
        producer_epoch: int,
        *,
        committed: bool,
        coordinator_epoch: int = COORDINATOR_EPOCH,
        protocol_2: bool = False,
    ) -> None:
        """End a producer's transaction in one partition, and with it what it has committed of a group's offsets."""
        partition.append_marker(
            "commit" if committed else "abort",
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            coordinator_epoch=coordinator_epoch,
            now_ms=self._broker.clock.now_ms(),
            protocol_2=protocol_2,
        )
        self._broker.durability.note_appended([partition])
        if partition.topic == CONSUMER_OFFSETS:
            self._broker.groups.replay_marker(partition, producer_id, committed=committed)

    def _mark(
        self, partition: Partition, producer_id: int, producer_epoch: int, *, committed: bool, protocol_2: bool
    ) -> None:
        try:
            self.write_marker(partition, producer_id, producer_epoch, committed=committed, protocol_2=protocol_2)
        except Refused as refusal:
            # A newer epoch has been here already: this transaction was ended then.
            _LOG.info("no marker is needed in %s-%d: %s", partition.topic, partition.index, refusal)

    def _existing(self, partitions: Iterable[TopicPartition]) -> list[Partition]:
        found = (self._broker.partition(topic, index) for topic, index in sorted(partitions))
        return [partition for partition in found if partition is not None]

    def _log_partition(self, transactional_id: str) -> Partition:
        count = self._broker.ensure_internal_topic(TRANSACTION_STATE).partition_count
        partition = self._broker.partition(TRANSACTION_STATE, coordinator_partition(transactional_id, count))
        if partition is None:
            raise Refused(ErrorCode.coordinator_not_available, f"{TRANSACTION_STATE} cannot be served")
        return partition

    def _log(self, record: TransactionMetadata) -> None:
        version = self.coordinator.settings.transaction_version
        self._append(record.transactional_id, [encode_transaction(record, transaction_version=version)])
        self.coordinator.replay(record)

    def _append(self, transactional_id: str, records: list[tuple[bytes, bytes | None]]) -> None:
        partition = self._log_partition(transactional_id)
        try:
            partition.append_records(records, now_ms=self._broker.clock.now_ms())
        except StorageError as error:
            _LOG.error("%s", error)
            # Every client retries this one, with nothing lost: the state is what it was.
            raise Refused(ErrorCode.coordinator_not_available, str(error)) from error
        self._broker.durability.note_appended([partition])

    def _refuse_while_changing(self, transactional_id: str) -> None:
        if transactional_id in self._changing:
            raise Refused(ErrorCode.concurrent_transactions, f"{transactional_id!r} is being changed at this moment")


def _is_of_a_later_transaction(partition: Partition, producer_id: int, ends: Mapping[TopicPartition, int]) -> bool:
    """Whether what the producer has open there began after this commit was decided: its marker is there already."""
    end = ends.get((partition.topic, partition.index))
    if end is None:
        return False
    first_offset = partition.log.producer_checks_for_transaction(producer_id)
    return first_offset is not None and first_offset >= end


def _settings_of(settings: BrokerSettings) -> TransactionSettings:
    return TransactionSettings(
        transaction_version=settings.transaction_version,
        transaction_timeout_max_ms=settings.transaction_timeout_max_ms,
        expiration_ms=settings.transactional_id_expiration_ms,
        two_phase_commit=settings.two_phase_commit,
    )

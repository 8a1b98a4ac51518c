"""Carries out what the group coordinator decides: logs it, applies it, and answers whoever waits."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.held_memory import GROUPS_SHARE, Table
from semel.broker.pacing import Pace, Slices
from semel.broker.storage.failures import StorageError
from semel.broker.transaction_runtime import CONSUMER_OFFSETS
from semel.core.classic_state import AnyRecord, GroupDecision, GroupSettings
from semel.core.consumer_groups import ConsumerGroupDecision, ConsumerGroups, ConsumerGroupSettings
from semel.core.coordinator_hash import coordinator_partition
from semel.core.group_coordinator import RECORD_BYTES, GroupCoordinator, decode_record, encode_record, held_bytes
from semel.core.group_offsets import OffsetDecision
from semel.core.group_records import OffsetRecord
from semel.core.refusal import Refused
from semel.records import read_control_batch, reference

if TYPE_CHECKING:
    from semel.broker.configs import BrokerSettings
    from semel.broker.state import Broker
    from semel.broker.storage.partition import Partition

_LOG: Final = logging.getLogger("semel.broker")

# A decision is one batch, and Kafka refuses those that are larger than its default `max.message.bytes`: a client could
# otherwise have a hundred megabytes of metadata kept, and logged again with every change of its group.
_REQUESTED_BYTES_MAX: Final = 1_048_588

_GROUPS_PER_MS: Final = 100
_CHANGES_AT_ONCE: Final = 16
_MEMBERS_AT_ONCE: Final = 64
_ANSWERS_AT_ONCE: Final = 32
_MEMBERS_A_CHANGE: Final = 32
"""A change of a group with so many members counts as one more change."""


class GroupRuntime:
    """The coordinator of all groups, its log, and the requests that wait for a rebalance."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.coordinator = GroupCoordinator(
            _group_settings(broker.settings), ConsumerGroups(_consumer_group_settings(broker.settings))
        )
        memory = broker.held_memory
        self.table = Table(
            "groups", memory.bytes_max // GROUPS_SHARE, self.coordinator.memory_bytes, broker.clock.now_ms
        )
        self._request_ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._look_ms = 0

    @property
    def consumer_groups(self) -> ConsumerGroups:
        return self.coordinator.consumer_groups

    # Requests.

    def wait_reply(self) -> tuple[int, asyncio.Future[Any]]:
        """A number for a request that may have to wait, and what to wait for."""
        request_id = next(self._request_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        future.add_done_callback(lambda _: self._waiting.pop(request_id, None))
        return request_id, future

    def give_up_waiting(self) -> None:
        """The broker stops: whoever waits for other members gets no answer."""
        for future in list(self._waiting.values()):
            future.cancel()

    def partition_name_of(self, group_id: str) -> tuple[str, int]:
        topic = self._broker.ensure_internal_topic(CONSUMER_OFFSETS)
        return CONSUMER_OFFSETS, coordinator_partition(group_id, topic.partition_count)

    def partition_of(self, group_id: str) -> Partition:
        partition = self._broker.partition(*self.partition_name_of(group_id))
        if partition is None:
            raise Refused(ErrorCode.coordinator_not_available, f"{CONSUMER_OFFSETS} cannot be served")
        return partition

    def carry_out(self, group_id: str, decision: GroupDecision | OffsetDecision) -> None:
        """Log a decision, let it take effect, and answer those whom it answers. Raises Refused, and nothing changed."""
        self._carry_out(group_id, decision, -1, -1, bytes_max=_REQUESTED_BYTES_MAX)

    def carry_out_transactional(
        self, group_id: str, decision: OffsetDecision, producer_id: int, producer_epoch: int
    ) -> None:
        """The same for offsets that only the transaction's marker makes count."""
        self._carry_out(group_id, decision, producer_id, producer_epoch, bytes_max=_REQUESTED_BYTES_MAX)

    def _carry_out(
        self,
        group_id: str,
        decision: GroupDecision | OffsetDecision,
        producer_id: int,
        producer_epoch: int,
        *,
        bytes_max: int | None,
    ) -> None:
        partition = self.partition_of(group_id)
        log_offset = self._log(partition, decision.records, producer_id, producer_epoch, bytes_max=bytes_max)
        self.coordinator.apply(
            group_id,
            decision,
            log_partition=partition.index,
            log_offset=log_offset,
            producer_id=None if producer_id < 0 else producer_id,
        )
        for number, (request_id, reply) in enumerate(decision.replies):
            if number < _ANSWERS_AT_ONCE:
                self._wake(request_id, reply)
            else:
                # Each is written when it is woken: a thousand members of a group do not hold up the others.
                self._broker.quick_lane.call_in_turn(partial(self._wake, request_id, reply))

    def _wake(self, request_id: int, reply: Any) -> None:
        waiting = self._waiting.get(request_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def carry_out_consumer(
        self,
        decision: ConsumerGroupDecision,
        replaced: Sequence[AnyRecord] = (),
        *,
        bytes_max: int | None = _REQUESTED_BYTES_MAX,
    ) -> None:
        """The same for a KIP-848 group. `replaced` are the tombstones of an empty classic group of that name."""
        partition = self.partition_of(decision.group_id)
        log_offset = self._log(partition, (*replaced, *decision.records), bytes_max=bytes_max)
        for number, record in enumerate(replaced):
            self.coordinator.replay(record, log_partition=partition.index, log_offset=log_offset + number)
        self.consumer_groups.replay_decision(decision)

    async def wait_durable(self, group_id: str) -> None:
        await self._broker.durability.wait_acknowledged([self.partition_of(group_id)])

    def replay_marker(self, partition: Partition, producer_id: int, *, committed: bool) -> None:
        self.coordinator.replay_marker(producer_id, committed=committed, log_partition=partition.index)

    def topic_deleted(self, topic: str) -> Slices[None]:
        """Group by group: each is decided when its turn has come."""
        for group_id, decision in self.coordinator.decide_topic_deleted(topic):
            self._try_carry_out(group_id, decision)
            yield

    # Time.

    def tick(self) -> Slices[None]:
        """Do what is due. Tens of thousands of groups are looked at less often than at every tick."""
        now_ms = self._broker.clock.now_ms()
        if now_ms >= self._look_ms:
            self._look_ms = now_ms + self.coordinator.classic_count // _GROUPS_PER_MS
            pace = Pace(_CHANGES_AT_ONCE)
            for due in self.coordinator.decide_each_due(now_ms):
                if due is not None:
                    self._try_carry_out(*due)
                if pace.is_over(_CHANGES_AT_ONCE if due is None else _weight(due[1])):
                    yield
        deadline_ms = self.consumer_groups.next_deadline_ms()
        while deadline_ms is not None and deadline_ms <= now_ms:
            for decision in self.consumer_groups.decide_tick(now_ms, _MEMBERS_AT_ONCE):
                try:
                    self.carry_out_consumer(decision, bytes_max=None)
                except Refused as refusal:
                    _LOG.warning("a member of %s could not be removed yet: %s", decision.group_id, refusal)
                    return
            deadline_ms = self.consumer_groups.next_deadline_ms()
            yield

    def expire(self) -> Slices[None]:
        settings = self._broker.settings
        pace = Pace(_CHANGES_AT_ONCE)
        for group_id, decision in self.coordinator.decide_expired(
            self._broker.clock.now_ms(), settings.offsets_retention_ms
        ):
            self._try_carry_out(group_id, decision)
            if pace.is_over():
                yield

    # Recovery.

    def load(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            for header, batch in partition.batches():
                if header.is_control:
                    marker = read_control_batch(batch, check_crc=False)
                    if marker is not None:
                        self.coordinator.replay_marker(
                            marker.producer_id, committed=marker.kind == "commit", log_partition=partition.index
                        )
                    continue
                for record in reference.decode_batch(batch, check_crc=False)[1]:
                    if record.key is None or (decoded := decode_record(record.key, record.value)) is None:
                        continue
                    self.coordinator.replay(
                        decoded,
                        log_partition=partition.index,
                        log_offset=record.offset,
                        producer_id=header.producer_id if header.is_transactional else None,
                    )
        self.coordinator.replay_loaded(self._broker.clock.now_ms())

    def _log(
        self,
        partition: Partition,
        records: Sequence[AnyRecord],
        producer_id: int = -1,
        producer_epoch: int = -1,
        *,
        bytes_max: int | None,
    ) -> int:
        if not records:
            return partition.log.log_end_offset
        encoded = [encode_record(record) for record in records]
        is_offset = isinstance(records[0], OffsetRecord)
        encoded_bytes = sum(len(key) + len(value or b"") for key, value in encoded)
        if bytes_max is not None and encoded_bytes > bytes_max:
            raise Refused(
                ErrorCode.invalid_commit_offset_size if is_offset else ErrorCode.unknown_server_error,
                f"what is to be remembered of the group is larger than {bytes_max:,} bytes",
            )
        if bytes_max is not None and any(value is not None for _, value in encoded):
            code = ErrorCode.invalid_commit_offset_size if is_offset else ErrorCode.group_max_size_reached
            self.table.take(encoded_bytes + RECORD_BYTES * len(encoded) + sum(map(held_bytes, records)), code)
        try:
            offset = partition.append_records(
                encoded,
                now_ms=self._broker.clock.now_ms(),
                producer_id=producer_id,
                producer_epoch=producer_epoch,
            )
        except StorageError as error:
            self._broker.note_storage_error(error)
            # Every client retries this one, with nothing lost: the group is what it was.
            raise Refused(ErrorCode.coordinator_not_available, str(error)) from error
        self._broker.durability.note_appended([partition])
        return offset

    def _try_carry_out(self, group_id: str, decision: GroupDecision | OffsetDecision) -> None:
        try:
            self._carry_out(group_id, decision, -1, -1, bytes_max=None)  # time asks for it, and cannot ask for less
        except Refused as refusal:
            _LOG.warning("the group %s could not be changed yet: %s", group_id, refusal)


def _weight(decision: GroupDecision) -> int:
    return 1 + (0 if decision.group is None else len(decision.group.members)) // _MEMBERS_A_CHANGE


def _group_settings(settings: BrokerSettings) -> GroupSettings:
    return GroupSettings(
        initial_rebalance_delay_ms=settings.group_initial_rebalance_delay_ms,
        min_session_timeout_ms=settings.group_session_timeout_min_ms,
        max_session_timeout_ms=settings.group_session_timeout_max_ms,
        max_size=settings.group_size_max,
        offset_metadata_max_bytes=settings.offset_metadata_bytes_max,
    )


def _consumer_group_settings(settings: BrokerSettings) -> ConsumerGroupSettings:
    return ConsumerGroupSettings(
        session_timeout_ms=settings.consumer_group_session_timeout_ms,
        heartbeat_interval_ms=settings.consumer_group_heartbeat_interval_ms,
        max_size=settings.consumer_group_size_max,
        assignors=settings.consumer_group_assignors,
        regex_refresh_interval_ms=settings.consumer_group_regex_refresh_interval_ms,
    )

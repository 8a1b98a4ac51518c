"""Holds what the clients were told against what the logs say, after every event and once more at the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from semel.broker.durability import Fsync
from semel.broker.state import Broker
from semel.broker.storage.partition import Partition
from semel.broker.transaction_runtime import CONSUMER_OFFSETS, TRANSACTION_STATE
from semel.core.classic_state import GroupState
from semel.core.transaction_metadata import (
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    PREPARED,
    TransactionMetadata,
    TransactionStatus,
)
from semel.verify.simulated_members import copied_value
from semel.verify.simulation_ledger import Ledger, TopicPartition, Violation
from semel.verify.simulation_views import Decisions, DecisionsView, LogView, OffsetsView, TopicView


class Checker:
    """Looks at one broker after another over the same ledger."""

    def __init__(self, ledger: Ledger, fsync: Fsync) -> None:
        self.ledger = ledger
        self.fsync = fsync
        self._lost: set[str] = set()
        """Values that readers had seen, and that went with the power."""
        self._refilled: dict[TopicPartition, list[range]] = {}
        """Offsets that may have been read before the power was lost: whoever stood behind them does not come back."""
        self._forget_logs()

    def _forget_logs(self) -> None:
        self.views: dict[TopicPartition, LogView] = {}
        self.places: dict[str, tuple[TopicPartition, int]] = {}
        self._decisions: Decisions = {}
        self._watched_broker: Broker | None = None
        self._pairs: list[tuple[LogView, Partition]] = []

    def _view(self, partition: Partition) -> LogView:
        name = (partition.topic, partition.index)
        if name not in self.views:
            if partition.topic == TRANSACTION_STATE:
                self.views[name] = DecisionsView(partition, self._decisions)
            elif partition.topic == CONSUMER_OFFSETS:
                self.views[name] = OffsetsView(partition, self._decisions, self.ledger)
            else:
                self.views[name] = TopicView(partition, self._decisions, self.ledger, self.places)
        return self.views[name]

    def topic_views(self, topic: str) -> list[TopicView]:
        return [view for view in self.views.values() if isinstance(view, TopicView) and view.name[0] == topic]

    def topic_view(self, where: TopicPartition) -> TopicView:
        view = self.views[where]
        assert isinstance(view, TopicView)
        return view

    # After every event.

    def check(self, broker: Broker) -> None:
        """Take up what is new in the logs. Nothing else can have changed; `check_all` sees to it that this is so."""
        are_decisions_new = False
        for view, partition in self._watched(broker):
            log = partition.log
            if (log.log_end_offset, log.high_watermark) == view.last_look:
                continue
            view.read(partition)
            if isinstance(view, OffsetsView) and view.touched:
                self._check_offsets(broker, view)
            elif isinstance(view, DecisionsView):
                are_decisions_new = True
        if are_decisions_new:
            for states in self._decisions.values():
                del states[:-1]
        if broker.metrics.unexpected_errors:
            raise Violation("the broker met an error that it does not know; see its log")

    def _watched(self, broker: Broker) -> list[tuple[LogView, Partition]]:
        """The partitions and their views, decisions first: a commit marker without one can be undone by a crash."""
        partitions = list(broker.all_partitions())
        if broker is not self._watched_broker or len(partitions) != len(self._pairs):
            self._watched_broker = broker
            partitions.sort(key=lambda one: one.topic != TRANSACTION_STATE)
            self._pairs = [(self._view(partition), partition) for partition in partitions]
        return self._pairs

    def check_all(self, broker: Broker) -> None:
        """Read all logs anew from their beginning: they say what was learned from them bit by bit."""
        self.check(broker)
        anew = Checker(self.ledger, self.fsync)
        for view, partition in self._watched(broker):
            view.read(partition)
            if isinstance(view, DecisionsView):
                continue  # of decisions only the last are kept, and the log may be compacted
            again = anew._view(partition)
            again.is_old = True
            again.read(partition)
            if again.state() != view.state():
                raise Violation(f"{view.where}, read anew, says {again.state()}, and as it grew {view.state()}")
            if isinstance(view, OffsetsView):
                view.touched.update(dict.fromkeys(view.committed))
                self._check_offsets(broker, view)

    def _check_offsets(self, broker: Broker, view: OffsetsView) -> None:
        for group_id in view.touched:
            told = broker.groups.coordinator.offsets.committed(group_id)
            mine = {where: seen.offset for where, seen in view.committed.get(group_id, {}).items()}
            if {where: value.offset for where, value in told.items()} != mine:
                raise Violation(f"the offsets of {group_id} are {told}, and the log says {mine}")
        view.touched.clear()

    def check_readable(self, where: TopicPartition, records: list[tuple[int, str]]) -> None:
        """All that a reader of committed records is given at this moment is decided, and decided so."""
        view = self.topic_view(where)
        for offset, value in records:
            seen = view.records[offset]
            if seen.value != value or seen.fate not in ("plain", "commit"):
                raise Violation(
                    f"a reader of committed records gets {value} at {where}, offset {offset}, which is {seen}"
                )

    # After a restart.

    def power_was_lost(self, broker: Broker, readers: list[Any]) -> None:
        """Read the logs anew: what may be gone is gone, what must not be is there."""
        before = {where: view for where, view in self.views.items() if isinstance(view, TopicView)}
        self._forget_logs()
        for partition in broker.all_partitions():
            self._view(partition).is_old = True
        self.check(broker)
        for view in self.views.values():
            view.is_old = False
        for where, view in before.items():
            shown = view.last_look[1]
            self._lost.update(value for at, value in view.committed() if at < shown and value not in self.places)
            self._refilled.setdefault(where, []).append(range(self.views[where].end_offset, shown))
        for transaction in self.ledger.transactions.values():
            if transaction.answered == "commit" or transaction.outcome == "commit":
                for value, where in transaction.acknowledged.items():
                    self._require(value, where, "commit", "after the loss of power")
        if self.fsync is Fsync.ALWAYS:
            for value, where in self.ledger.plain.items():
                self._require(value, where, "plain", "after the loss of power")
        else:
            self.ledger.plain = {value: where for value, where in self.ledger.plain.items() if value in self.places}
        self.ledger.forget_generations()
        for reader in readers:
            self._check_what_was_read(reader)

    def _require(self, value: str, where: TopicPartition, fate: str, when: str) -> None:
        place = self.places.get(value)
        if place is None or place[0] != where:
            raise Violation(f"{value} was acknowledged in {where}, and {when} it is at {place}")
        view = self.topic_view(where)
        if view.records[place[1]].fate != fate:
            raise Violation(f"{value} at {where} is to be {fate}, and {when} it is {view.records[place[1]].fate}")

    def _check_what_was_read(self, reader: Any) -> None:
        if not reader.is_committed:
            return
        for where, records in reader.seen.items():
            view = self.topic_view(where)
            for offset, value in records:
                seen = view.records.get(offset)
                is_transactional = value.partition("/")[0] in self.ledger.transactions
                if (is_transactional or self.fsync is Fsync.ALWAYS) and (seen is None or seen.value != value):
                    raise Violation(f"{reader.name} had read {value} at {where}, offset {offset}; now there is {seen}")

    # At the end, when all is healed and every time-out has passed.

    def check_end(self, broker: Broker) -> None:
        for view in self.views.values():
            partition = broker.partition(*view.name)
            assert partition is not None
            if not partition.last_stable_offset == partition.high_watermark == partition.log_end_offset:
                raise Violation(
                    f"{view.where} ends at {partition.log_end_offset}, with the high watermark at "
                    f"{partition.high_watermark} and the last stable offset at {partition.last_stable_offset}"
                )
        for metadata in broker.transactions.coordinator:
            if metadata.status is TransactionStatus.ONGOING or metadata.status in PREPARED:
                raise Violation(f"the transaction of {metadata.transactional_id} is still {metadata.status.title}")
        for transaction in self.ledger.transactions.values():
            if transaction.answered == "commit" and transaction.outcome != "commit":
                raise Violation(f"{transaction.key} was answered as committed and is {transaction.outcome}")
            if transaction.outcome == "commit":
                for value, where in transaction.acknowledged.items():
                    self._require(value, where, "commit", "at the end")
        for value, where in self.ledger.plain.items():
            self._require(value, where, "plain", "at the end")

    def check_reader(self, reader: Any) -> None:
        """It has seen every committed record once, in order; or every record, if it reads all."""
        for where, seen in reader.seen.items():
            view = self.topic_view(where)
            expected = (
                list(view.committed())
                if reader.is_committed
                else [(offset, record.value) for offset, record in view.records.items()]
            )
            if seen != expected:
                wrong = [pair for pair in seen if pair not in expected] or [
                    pair for pair in expected if pair not in seen
                ]
                raise Violation(f"{reader.name} has not read {where} exactly once in order: {wrong[:3]}")

    def check_copies(self, input_topic: str, output_topic: str) -> None:
        """The committed copies are the committed input, each once.

        What the power took from the input may have been copied before. What is written in its place later may be passed
        over, by a group whose position was behind it. In the mode ALWAYS nobody sees what may still be lost, so that
        there is neither.
        """
        copies = [copied_value(value) for view in self.topic_views(output_topic) for _, value in view.committed()]
        copied = set(copies)
        if len(copied) != len(copies):
            raise Violation(
                f"{output_topic} has a copy twice: {sorted(one for one in copies if copies.count(one) > 1)}"
            )
        inputs: set[str] = set()
        missing: list[str] = []
        for view in self.topic_views(input_topic):
            for offset, value in view.committed():
                inputs.add(value)
                if value not in copied and not any(offset in gap for gap in self._refilled.get(view.name, ())):
                    missing.append(value)
        surplus = copied - inputs - self._lost
        if missing or surplus:
            raise Violation(
                f"{output_topic} is no copy of {input_topic}: missing {missing[:3]}, too many {sorted(surplus)[:3]}"
            )


def state_of(broker: Broker) -> dict[str, Any]:
    """What a clean restart must read back as it was."""
    coordinator = broker.groups.coordinator
    groups: dict[str, Any] = {}
    for listed in coordinator.listed_groups():
        offsets = coordinator.offsets.committed(listed.group_id)
        groups[listed.group_id] = (offsets, coordinator.offsets.has_pending(listed.group_id), _group_of(broker, listed))
    return {
        "partitions": {
            f"{one.topic}-{one.index}": (
                one.log_start_offset,
                one.log_end_offset,
                one.last_stable_offset,
                one.log.all_aborted(),
            )
            for one in broker.all_partitions()
        },
        "transactions": {
            one.transactional_id: _as_logged(one, broker.settings.transaction_version)
            for one in broker.transactions.coordinator
        },
        "groups": groups,
        "producers": {
            f"{entry.producer_id} in {one.topic}-{one.index}": _without_clock(entry)
            for one in broker.all_partitions()
            for entry in one.log.active_producers()
        },
    }


def _as_logged(metadata: TransactionMetadata, transaction_version: int) -> TransactionMetadata:
    """The record of transaction.version 0 has no place for what came later, in Kafka neither.

    A transaction cannot have begun in the future: where the clock was set back, its time begins anew.
    """
    metadata = replace(metadata, start_ms=min(metadata.start_ms, 0))
    if transaction_version > 0:
        return metadata
    return replace(
        metadata,
        previous_producer_id=NO_PRODUCER_ID,
        next_producer_id=NO_PRODUCER_ID,
        last_producer_epoch=NO_PRODUCER_EPOCH,
        client_transaction_version=0,
    )


def _without_clock(entry: Any) -> tuple[Any, ...]:
    first_offset = -1 if entry.transaction_first_offset is None else entry.transaction_first_offset
    # A producer snapshot, as Kafka has it, holds the last batch only, and under the time of what came last.
    return (
        entry.producer_epoch,
        entry.last_timestamp_ms,
        first_offset,
        tuple(entry.batches[-1][:3]) if entry.batches else (),
    )


def _group_of(broker: Broker, listed: Any) -> Any:
    if listed.group_type == "consumer":
        return broker.groups.consumer_groups.describe(listed.group_id)
    group = broker.groups.coordinator.classic_group(listed.group_id)
    if group is None or group.state not in (GroupState.STABLE, GroupState.EMPTY):
        return None  # a rebalance is not logged before it is done
    members = {member_id: member.assignment for member_id, member in group.members.items()}
    return (group.state, group.generation_id, group.protocol_name, group.leader_id, members)


def compare_states(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Recovery equals live."""
    for part in ("partitions", "transactions", "groups", "producers"):
        # A producer that was forgotten for its idleness may be known again, from an older snapshot: as in Kafka.
        for name in sorted(before[part] if part == "producers" else before[part].keys() | after[part].keys()):
            old, new = before[part].get(name), after[part].get(name)
            if part == "groups" and old is not None and new is not None and None in (old[2], new[2]):
                old, new = old[:2], new[:2]
            if old != new:
                raise Violation(f"a clean restart changed the {part[:-1]} {name} from {old} to {new}")

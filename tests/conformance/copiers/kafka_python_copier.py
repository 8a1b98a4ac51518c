"""Copies a topic in transactions with kafka-python; see `member.py` for how it is run."""

from __future__ import annotations

from typing import Any

import kafka.errors
from kafka import ConsumerRebalanceListener, KafkaConsumer, KafkaProducer
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.structs import OffsetAndMetadata, TopicPartition
from member import Member, Settings

# This client loses its assignment when the time of a poll runs out between the answer to its SyncGroup and the next
# step: long enough for a rebalance to fit in.
POLL_MS = 2_000
Records = dict[TopicPartition, list[Any]]
FATAL = (
    kafka.errors.ProducerFencedError,
    kafka.errors.OutOfOrderSequenceNumberError,
    kafka.errors.InvalidProducerEpochError,
    kafka.errors.KafkaTimeoutError,  # the outcome is not known: a new producer fences the old one and settles it
)


class Listener(ConsumerRebalanceListener):
    def __init__(self, member: Member) -> None:
        self._member = member
        self.changes = 0

    def on_partitions_assigned(self, assigned: Any) -> None:
        self.changes += 1
        self._member.report("assigned", *sorted(one.partition for one in assigned))

    def on_partitions_revoked(self, revoked: Any) -> None:
        self.changes += 1
        self._member.report("revoked", *sorted(one.partition for one in revoked))


class Copier:
    def __init__(self, settings: Settings, member: Member) -> None:
        self._settings = settings
        self._member = member
        self._listener = Listener(member)
        self._producer = self._new_producer()
        assignor = {"eager": RangePartitionAssignor, "cooperative": CooperativeStickyAssignor}
        self._consumer: Any = KafkaConsumer(  # the type stubs are of an older release
            bootstrap_servers=settings.bootstrap,
            group_id=settings.group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            isolation_level="read_committed",
            session_timeout_ms=settings.session_timeout_ms,
            heartbeat_interval_ms=500,
            partition_assignment_strategy=(assignor[settings.protocol],),
        )

    def run(self) -> None:
        self._consumer.subscribe([self._settings.source], listener=self._listener)
        try:
            while not self._member.is_leaving:
                changes = self._listener.changes
                records = self._consumer.poll(POLL_MS, max_records=self._settings.transaction_records)
                # The client rebalances on a thread of its own: this generation is the one that these records belong to.
                group = self._consumer.group_metadata()
                if records and changes != self._listener.changes:
                    self._rewind(records)
                elif records:
                    self._copy(records, group)
        finally:
            self._consumer.close()
            self._producer.close()

    def _new_producer(self) -> KafkaProducer:
        producer = KafkaProducer(
            bootstrap_servers=self._settings.bootstrap,
            transactional_id=self._settings.transactional_id,
            linger_ms=5,
        )
        producer.init_transactions()
        return producer

    def _copy(self, records: Records, group: Any) -> None:
        count = sum(map(len, records.values()))
        try:
            self._producer.begin_transaction()
            for batch in records.values():
                for record in batch:
                    self._producer.send(self._settings.target, value=record.value, key=record.key)
            ends = {where: OffsetAndMetadata(batch[-1].offset + 1, "", -1) for where, batch in records.items()}
            self._producer.send_offsets_to_transaction(ends, group)
            if self._member.wants_abort():
                self._producer.flush()  # or the records would be dropped here instead of aborted there
                self._producer.abort_transaction()
                self._member.report("aborted", count)
                self._rewind(records)
                return
            self._producer.commit_transaction()
            self._member.report("committed", count)
        except kafka.errors.KafkaError as failure:
            self._member.report("failed", repr(failure))
            self._give_up(failure)
            self._rewind(records)

    def _give_up(self, failure: kafka.errors.KafkaError) -> None:
        if not isinstance(failure, FATAL):
            try:
                self._producer.abort_transaction()
                return
            except kafka.errors.KafkaError as worse:
                self._member.report("failed", repr(worse))
        self._producer.close(timeout=0)
        self._producer = self._new_producer()

    def _rewind(self, records: Records) -> None:
        """Back to the committed positions of what was not copied after all and is still ours."""
        for where in records:
            committed = self._consumer.committed(where)
            if where in self._consumer.assignment():
                self._consumer.seek(where, committed or 0)


def main() -> None:
    settings = Settings.from_arguments()
    member = Member(settings)
    member.wait_join()
    Copier(settings, member).run()


if __name__ == "__main__":
    main()

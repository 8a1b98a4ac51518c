"""Copies a topic in transactions with confluent-kafka; see `member.py` for how it is run."""

from __future__ import annotations

import time
from typing import Any, cast

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from member import POLL_S, RETRY_S, Member, Settings

TIMEOUT_S = 30.0


class Copier:
    """One member: its consumer, its producer, and the records that wait for the next transaction."""

    def __init__(self, settings: Settings, member: Member) -> None:
        self._settings = settings
        self._member = member
        self._batch: list[Message] = []
        self._producer = self._new_producer()
        self._consumer = Consumer(self._consumer_config())

    def run(self) -> None:
        self._consumer.subscribe(
            [self._settings.source], on_assign=self._assigned, on_revoke=self._taken, on_lost=self._taken
        )
        try:
            while not self._member.is_leaving:
                self._gather()
                if self._batch:
                    self._copy()
        finally:
            self._consumer.close()

    def _consumer_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "bootstrap.servers": self._settings.bootstrap,
            "group.id": self._settings.group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "group.protocol": "classic",
        }
        if self._settings.protocol == "consumer":
            return {**config, "group.protocol": "consumer"}  # the session and the assignor are the broker's
        strategy = {"eager": "range", "cooperative": "cooperative-sticky"}[self._settings.protocol]
        times = {"session.timeout.ms": self._settings.session_timeout_ms, "heartbeat.interval.ms": 500}
        return {**config, **times, "partition.assignment.strategy": strategy}

    def _new_producer(self) -> Producer:
        producer = Producer(
            {
                "bootstrap.servers": self._settings.bootstrap,
                "transactional.id": self._settings.transactional_id,
                "partitioner": "murmur2_random",
                "linger.ms": 5,
            }
        )
        producer.init_transactions(TIMEOUT_S)
        return producer

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._member.report("assigned", *sorted(one.partition for one in partitions))

    def _taken(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """No transaction is open here: the client calls back from `poll` only."""
        gone = {one.partition for one in partitions}
        self._batch = [message for message in self._batch if message.partition() not in gone]
        self._member.report("revoked", *sorted(gone))

    def _gather(self) -> None:
        """Up to a transaction's worth of records, or what has come within a poll's time."""
        deadline = time.monotonic() + POLL_S
        while len(self._batch) < self._settings.transaction_records and (left := deadline - time.monotonic()) > 0:
            message = self._consumer.poll(left)
            if message is None:
                continue
            if (error := message.error()) is None:
                self._batch.append(message)
            elif error.fatal():
                raise KafkaException(error)

    def _copy(self) -> None:
        batch, self._batch = self._batch, []
        try:
            self._producer.begin_transaction()
            for message in batch:
                self._producer.produce(self._settings.target, message.value(), message.key())
            self._send_offsets(batch)
            if self._member.wants_abort():
                self._producer.flush(TIMEOUT_S)  # or the records would be dropped here instead of aborted there
                self._producer.abort_transaction(TIMEOUT_S)
                self._member.report("aborted", len(batch))
                self._rewind(batch)
                return
            self._commit()
            self._member.report("committed", len(batch))
        except KafkaException as failure:
            self._member.report("failed", failure)
            self._give_up(cast(KafkaError, failure.args[0]))
            self._rewind(batch)

    def _send_offsets(self, batch: list[Message]) -> None:
        ends = {cast(int, message.partition()): cast(int, message.offset()) + 1 for message in batch}
        offsets = [TopicPartition(self._settings.source, partition, end) for partition, end in ends.items()]
        self._until_done(
            lambda: self._producer.send_offsets_to_transaction(
                offsets, self._consumer.consumer_group_metadata(), TIMEOUT_S
            )
        )

    def _commit(self) -> None:
        self._until_done(lambda: self._producer.commit_transaction(TIMEOUT_S))

    def _until_done(self, call: Any) -> None:
        """Calls again what the client says may be called again."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return call()
            except KafkaException as failure:
                if not cast(KafkaError, failure.args[0]).retriable() or time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)

    def _give_up(self, error: KafkaError) -> None:
        if error.txn_requires_abort():
            self._until_done(lambda: self._producer.abort_transaction(TIMEOUT_S))
        else:
            self._producer = self._new_producer()

    def _rewind(self, batch: list[Message]) -> None:
        """Back to the committed positions of what was not copied after all and is still ours."""
        ours = {one.partition for one in self._consumer.assignment()}
        partitions = sorted({cast(int, message.partition()) for message in batch} & ours)
        if not partitions:
            return
        asked = [TopicPartition(self._settings.source, partition) for partition in partitions]
        answers: list[TopicPartition] = []

        def ask() -> None:
            answers[:] = self._consumer.committed(asked, TIMEOUT_S)

        self._until_done(ask)
        for answer in answers:
            offset = answer.offset if answer.offset >= 0 else OFFSET_BEGINNING
            self._consumer.seek(TopicPartition(answer.topic, answer.partition, offset))


def main() -> None:
    settings = Settings.from_arguments()
    member = Member(settings)
    member.wait_join()
    Copier(settings, member).run()


if __name__ == "__main__":
    main()

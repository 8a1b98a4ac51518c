"""The Kafka side of a relay: events and progress in one transaction, and one owner for each name."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

import pyarrow as pa

from semel.bridges import failpoints
from semel.bridges.name_owner import NameOwner
from semel.bridges.relay.progress import RelayProgress, progress_key
from semel.client.cluster import Cluster
from semel.client.dead_letter_size import FittingLetter
from semel.client.progress_topic import ProgressTopic
from semel.errors import Fenced

Part = tuple[pa.Table, Collection[FittingLetter]]
"""Records, and dead letters beside them."""


def progress_topic(cluster: Cluster, topic: str) -> ProgressTopic:
    return ProgressTopic(cluster, topic, kind="progress topic", option="progress_topic=")


def read_progress(topic: ProgressTopic, name: str, *, is_owner: bool) -> RelayProgress | None:
    value = topic.read_value(
        progress_key(name), lambda value: RelayProgress.decode(value).producer_id, is_owner=is_owner
    )
    return None if value is None else RelayProgress.decode(value)


class Publisher(NameOwner):
    """Owns the transactions of a relay's name."""

    def __init__(self, settings: Mapping[str, object], name: str, topic: str) -> None:
        super().__init__("relay", name)
        # An open transaction holds readers of the topics back. A relay's takes a second at most.
        self._settings = {"linger.ms": 0, **settings, "transactional.id": progress_key(name)}
        self._topic_name = topic
        self._open()

    def _open(self, **settings: object) -> None:
        self._own({**settings, **self._settings})
        try:
            self._topic = progress_topic(self._producer.cluster, self._topic_name)
            self._topic.ensure()
        except BaseException:
            self.close()
            raise

    def reopen(self, **settings: object) -> None:
        """Go on with other settings, unless the user has given these. Takes over from any other owner again."""
        self.close()
        self._open(**settings)

    @property
    def transactional_id(self) -> str:
        return progress_key(self._name)

    def progress(self) -> RelayProgress | None:
        """What was committed last. It cannot change any more, since all earlier owners are fenced."""
        return read_progress(self._topic, self._name, is_owner=True)

    def publish(
        self, records: pa.Table, letters: Collection[FittingLetter], letter_topic: str | None, progress: RelayProgress
    ) -> RelayProgress:
        """Returns when all of it is committed, with the progress as it was written.

        Raises `CommitUnknown` if the answer was lost, and other errors if nothing of it will be seen; then `recover`.
        """
        return self.publish_parts([(records, letters)], letter_topic, lambda: progress)

    def publish_parts(
        self, parts: Iterable[Part], letter_topic: str | None, progress: Callable[[], RelayProgress]
    ) -> RelayProgress:
        """The same of several parts, of which one is in memory at a time. `progress` is asked for after the last."""
        producer = self._producer
        try:
            producer.begin()
            for records, letters in parts:
                if records.num_rows:
                    producer.send_table(None, records)
                for letter in letters:
                    assert letter_topic is not None
                    producer.send(letter_topic, letter.value, key=letter.key, headers=letter.headers)
                producer.flush()
            failpoints.reach("relay_events_written")
            at_ms = int(time.time() * 1000)
            signed = replace(progress(), at_ms=at_ms, producer_id=producer.identity.producer_id)
            place = self._topic.place(progress_key(self._name))
            producer.send(
                place.topic, signed.encode(), key=progress_key(self._name).encode(), partition=place.partition
            )
            producer.flush()
            failpoints.reach("relay_progress_written")
            producer.commit()
        except Fenced as error:
            raise self._explain(error) from error
        failpoints.reach("relay_committed")
        return signed

    def recover(self) -> RelayProgress | None:
        """After an error: end what is open, and read what was committed. May be called again if it raises."""
        self._end_open()
        return self.progress()

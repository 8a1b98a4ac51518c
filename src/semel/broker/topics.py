"""The topics there are: their ids, partition counts and configs, kept in one small file that is replaced whole.

Deciding (`decide_*`) checks by Kafka's rules and changes nothing; `create`, `grow`, `alter_config` and `delete` make
the change durable and then tell the broker, which opens and closes partitions. Another thread writes the file: one
change at a time waits for it, and nobody sees a change before it is durable.
"""

from __future__ import annotations

import json
import logging
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import UUID

from kio.schema.errors import ErrorCode

from semel.broker.config_types import InvalidConfig
from semel.broker.configs import BrokerSettings
from semel.broker.failpoints import reach
from semel.broker.pacing import ChangeLock, Slices, finish_now, write_now
from semel.broker.storage.failures import StorageError
from semel.broker.topic_configs import SEGMENT_BYTES_MIN, check_together, parse_topic_configs
from semel.broker.topic_names import colliding, refuse_bad_name
from semel.core.refusal import Refused
from semel.errors import ConfigError

if TYPE_CHECKING:
    from semel.broker.acls import MetaStore
    from semel.broker.pacing import WriteAside

_LOG: Final = logging.getLogger("semel.broker")

META_NAME: Final = "topics.json"
META_VERSION: Final = 1

OFFSETS_TOPIC: Final = "__consumer_offsets"
TRANSACTION_TOPIC: Final = "__transaction_state"
INTERNAL_TOPICS: Final = frozenset({OFFSETS_TOPIC, TRANSACTION_TOPIC})

DISK_FAILURES: Final = (OSError, StorageError)

NEW_PARTITIONS_MAX: Final = 10_000
"""Of one request, as in Kafka: it could otherwise keep the broker busy for minutes."""
TOO_MANY_PARTITIONS: Final = "Excessively large number of partitions per request."

_DEFAULT: Final = -1


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic. `configs` is what was set for it, as text under Kafka's names; the rest comes from the broker."""

    name: str
    topic_id: UUID
    partition_count: int
    configs: Mapping[str, str]

    @property
    def is_internal(self) -> bool:
        return self.name in INTERNAL_TOPICS


class TopicListener(Protocol):
    """What is done when topics change, in slices. The change is durable by then.

    An OSError or StorageError from `on_created` and `on_grown` undoes the change; they leave nothing open behind.
    """

    def on_created(self, topic: Topic, /) -> Slices[None]: ...
    def on_deleted(self, topic: Topic, /) -> Slices[None]: ...
    def on_grown(self, topic: Topic, first_new: int, /) -> Slices[None]: ...
    def on_config(self, topic: Topic, /) -> None: ...


class TopicStore:
    """All topics by name and by id, the cluster's id, and the broker configs that were altered while running."""

    def __init__(
        self,
        meta: MetaStore,
        listener: TopicListener,
        *,
        new_id: Callable[[], UUID],
        write_aside: WriteAside = write_now,
    ) -> None:
        self._meta = meta
        self._write_aside = write_aside
        self._lock = ChangeLock()
        self._listener = listener
        self._new_id = new_id
        self._topics: dict[str, Topic] = {}
        self._by_id: dict[UUID, Topic] = {}
        self._lines: dict[str, tuple[Topic, str]] = {}
        self._changing: set[str] = set()
        """Topics whose partitions are being opened or removed. Who wants to change one of them waits."""
        self.partition_count = 0
        """Of all topics but the internal ones."""
        self.broker_configs: dict[str, dict[str, str]] = {}
        """Dynamic broker configs by the broker's id as text; "" stands for all brokers."""
        stored = meta.read_meta(META_NAME)
        if stored is None:
            self.cluster_id = _new_cluster_id(new_id)
            finish_now(self._write(self._topics, self.broker_configs))
        else:
            self._load(_parse(stored))

    # -- questions -----------------------------------------------------------------------------------------------------

    def get(self, name: str) -> Topic | None:
        return self._topics.get(name)

    def by_id(self, topic_id: UUID) -> Topic | None:
        return self._by_id.get(topic_id)

    def __iter__(self) -> Iterator[Topic]:
        return iter(list(self._topics.values()))

    def __len__(self) -> int:
        return len(self._topics)

    def __contains__(self, name: object) -> bool:
        return name in self._topics

    def is_ready(self, name: str) -> bool:
        """Whether there is such a topic, and none of its partitions is still to be opened."""
        return name in self._topics and name not in self._changing

    # -- deciding ------------------------------------------------------------------------------------------------------

    def decide_create(
        self,
        name: str,
        settings: BrokerSettings,
        *,
        partition_count: int = _DEFAULT,
        replication_factor: int = _DEFAULT,
        assignments: Mapping[int, Sequence[int]] | None = None,
        configs: Mapping[str, str | None] | None = None,
    ) -> Topic:
        """The topic that would be created; -1 is the broker's default. `assignments` is brokers by partition."""
        refuse_bad_name(name)
        if name in self._topics:
            raise Refused(ErrorCode.topic_already_exists, f"Topic '{name}' already exists.")
        if name in INTERNAL_TOPICS:
            raise Refused(
                ErrorCode.invalid_topic_exception, f"Topic '{name}' is internal: the broker creates it itself."
            )
        self._refuse_collision(name)
        texts = decide_configs(configs or {}, settings)
        if assignments:
            count = _count_by_assignments(assignments, partition_count, replication_factor, settings)
        else:
            count = _count_by_numbers(partition_count, replication_factor, settings)
        self._refuse_too_many(count, settings)
        return Topic(name, self._new_topic_id(), count, texts)

    def decide_internal(self, name: str, settings: BrokerSettings) -> Topic:
        """An internal topic in its own shape, if it is not there yet."""
        there = self._topics.get(name)
        if there is not None:
            return there
        if name == OFFSETS_TOPIC:
            configs = {"compression.type": "producer", **_segment_bytes(settings.offsets_segment_bytes)}
            count = settings.offsets_partitions
        else:
            configs = {
                "compression.type": "uncompressed",
                "min.insync.replicas": str(settings.transaction_log_min_isr),
                **_segment_bytes(settings.transaction_log_segment_bytes),
                "unclean.leader.election.enable": "false",
            }
            count = settings.transaction_log_partitions
        return Topic(name, self._new_topic_id(), count, {"cleanup.policy": "compact", **configs})

    def decide_grow(
        self, name: str, count: int, settings: BrokerSettings, assignments: Sequence[Sequence[int]] | None = None
    ) -> Topic:
        """The topic with `count` partitions in all."""
        topic = self._topics.get(name)
        if topic is None:
            raise Refused(ErrorCode.unknown_topic_or_partition, "This server does not host this topic-partition.")
        if topic.is_internal:
            # Groups and transactional ids are found by hash modulo this count: they would be looked for elsewhere.
            raise Refused(ErrorCode.policy_violation, f"Topic '{name}' is internal: its partition count cannot change.")
        if count == topic.partition_count:
            raise Refused(ErrorCode.invalid_partitions, f"Topic already has {count} partition(s).")
        if count < topic.partition_count:
            there = f"The topic {name} currently has {topic.partition_count} partition(s)"
            raise Refused(ErrorCode.invalid_partitions, f"{there}; {count} would not be an increase.")
        if assignments is not None:
            new = count - topic.partition_count
            if len(assignments) != new:
                raise Refused(
                    ErrorCode.invalid_replica_assignment,
                    f"Attempted to add {new} additional partition(s), but only {len(assignments)} assignment(s) were "
                    "specified.",
                )
            for broker_ids in assignments:
                _refuse_bad_replicas(broker_ids, settings)
        self._refuse_too_many(count - topic.partition_count, settings)
        return replace(topic, partition_count=count)

    def _refuse_collision(self, name: str) -> None:
        other = colliding(name, self._topics)
        if other is not None:
            raise Refused(ErrorCode.invalid_topic_exception, f"Topic '{name}' collides with existing topic: {other}")

    def _refuse_too_many(self, new: int, settings: BrokerSettings) -> None:
        if self.partition_count + new > settings.partitions_max:
            raise Refused(
                ErrorCode.policy_violation,
                f"The broker has {self.partition_count:,} partitions; with {new:,} more it would be over "
                f"the {settings.partitions_max:,} that semel.partitions.max and semel.client.memory.max.bytes allow. "
                "Nothing was created. Delete topics, or raise these settings.",
            )

    # -- changing ------------------------------------------------------------------------------------------------------

    def create(self, topic: Topic) -> Topic:
        """Create what `decide_create` gave. Durable when this returns."""
        return finish_now(self.create_in_slices(topic))

    def create_in_slices(self, topic: Topic, settings: BrokerSettings | None = None) -> Slices[Topic]:
        """The same, where others may have their turns. With `settings`, what they have created by then counts too."""
        yield from self._begin(topic.name)
        try:

            def decide(topics: dict[str, Topic]) -> dict[str, Topic]:
                if topic.name in topics:
                    raise Refused(ErrorCode.topic_already_exists, f"Topic '{topic.name}' already exists.")
                if settings is not None:
                    self._refuse_collision(topic.name)
                    self._refuse_too_many(topic.partition_count, settings)
                return {**topics, topic.name: topic}

            yield from self._change(decide)
            reach("after_topic_stored")
            try:
                yield from self._listener.on_created(topic)
            except DISK_FAILURES as error:
                yield from self._undo(
                    lambda topics: {name: there for name, there in topics.items() if name != topic.name}, error
                )
        finally:
            self._changing.discard(topic.name)
        return topic

    def _begin(self, name: str) -> Slices[None]:
        """Wait until nobody else changes the topic."""
        while name in self._changing:
            yield self._lock.pause
        self._changing.add(name)

    def ensure_internal(self, name: str, settings: BrokerSettings) -> Topic:
        """The internal topic of this name, created first if it is missing."""
        there = self._topics.get(name)
        if there is None and self._lock.is_held:
            raise Refused(ErrorCode.coordinator_not_available, f"{name} cannot be created at this moment.")
        return there or self.create(self.decide_internal(name, settings))

    def ensure_internal_in_slices(self, name: str, settings: BrokerSettings) -> Slices[Topic]:
        """The same, where others may have their turns."""
        while not self.is_ready(name):
            if name in self._changing:
                yield self._lock.pause
            else:
                yield from self.create_in_slices(self.decide_internal(name, settings))
        return self._topics[name]

    def grow(self, topic: Topic) -> Topic:
        """Add the partitions that `decide_grow` gave. Durable when this returns."""
        return finish_now(self.grow_in_slices(topic.name, lambda: topic))

    def grow_in_slices(self, name: str, decide: Callable[[], Topic]) -> Slices[Topic]:
        """The same, where others may have their turns before and between. `decide` is called at the right time."""
        yield from self._begin(name)
        try:
            before = self._topics.get(name)
            yield from self._change(lambda topics: {**topics, name: decide()})
            topic = self._topics[name]
            assert before is not None, "a topic that is not there cannot have been grown"
            try:
                yield from self._listener.on_grown(topic, before.partition_count)
            except DISK_FAILURES as error:
                yield from self._undo(
                    lambda topics: {**topics, name: replace(topics[name], partition_count=before.partition_count)},
                    error,
                )
        finally:
            self._changing.discard(name)
        return topic

    def alter_config(self, name: str, configs: Mapping[str, str]) -> Topic:
        """Replace a topic's configs by these, which `decide_configs` has checked."""
        return finish_now(self.alter_config_in_slices(name, lambda _: configs))

    def alter_config_in_slices(self, name: str, decide: Callable[[Topic], Mapping[str, str]]) -> Slices[Topic]:
        """Replace a topic's configs by what `decide` makes of the topic at the right time."""

        def change(topics: dict[str, Topic]) -> dict[str, Topic]:
            there = topics.get(name)
            if there is None:
                raise Refused(ErrorCode.unknown_topic_or_partition, f"The topic '{name}' does not exist.")
            return {**topics, name: replace(there, configs=dict(decide(there)))}

        yield from self._change(change)
        topic = self._topics[name]
        self._listener.on_config(topic)
        return topic

    def delete(self, name: str) -> Topic:
        """Forget a topic. Once this is durable its partitions are nobody's, whatever of them is still on disk."""
        return finish_now(self.delete_in_slices(name))

    def delete_in_slices(self, name: str) -> Slices[Topic]:
        """The same, where others may have their turns between the partitions."""
        yield from self._begin(name)
        try:
            if name not in self._topics:
                raise Refused(ErrorCode.unknown_topic_or_partition, f"Topic '{name}' was deleted by another request.")
            topic = self._topics[name]

            def forget(topics: dict[str, Topic]) -> dict[str, Topic]:
                nonlocal topic
                topic = topics[name]
                return {other: there for other, there in topics.items() if other != name}

            yield from self._change(forget)
            reach("after_topic_forgotten")
            try:
                yield from self._listener.on_deleted(topic)
            except DISK_FAILURES as error:
                _LOG.warning("topic %s is deleted, but not all of its files: %s", name, error)
        finally:
            self._changing.discard(name)
        return topic

    def alter_broker_config(self, broker: str, configs: Mapping[str, str]) -> None:
        """Replace the dynamic configs of a broker ("" for all)."""
        finish_now(self.alter_broker_config_in_slices(broker, lambda: configs))

    def alter_broker_config_in_slices(self, broker: str, decide: Callable[[], Mapping[str, str]]) -> Slices[None]:
        """The same with what `decide` says at the right time.

        Every topic's defaults may have changed with them: the caller puts the new settings in force and then calls
        `reconfigure_all`.
        """

        def change() -> Slices[None]:
            configs = {name: texts for name, texts in self.broker_configs.items() if name != broker}
            if texts := decide():
                configs[broker] = dict(texts)
            try:
                yield from self._write(self._topics, configs)
            except DISK_FAILURES as error:
                raise _not_stored(error) from error
            self.broker_configs = configs

        return self._lock.hold(change)

    def reconfigure_all(self) -> None:
        for topic in self:
            self._listener.on_config(topic)

    # -- on disk -------------------------------------------------------------------------------------------------------

    def _change(self, decide: Callable[[dict[str, Topic]], dict[str, Topic]]) -> Slices[None]:
        """Store the topics that `decide` makes of those there are, and then let them take effect."""

        def change() -> Slices[None]:
            topics = decide(self._topics)
            try:
                yield from self._write(topics, self.broker_configs)
            except DISK_FAILURES as error:
                raise _not_stored(error) from error
            self._replay(topics)

        return self._lock.hold(change)

    def _undo(self, decide: Callable[[dict[str, Topic]], dict[str, Topic]], cause: Exception) -> Slices[None]:
        # In memory the change is taken back in any case. If the disk refuses this too, the next start finds the
        # topic with empty partitions: the client was told of an error, so either is a right outcome.
        def change() -> Slices[None]:
            topics = decide(self._topics)
            self._replay(topics)
            try:
                yield from self._write(topics, self.broker_configs)
            except DISK_FAILURES as error:
                raise _not_stored(error) from cause

        yield from self._lock.hold(change)
        raise _not_stored(cause) from cause

    def _replay(self, topics: dict[str, Topic]) -> None:
        self._topics = topics
        self._by_id = {topic.topic_id: topic for topic in topics.values()}
        self.partition_count = sum(topic.partition_count for topic in topics.values() if not topic.is_internal)

    def _write(self, topics: Mapping[str, Topic], broker_configs: Mapping[str, Mapping[str, str]]) -> Slices[None]:
        head = {"version": META_VERSION, "cluster_id": self.cluster_id, "broker_configs": broker_configs}
        self._lines = {topic.name: (topic, self._line(topic)) for topic in topics.values()}
        lines = [line for _, line in self._lines.values()]

        def write() -> None:
            joined = ",\n".join(lines)
            text = f'{json.dumps(head)[:-1]}, "topics": [\n{joined}\n]}}\n'
            self._meta.write_meta(META_NAME, text.encode())

        return self._write_aside(write)

    def _line(self, topic: Topic) -> str:
        """Kept as text: writing all topics anew for each would make a request for a thousand of them last minutes."""
        topic_then, line = self._lines.get(topic.name, (None, ""))
        if topic_then is topic:
            return line
        return json.dumps(
            {
                "name": topic.name,
                "id": str(topic.topic_id),
                "partitions": topic.partition_count,
                "configs": dict(topic.configs),
            }
        )

    def _load(self, content: Any) -> None:
        try:
            self.cluster_id = str(content["cluster_id"])
            self.broker_configs = {broker: dict(texts) for broker, texts in content["broker_configs"].items()}
            topics = [
                Topic(item["name"], UUID(item["id"]), int(item["partitions"]), dict(item["configs"]))
                for item in content["topics"]
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(repr(error)) from error
        self._replay({topic.name: topic for topic in topics})

    def _new_topic_id(self) -> UUID:
        topic_id = self._new_id()
        while topic_id in self._by_id:
            topic_id = self._new_id()
        return topic_id


# -- rules -------------------------------------------------------------------------------------------------------------


def decide_configs(configs: Mapping[str, str | None], settings: BrokerSettings) -> dict[str, str]:
    """Topic configs that may be set, as they are to be stored; otherwise INVALID_CONFIG."""
    nothing = [name for name, text in configs.items() if text is None]
    if nothing:
        raise Refused(
            ErrorCode.invalid_config, f"Null value not supported for topic configs: {','.join(sorted(nothing))}"
        )
    texts = {name: text.strip() for name, text in configs.items() if text is not None}
    try:
        check_together({**settings.topic_defaults, **parse_topic_configs(texts)})
    except InvalidConfig as error:
        raise Refused(ErrorCode.invalid_config, str(error)) from error
    return texts


def _count_by_numbers(partition_count: int, replication_factor: int, settings: BrokerSettings) -> int:
    if partition_count < _DEFAULT or partition_count == 0:
        raise Refused(ErrorCode.invalid_partitions, "Number of partitions was set to an invalid non-positive value.")
    if replication_factor < _DEFAULT or replication_factor == 0:
        raise Refused(
            ErrorCode.invalid_replication_factor,
            "Replication factor must be larger than 0, or -1 to use the default value.",
        )
    if replication_factor > 1:
        raise Refused(
            ErrorCode.invalid_replication_factor,
            f"Unable to replicate the partition {replication_factor} time(s): The target replication factor of "
            f"{replication_factor} cannot be reached because only 1 broker(s) are registered.",
        )
    return settings.num_partitions if partition_count == _DEFAULT else partition_count


def _count_by_assignments(
    assignments: Mapping[int, Sequence[int]], partition_count: int, replication_factor: int, settings: BrokerSettings
) -> int:
    for given, what in ((replication_factor, "replication factor"), (partition_count, "number of partitions")):
        if given != _DEFAULT:
            raise Refused(
                ErrorCode.invalid_request,
                f"A manual partition assignment was specified, but {what} was not set to -1.",
            )
    for broker_ids in assignments.values():
        _refuse_bad_replicas(broker_ids, settings)
    if sorted(assignments) != list(range(len(assignments))):
        raise Refused(
            ErrorCode.invalid_replica_assignment, "partitions should be a consecutive 0-based integer sequence"
        )
    return len(assignments)


def _refuse_bad_replicas(broker_ids: Sequence[int], settings: BrokerSettings) -> None:
    complaint = None
    if not broker_ids:
        complaint = "an empty replica list."
    elif len(set(broker_ids)) < len(broker_ids):
        twice = Counter(broker_ids).most_common(1)[0][0]
        complaint = f"the broker {twice} more than once."
    else:
        unknown = next((broker for broker in broker_ids if broker != settings.node_id), None)
        if unknown is not None:
            complaint = f"broker {unknown}, but no such broker is registered."
    if complaint is not None:
        raise Refused(ErrorCode.invalid_replica_assignment, f"The manual partition assignment includes {complaint}")


def _segment_bytes(count: int) -> dict[str, str]:
    # The broker's configs for internal topics have no lower bound, the topic config has (KIP-1030).
    return {"segment.bytes" if count >= SEGMENT_BYTES_MIN else "internal.segment.bytes": str(count)}


# -- small things ------------------------------------------------------------------------------------------------------


def _new_cluster_id(new_id: Callable[[], UUID]) -> str:
    text = "-"
    while text.startswith("-"):  # Kafka's tools would take it for an option
        text = urlsafe_b64encode(new_id().bytes).decode().rstrip("=")
    return text


def _parse(stored: bytes) -> Any:
    try:
        content = json.loads(stored)
    except ValueError as error:
        raise _damaged(str(error)) from error
    version = content.get("version") if isinstance(content, dict) else None
    if version != META_VERSION:
        raise ConfigError(
            f"{META_NAME} in the data directory has version {version}, and this Semel reads version {META_VERSION}. "
            "Nothing was changed; use the Semel that wrote it."
        )
    return content


def _damaged(reason: str) -> ConfigError:
    return ConfigError(
        f"{META_NAME} in the data directory cannot be read ({reason}). The records are still there, but no topic is "
        "known; restore this file from a copy of the folder."
    )


def _not_stored(error: Exception) -> Refused:
    return Refused(ErrorCode.kafka_storage_error, f"The change could not be stored: {error}")

"""The broker's settings under Kafka's names: one table, read as typed attributes, with what was set and where."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Generic, NoReturn, TypeVar, overload

from semel.broker.config_types import (
    INT_MAX,
    LONG_MAX,
    Check,
    ConfigKey,
    ConfigType,
    InvalidConfig,
    Value,
    at_least,
    between,
    each_of,
    render,
)
from semel.broker.held_memory import HELD_BYTES_MAX, HELD_BYTES_MIN, PARTITION_BYTES, PARTITIONS_SHARE
from semel.broker.kafka_names import IGNORED_NAMES, PREFIXES
from semel.broker.storage.log_settings import LogSettings
from semel.broker.topic_configs import TOPIC_CONFIGS, parse_topic_configs

T = TypeVar("T")

_LOG: Final = logging.getLogger("semel.broker")
_DAY_MS: Final = 86_400_000
_EMPTY: Final[Mapping[str, str]] = {}


class Source(IntEnum):
    """Where a value comes from, by its number in DescribeConfigs."""

    TOPIC = 1
    BROKER = 2
    ALL_BROKERS = 3
    START_UP = 4
    DEFAULT = 5


class _Setting(Generic[T]):
    """An attribute of `BrokerSettings` that reads one config."""

    def __init__(self, key: ConfigKey) -> None:
        self.key = key

    @overload
    def __get__(self, instance: None, owner: type) -> _Setting[T]: ...
    @overload
    def __get__(self, instance: BrokerSettings, owner: type) -> T: ...
    def __get__(self, instance: BrokerSettings | None, owner: type) -> T | _Setting[T]:
        return self if instance is None else instance.values[self.key.name]

    def __set__(self, instance: BrokerSettings, value: T) -> NoReturn:
        raise AttributeError(f"{self.key.name} cannot be set here: settings are replaced whole")


def _int(name: str, default: int, check: Check | None = None, *, dynamic: bool = False) -> _Setting[int]:
    return _Setting(ConfigKey(name, ConfigType.INT, default, check, is_dynamic=dynamic))


def _long(name: str, default: int, check: Check | None = None, *, dynamic: bool = False) -> _Setting[int]:
    return _Setting(ConfigKey(name, ConfigType.LONG, default, check, is_dynamic=dynamic))


def _flag(name: str, default: bool, *, dynamic: bool = False) -> _Setting[bool]:
    return _Setting(ConfigKey(name, ConfigType.BOOLEAN, default, is_dynamic=dynamic))


def _text(name: str, default: str, check: Check | None = None) -> _Setting[str]:
    return _Setting(ConfigKey(name, ConfigType.STRING, default, check))


def _optional(name: str) -> _Setting[str | None]:
    return _Setting(ConfigKey(name, ConfigType.STRING, None))


def _words(name: str, default: tuple[str, ...], check: Check | None = None) -> _Setting[tuple[str, ...]]:
    return _Setting(ConfigKey(name, ConfigType.LIST, default, check))


def _one_copy(name: str, value: int) -> str | None:
    if value == 1:
        return None
    return (
        f"{name} is {value}, but this is one broker, which keeps one copy of the data. Leave it at 1, or use a cluster "
        f"of Apache Kafka"
    )


def _copies(name: str, kind: ConfigType = ConfigType.SHORT) -> _Setting[int]:
    return _Setting(ConfigKey(name, kind, 1, _one_copy))


class BrokerSettings:
    """All settings, typed, from a mapping of Kafka's names; never changed, only replaced.

    `static` is what was given at start-up; `dynamic_default` (all brokers) and `dynamic` (this broker) what was altered
    while running, the latter stronger. Names that are not known are kept in `unknown`, as Kafka accepts them. A value
    that cannot be raises InvalidConfig, which is a ConfigError.

    >>> settings = BrokerSettings({"num.partitions": 3, "transaction.max.timeout.ms": "60000"})
    >>> settings.num_partitions, settings.transaction_timeout_max_ms, settings.auto_create_topics
    (3, 60000, True)
    """

    # -- who and where -------------------------------------------------------------------------------------------------
    node_id = _int("node.id", 1, at_least(0))
    rack = _optional("broker.rack")
    log_dirs = _words("log.dirs", ())

    # -- security ------------------------------------------------------------------------------------------------------
    authorizer_class_name = _text("authorizer.class.name", "")
    super_users = _text("super.users", "")
    rules_max = _int("semel.acls.max", 10_000, at_least(0))
    scram_credentials_max = _int("semel.scram.credentials.max", 10_000, at_least(0))
    allow_everyone_if_no_acl_found = _flag("allow.everyone.if.no.acl.found", False)

    # -- connections and requests --------------------------------------------------------------------------------------
    socket_request_bytes_max = _int("socket.request.max.bytes", 104_857_600, at_least(1))
    connections_idle_max_ms = _long("connections.max.idle.ms", 600_000)
    session_lifetime_ms = _long("connections.max.reauth.ms", 0, at_least(0))
    failed_login_delay_ms = _int("connection.failed.authentication.delay.ms", 100, at_least(0))
    client_memory_bytes_max = _long("semel.client.memory.max.bytes", HELD_BYTES_MAX, at_least(HELD_BYTES_MIN))
    fetch_bytes_max = _int("fetch.max.bytes", 57_671_680, at_least(1024))
    fetch_sessions_max = _int("max.incremental.fetch.session.cache.slots", 1000, at_least(0))
    request_partitions_max = _int("max.request.partition.size.limit", 2000, at_least(1))

    # -- topics and their logs -----------------------------------------------------------------------------------------
    configured_partitions_max = _int("semel.partitions.max", 4_000, at_least(1), dynamic=True)
    num_partitions = _int("num.partitions", 1, at_least(1))
    default_replication_factor = _copies("default.replication.factor", ConfigType.INT)
    auto_create_topics = _flag("auto.create.topics.enable", True)
    delete_topics = _flag("delete.topic.enable", True)
    retention_check_interval_ms = _long("log.retention.check.interval.ms", 300_000, at_least(1))
    cleaner_enabled = _flag("log.cleaner.enable", True)
    cleaner_backoff_ms = _long("log.cleaner.backoff.ms", 15_000, at_least(0), dynamic=True)

    # -- producers and transactions ------------------------------------------------------------------------------------
    # Every commit syncs one partition of __transaction_state, so fewer of them share more syncs.
    transaction_log_partitions = _int("transaction.state.log.num.partitions", 4, at_least(1))
    transaction_log_segment_bytes = _int("transaction.state.log.segment.bytes", 104_857_600, at_least(1))
    transaction_log_min_isr = _int("transaction.state.log.min.isr", 1, at_least(1))
    transaction_log_replication_factor = _copies("transaction.state.log.replication.factor")
    transaction_version = _int("transaction.version", 2, between(0, 2))
    two_phase_commit = _flag("transaction.two.phase.commit.enable", False)
    transaction_timeout_max_ms = _int("transaction.max.timeout.ms", 900_000, at_least(1))
    transactional_id_expiration_ms = _int("transactional.id.expiration.ms", 7 * _DAY_MS, at_least(1))
    transactional_id_expiration_check_interval_ms = _int(
        "transaction.remove.expired.transaction.cleanup.interval.ms", 3_600_000, at_least(1)
    )
    transaction_partition_verification = _flag("transaction.partition.verification.enable", True, dynamic=True)
    producer_id_expiration_ms = _int("producer.id.expiration.ms", _DAY_MS, at_least(1), dynamic=True)
    producer_id_expiration_check_interval_ms = _int("producer.id.expiration.check.interval.ms", 600_000, at_least(1))

    # -- groups and their offsets --------------------------------------------------------------------------------------
    # Kafka waits 3 s for more members of a new group; in tests and on one machine that is only slow.
    group_initial_rebalance_delay_ms = _int("group.initial.rebalance.delay.ms", 0, at_least(0))
    group_session_timeout_min_ms = _int("group.min.session.timeout.ms", 6_000)
    group_session_timeout_max_ms = _int("group.max.session.timeout.ms", 1_800_000)
    # Kafka has no limit. All members of a group are looked at in one turn of the loop when its join phase ends.
    group_size_max = _int("group.max.size", 1_000, at_least(1))
    group_protocols = _words(
        "group.coordinator.rebalance.protocols", ("classic", "consumer"), each_of("classic", "consumer", "streams")
    )
    consumer_group_session_timeout_ms = _int("group.consumer.session.timeout.ms", 45_000, at_least(1))
    consumer_group_session_timeout_min_ms = _int("group.consumer.min.session.timeout.ms", 45_000, at_least(1))
    consumer_group_session_timeout_max_ms = _int("group.consumer.max.session.timeout.ms", 60_000, at_least(1))
    consumer_group_heartbeat_interval_ms = _int("group.consumer.heartbeat.interval.ms", 5_000, at_least(1))
    consumer_group_heartbeat_interval_min_ms = _int("group.consumer.min.heartbeat.interval.ms", 5_000, at_least(1))
    consumer_group_heartbeat_interval_max_ms = _int("group.consumer.max.heartbeat.interval.ms", 15_000, at_least(1))
    consumer_group_size_max = _int("group.consumer.max.size", INT_MAX, at_least(1))
    consumer_group_assignors = _words(
        "group.consumer.assignors", ("uniform", "range"), each_of("uniform", "range", may_be_empty=False)
    )
    consumer_group_regex_refresh_interval_ms = _int("group.consumer.regex.refresh.interval.ms", 600_000, at_least(1))
    offsets_partitions = _int("offsets.topic.num.partitions", 4, at_least(1))
    offsets_segment_bytes = _int("offsets.topic.segment.bytes", 104_857_600, at_least(1))
    offsets_replication_factor = _copies("offsets.topic.replication.factor")
    offsets_retention_minutes = _int("offsets.retention.minutes", 10_080, at_least(1))
    offsets_retention_check_interval_ms = _long("offsets.retention.check.interval.ms", 600_000, at_least(1))
    offset_metadata_bytes_max = _int("offset.metadata.max.bytes", 4096)

    def __init__(
        self,
        static: Mapping[str, Any] = _EMPTY,
        *,
        dynamic_default: Mapping[str, str] = _EMPTY,
        dynamic: Mapping[str, str] = _EMPTY,
    ) -> None:
        texts = {name: render(value) for name, value in static.items()}
        self.static: Mapping[str, str] = {name: text for name, text in texts.items() if text is not None}
        # Kafka's old name of node.id.
        if "broker.id" in self.static and "node.id" not in self.static:
            self.static = {**self.static, "node.id": self.static["broker.id"]}
        self.dynamic_default = dict(dynamic_default)
        self.dynamic = dict(dynamic)
        self.unknown = tuple(sorted(self.static.keys() - BROKER_CONFIGS.keys() - {"broker.id", "log.dir"}))
        self.values: Mapping[str, Value] = {name: self._value(key) for name, key in BROKER_CONFIGS.items()}
        self.topic_defaults: Mapping[str, Value] = {
            name: self._topic_default(key) for name, key in TOPIC_CONFIGS.items()
        }
        _check_pairs(self.values)

    def _value(self, key: ConfigKey) -> Value:
        text = next((text for text, _ in self.layers(key.name)), None)
        return key.default if text is None else key.parse(text)

    def _topic_default(self, key: ConfigKey) -> Value:
        for synonym, factor in key.synonyms:
            value = self.values[synonym]
            if value is not None:
                # -1 is "no limit" in every unit.
                return value * factor if factor != 1 and value > 0 else value
        return key.default

    def layers(self, name: str) -> Iterator[tuple[str, Source]]:
        """What was set for this config, the strongest first; defaults are not told."""
        for texts, source in (
            (self.dynamic, Source.BROKER),
            (self.dynamic_default, Source.ALL_BROKERS),
            (self.static, Source.START_UP),
        ):
            if name in texts:
                yield texts[name], source

    def with_dynamic(self, *, default: Mapping[str, str], own: Mapping[str, str]) -> BrokerSettings:
        """These settings with other dynamic ones; raises InvalidConfig when they cannot be."""
        return BrokerSettings(self.static, dynamic_default=default, dynamic=own)

    @property
    def partitions_max(self) -> int:
        """How many partitions there may be: as many as are configured, if the memory is enough for them."""
        affordable = self.client_memory_bytes_max // PARTITIONS_SHARE // PARTITION_BYTES
        return min(self.configured_partitions_max, affordable)

    @property
    def offsets_retention_ms(self) -> int:
        return self.offsets_retention_minutes * 60_000

    def warn_of_unknown(self) -> None:
        """Log the names that mean nothing here; raise InvalidConfig for one that looks misspelt.

        A name that resembles none is only logged: it may be of a plugin, or of a newer Kafka.
        """
        for name in self.unknown:
            if name in IGNORED_NAMES or name.startswith(PREFIXES):
                continue
            close = difflib.get_close_matches(name, [*BROKER_CONFIGS, *IGNORED_NAMES], n=1, cutoff=0.85)
            if close:
                raise InvalidConfig(f"{name} is not a setting of Kafka's brokers: did you mean {close[0]}?")
        if self.unknown:
            _LOG.warning("these configs are not known to this broker and have no effect: %s", ", ".join(self.unknown))


# -- the table ---------------------------------------------------------------------------------------------------------


def _topic_default_keys() -> Iterator[ConfigKey]:
    """The broker configs that give topics their defaults: as in the topic's table, except where Kafka has several."""
    hours = {"log.retention.hours": 168, "log.roll.hours": 168, "log.roll.jitter.hours": 0}
    at_start_only = {"log.flush.scheduler.interval.ms"}
    for topic_key in TOPIC_CONFIGS.values():
        for synonym, factor in topic_key.synonyms:
            if factor != 1:
                check = at_least(1) if synonym == "log.roll.hours" else topic_key.check
                yield ConfigKey(synonym, ConfigType.INT, hours.get(synonym), check)
            else:
                default = None if len(topic_key.synonyms) > 1 else topic_key.default
                default = LONG_MAX if synonym in at_start_only else default
                is_dynamic = synonym not in at_start_only
                yield ConfigKey(synonym, topic_key.type, default, topic_key.check, is_dynamic=is_dynamic)


def _broker_keys() -> Iterator[ConfigKey]:
    yield from _topic_default_keys()
    yield from (item.key for item in vars(BrokerSettings).values() if isinstance(item, _Setting))


BROKER_CONFIGS: Final[Mapping[str, ConfigKey]] = {
    key.name: key for key in sorted(_broker_keys(), key=lambda key: key.name)
}

_ORDERED_PAIRS: Final = (
    ("group.min.session.timeout.ms", "group.max.session.timeout.ms"),
    ("group.consumer.min.session.timeout.ms", "group.consumer.session.timeout.ms"),
    ("group.consumer.session.timeout.ms", "group.consumer.max.session.timeout.ms"),
    ("group.consumer.min.heartbeat.interval.ms", "group.consumer.heartbeat.interval.ms"),
    ("group.consumer.heartbeat.interval.ms", "group.consumer.max.heartbeat.interval.ms"),
    ("log.cleaner.min.compaction.lag.ms", "log.cleaner.max.compaction.lag.ms"),
)


def _check_pairs(values: Mapping[str, Value]) -> None:
    for smaller, larger in _ORDERED_PAIRS:
        if values[smaller] > values[larger]:
            raise InvalidConfig(f"{larger} ({values[larger]}) must be at least {smaller} ({values[smaller]})")
    for name in ("log.retention.ms", "log.retention.minutes", "log.retention.hours"):
        if values[name] == 0:
            raise InvalidConfig(f"{name} must be unlimited (-1) or, equal or greater than 1")


# -- topics ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """What holds for one topic: its own configs, and the broker's where it has none."""

    log: LogSettings
    max_message_bytes: int
    compression_type: str
    min_insync_replicas: int


def topic_settings(topic_configs: Mapping[str, str], settings: BrokerSettings) -> TopicSettings:
    """The settings of a topic with these configs on this broker; raises InvalidConfig.

    >>> topic_settings({"retention.ms": "1000"}, BrokerSettings({"log.segment.bytes": 2 << 20})).log.retention_ms
    1000
    """
    values = {**settings.topic_defaults, **parse_topic_configs(topic_configs)}
    log = LogSettings(
        segment_bytes=values["internal.segment.bytes"] or values["segment.bytes"],
        segment_ms=values["segment.ms"],
        retention_ms=values["retention.ms"],
        retention_bytes=values["retention.bytes"],
        cleanup_policy=frozenset(values["cleanup.policy"]),
        index_interval_bytes=values["index.interval.bytes"],
        message_timestamp_type=values["message.timestamp.type"],
        message_timestamp_before_max_ms=values["message.timestamp.before.max.ms"],
        message_timestamp_after_max_ms=values["message.timestamp.after.max.ms"],
        min_cleanable_dirty_ratio=values["min.cleanable.dirty.ratio"],
        delete_retention_ms=values["delete.retention.ms"],
        min_compaction_lag_ms=values["min.compaction.lag.ms"],
        max_compaction_lag_ms=values["max.compaction.lag.ms"],
        producer_id_expiration_ms=settings.producer_id_expiration_ms,
    )
    return TopicSettings(log, values["max.message.bytes"], values["compression.type"], values["min.insync.replicas"])


def log_settings(topic_configs: Mapping[str, str], settings: BrokerSettings) -> LogSettings:
    """The part of `topic_settings` that storage needs."""
    return topic_settings(topic_configs, settings).log

"""Kafka's topic configs as one table: type, default, rule, and the broker config that each takes its default from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from semel.broker.config_types import (
    LONG_MAX,
    Check,
    ConfigKey,
    ConfigType,
    InvalidConfig,
    Value,
    at_least,
    between,
    each_of,
    gzip_level,
    one_of,
    throttled_replicas,
)

COMPRESSIONS: Final = ("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer")
CLEANUP_POLICIES: Final = ("compact", "delete")
TIMESTAMP_TYPES: Final = ("CreateTime", "LogAppendTime")
SEGMENT_BYTES_MIN: Final = 1 << 20
BATCH_OVERHEAD_BYTES: Final = 12

_HOUR_MS: Final = 3_600_000
_WEEK_MS: Final = 7 * 24 * _HOUR_MS


def _key(
    name: str, kind: ConfigType, default: Value, check: Check | None, *synonyms: str | tuple[str, int]
) -> ConfigKey:
    pairs = tuple((synonym, 1) if isinstance(synonym, str) else synonym for synonym in synonyms)
    return ConfigKey(name, kind, default, check, is_dynamic=True, synonyms=pairs)


_BOOLEAN, _STRING, _INT = ConfigType.BOOLEAN, ConfigType.STRING, ConfigType.INT
_LONG, _DOUBLE, _LIST = ConfigType.LONG, ConfigType.DOUBLE, ConfigType.LIST

_TABLE: Final = (
    _key("cleanup.policy", _LIST, ("delete",), each_of(*CLEANUP_POLICIES), "log.cleanup.policy"),
    _key("compression.gzip.level", _INT, -1, gzip_level, "compression.gzip.level"),
    _key("compression.lz4.level", _INT, 9, between(1, 17), "compression.lz4.level"),
    _key("compression.type", _STRING, "producer", one_of(*COMPRESSIONS), "compression.type"),
    _key("compression.zstd.level", _INT, 3, between(-131072, 22), "compression.zstd.level"),
    _key("delete.retention.ms", _LONG, 24 * _HOUR_MS, at_least(0), "log.cleaner.delete.retention.ms"),
    _key("file.delete.delay.ms", _LONG, 60_000, at_least(0), "log.segment.delete.delay.ms"),
    _key("flush.messages", _LONG, LONG_MAX, at_least(1), "log.flush.interval.messages"),
    _key("flush.ms", _LONG, LONG_MAX, at_least(0), "log.flush.interval.ms", "log.flush.scheduler.interval.ms"),
    _key("follower.replication.throttled.replicas", _LIST, (), throttled_replicas),
    _key("index.interval.bytes", _INT, 4096, at_least(0), "log.index.interval.bytes"),
    _key("leader.replication.throttled.replicas", _LIST, (), throttled_replicas),
    _key("local.retention.bytes", _LONG, -2, at_least(-2), "log.local.retention.bytes"),
    _key("local.retention.ms", _LONG, -2, at_least(-2), "log.local.retention.ms"),
    _key("max.compaction.lag.ms", _LONG, LONG_MAX, at_least(1), "log.cleaner.max.compaction.lag.ms"),
    _key("max.message.bytes", _INT, (1 << 20) + BATCH_OVERHEAD_BYTES, at_least(0), "message.max.bytes"),
    _key("message.timestamp.after.max.ms", _LONG, _HOUR_MS, at_least(0), "log.message.timestamp.after.max.ms"),
    _key("message.timestamp.before.max.ms", _LONG, LONG_MAX, at_least(0), "log.message.timestamp.before.max.ms"),
    _key("message.timestamp.type", _STRING, "CreateTime", one_of(*TIMESTAMP_TYPES), "log.message.timestamp.type"),
    _key("min.cleanable.dirty.ratio", _DOUBLE, 0.5, between(0, 1), "log.cleaner.min.cleanable.ratio"),
    _key("min.compaction.lag.ms", _LONG, 0, at_least(0), "log.cleaner.min.compaction.lag.ms"),
    _key("min.insync.replicas", _INT, 1, at_least(1), "min.insync.replicas"),
    _key("preallocate", _BOOLEAN, False, None, "log.preallocate"),
    _key("remote.log.copy.disable", _BOOLEAN, False, None),
    _key("remote.log.delete.on.disable", _BOOLEAN, False, None),
    _key("remote.storage.enable", _BOOLEAN, False, None),
    _key("retention.bytes", _LONG, -1, None, "log.retention.bytes"),
    _key(
        "retention.ms",
        _LONG,
        _WEEK_MS,
        at_least(-1),
        "log.retention.ms",
        ("log.retention.minutes", 60_000),
        ("log.retention.hours", _HOUR_MS),
    ),
    _key("segment.bytes", _INT, 1 << 30, at_least(SEGMENT_BYTES_MIN), "log.segment.bytes"),
    _key("segment.index.bytes", _INT, 10 << 20, at_least(4), "log.index.size.max.bytes"),
    _key("segment.jitter.ms", _LONG, 0, at_least(0), "log.roll.jitter.ms", ("log.roll.jitter.hours", _HOUR_MS)),
    _key("segment.ms", _LONG, _WEEK_MS, at_least(1), "log.roll.ms", ("log.roll.hours", _HOUR_MS)),
    _key("unclean.leader.election.enable", _BOOLEAN, False, None, "unclean.leader.election.enable"),
    # Kafka's own way to small segments in tests, since segment.bytes has a lower bound of 1 MiB (KIP-1030).
    ConfigKey("internal.segment.bytes", _INT, None, at_least(14), is_dynamic=True, is_hidden=True),
)

TOPIC_CONFIGS: Final[Mapping[str, ConfigKey]] = {key.name: key for key in _TABLE}


def parse_topic_configs(texts: Mapping[str, str]) -> dict[str, Value]:
    """Topic configs as values; raises InvalidConfig for a name that does not exist and for a value that cannot be.

    >>> parse_topic_configs({"retention.ms": "1000", "cleanup.policy": "compact"})
    {'retention.ms': 1000, 'cleanup.policy': ('compact',)}
    """
    values: dict[str, Value] = {}
    for name, text in texts.items():
        key = TOPIC_CONFIGS.get(name)
        if key is None:
            raise InvalidConfig(f"Unknown topic config name: {name}")
        values[name] = key.parse(text)
    return values


def check_together(values: Mapping[str, Value]) -> None:
    """What one config alone cannot show; `values` has all of them, defaults included."""
    shortest, longest = values["min.compaction.lag.ms"], values["max.compaction.lag.ms"]
    if shortest > longest:
        raise InvalidConfig(
            f"conflict topic config setting min.compaction.lag.ms ({shortest}) > max.compaction.lag.ms ({longest})"
        )
    if values["remote.storage.enable"]:
        raise InvalidConfig("Tiered Storage functionality is disabled in the broker.")

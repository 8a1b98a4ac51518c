"""Configs: Kafka's defaults, Kafka's words for mistakes, and which of several places wins."""

from __future__ import annotations

import pytest

from semel.broker.config_entries import all_brokers_entries, broker_entries, topic_entries
from semel.broker.config_types import InvalidConfig
from semel.broker.configs import BROKER_CONFIGS, BrokerSettings, Source, log_settings, topic_settings
from semel.broker.storage.log_settings import LogSettings
from semel.broker.topic_configs import TOPIC_CONFIGS, parse_topic_configs
from semel.errors import ConfigError

WEEK_MS = 604_800_000

# The words of Apache Kafka 4.3, collected from its answers to CreateTopics.
MISTAKES = [
    ("retention.ms", "abc", "Invalid value abc for configuration retention.ms: Not a number of type LONG"),
    ("retention.ms", "1_000", "Invalid value 1_000 for configuration retention.ms: Not a number of type LONG"),
    ("retention.ms", str(2**63), f"Invalid value {2**63} for configuration retention.ms: Not a number of type LONG"),
    ("retention.ms", "-5", "Invalid value -5 for configuration retention.ms: Value must be at least -1"),
    ("segment.bytes", "5", "Invalid value 5 for configuration segment.bytes: Value must be at least 1048576"),
    (
        "segment.bytes",
        "99999999999",
        "Invalid value 99999999999 for configuration segment.bytes: Not a number of type INT",
    ),
    ("min.cleanable.dirty.ratio", "1.5", "configuration min.cleanable.dirty.ratio: Value must be no more than 1"),
    ("min.cleanable.dirty.ratio", "nan", "configuration min.cleanable.dirty.ratio: Not a number of type DOUBLE"),
    ("preallocate", "ja", "Invalid value ja for configuration preallocate: Expected value to be either true or false"),
    (
        "cleanup.policy",
        "foo",
        "Invalid value foo for configuration cleanup.policy: String must be one of: compact, delete",
    ),
    ("cleanup.policy", "delete,delete", "Configuration 'cleanup.policy' values must not be duplicated."),
    ("compression.type", "foo", "String must be one of: uncompressed, zstd, lz4, snappy, gzip, producer"),
    ("compression.gzip.level", "77", "Value must be between 1 and 9 or equal to -1"),
    ("follower.replication.throttled.replicas", "zz", "must be the literal '*' or a list of replicas"),
    ("nope", "1", "Unknown topic config name: nope"),
]


@pytest.mark.parametrize(("name", "text", "words"), MISTAKES, ids=[f"{name}={text}" for name, text, _ in MISTAKES])
def test_a_wrong_topic_config_is_refused_in_kafkas_words(name: str, text: str, words: str) -> None:
    """What people search for on the web is what they get to see."""
    with pytest.raises(InvalidConfig) as caught:
        parse_topic_configs({name: text})
    assert words in str(caught.value)


def test_right_topic_configs_become_values() -> None:
    """Blanks around a value do not count, words are case-insensitive where they are for Kafka, lists may be empty."""
    texts = {
        "retention.ms": " 1000 ",
        "cleanup.policy": "compact , delete",
        "preallocate": "TRUE",
        "min.cleanable.dirty.ratio": ".5",
        "compression.gzip.level": "-1",
        "leader.replication.throttled.replicas": "0:1,1:1",
    }
    assert parse_topic_configs(texts) == {
        "retention.ms": 1000,
        "cleanup.policy": ("compact", "delete"),
        "preallocate": True,
        "min.cleanable.dirty.ratio": 0.5,
        "compression.gzip.level": -1,
        "leader.replication.throttled.replicas": ("0:1", "1:1"),
    }
    assert parse_topic_configs({"cleanup.policy": ""}) == {"cleanup.policy": ()}


def test_every_default_passes_its_own_rule() -> None:
    """The table cannot contradict itself."""
    for key in (*TOPIC_CONFIGS.values(), *BROKER_CONFIGS.values()):
        if key.default is not None and key.check is not None:
            assert key.check(key.name, key.default) is None, key.name


def test_topics_have_the_defaults_of_apache_kafka() -> None:
    """Without any setting, storage works with its own defaults, which are Kafka's."""
    assert log_settings({}, BrokerSettings()) == LogSettings()
    settings = topic_settings({}, BrokerSettings())
    assert (settings.max_message_bytes, settings.compression_type, settings.min_insync_replicas) == (
        1_048_588,
        "producer",
        1,
    )


@pytest.mark.parametrize(
    ("broker", "expected_ms"),
    [
        ({"log.retention.hours": 2}, 2 * 3_600_000),
        ({"log.retention.hours": 2, "log.retention.minutes": 3}, 3 * 60_000),
        ({"log.retention.hours": 2, "log.retention.minutes": 3, "log.retention.ms": 4}, 4),
        ({"log.retention.minutes": -1}, -1),
        ({}, WEEK_MS),
    ],
)
def test_the_finest_unit_of_a_broker_config_wins(broker: dict[str, int], expected_ms: int) -> None:
    """log.retention.ms before minutes before hours; -1 is no limit in each of them."""
    assert log_settings({}, BrokerSettings(broker)).retention_ms == expected_ms


def test_a_topics_own_config_wins_over_all() -> None:
    """Topic, then what was altered for this broker, then for all brokers, then start-up, then the default."""
    layers = {"log.retention.ms": "4"}, {"log.retention.ms": "3"}, {"log.retention.ms": "2"}
    settings = BrokerSettings(layers[0], dynamic_default=layers[1], dynamic=layers[2])
    assert log_settings({"retention.ms": "1"}, settings).retention_ms == 1
    assert log_settings({}, settings).retention_ms == 2
    assert log_settings({}, settings.with_dynamic(default=layers[1], own={})).retention_ms == 3
    assert log_settings({}, settings.with_dynamic(default={}, own={})).retention_ms == 4


def test_small_segments_for_tests_are_possible() -> None:
    """segment.bytes has a lower bound in Kafka 4; the internal config has not."""
    assert log_settings({"internal.segment.bytes": "2000"}, BrokerSettings()).segment_bytes == 2000


def test_broker_settings_are_typed_and_read_only() -> None:
    """Numbers, words and booleans come from text and from Python values alike; nothing can be assigned."""
    settings = BrokerSettings(
        {"broker.id": "7", "auto.create.topics.enable": False, "group.consumer.assignors": "range", "num.partitions": 3}
    )
    assert settings.node_id == 7
    assert settings.auto_create_topics is False
    assert settings.consumer_group_assignors == ("range",)
    assert settings.num_partitions == 3
    assert settings.offsets_retention_ms == 7 * 86_400_000
    with pytest.raises(AttributeError, match=r"num\.partitions"):
        settings.num_partitions = 4


def test_own_defaults_differ_from_kafkas_only_where_one_broker_is_better_off() -> None:
    """Fewer partitions of the internal topics, one copy of them, no wait for more members."""
    settings = BrokerSettings()
    assert (settings.offsets_partitions, settings.transaction_log_partitions) == (4, 4)
    assert (settings.offsets_replication_factor, settings.transaction_log_replication_factor) == (1, 1)
    assert settings.group_initial_rebalance_delay_ms == 0
    assert settings.transaction_version == 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num.partitions": "0"}, r"num\.partitions: Value must be at least 1"),
        ({"transaction.version": "3"}, r"transaction\.version: Value must be no more than 2"),
        ({"default.replication.factor": "3"}, "one broker, which keeps one copy of the data"),
        ({"group.min.session.timeout.ms": "9", "group.max.session.timeout.ms": "8"}, "must be at least"),
        ({"group.consumer.assignors": ""}, "must not be empty"),
        ({"group.consumer.session.timeout.ms": "70000"}, r"group\.consumer\.max\.session\.timeout\.ms"),
        ({"log.retention.ms": "0"}, r"unlimited \(-1\)"),
    ],
)
def test_a_wrong_broker_config_fails_the_start(config: dict[str, str], words: str) -> None:
    """As a ConfigError that names the setting."""
    with pytest.raises(ConfigError, match=words):
        BrokerSettings(config)


def test_an_unknown_broker_config_is_accepted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """A file written for Kafka works, but a misspelt name does not vanish in silence."""
    settings = BrokerSettings({"num.io.threads": 8, "my.plugin.option": 3})
    settings.warn_of_unknown()
    assert settings.unknown == ("my.plugin.option", "num.io.threads")
    assert "my.plugin.option, num.io.threads" in caplog.text
    with pytest.raises(ConfigError, match="did you mean"):
        BrokerSettings({"num.partition": 3}).warn_of_unknown()


def test_entries_of_a_topic_tell_where_each_value_comes_from() -> None:
    """The strongest source first in the synonyms, and that one is the value."""
    settings = BrokerSettings({"log.retention.hours": 2}, dynamic_default={"message.max.bytes": "770000"})
    entries = {entry.name: entry for entry in topic_entries({"flush.ms": "5"}, settings)}
    assert (entries["flush.ms"].value, entries["flush.ms"].source) == ("5", Source.TOPIC)
    assert (entries["max.message.bytes"].value, entries["max.message.bytes"].source) == ("770000", Source.ALL_BROKERS)
    retention = entries["retention.ms"]
    assert (retention.value, retention.source) == ("7200000", Source.START_UP)
    assert [(each.name, each.value, each.source) for each in retention.synonyms] == [
        ("log.retention.hours", "2", Source.START_UP),
        ("log.retention.hours", "168", Source.DEFAULT),
    ]
    assert entries["cleanup.policy"].source is Source.DEFAULT
    assert "internal.segment.bytes" not in entries


def test_entries_of_a_broker_hide_what_is_not_known() -> None:
    """An unknown config may be a password: its name is shown, its value is not."""
    settings = BrokerSettings({"ssl.keystore.password": "secret"}, dynamic_default={"message.max.bytes": "9"})
    entries = {entry.name: entry for entry in broker_entries(settings)}
    assert entries["ssl.keystore.password"].value is None
    assert entries["ssl.keystore.password"].is_sensitive
    assert entries["num.partitions"].is_read_only
    assert not entries["message.max.bytes"].is_read_only
    assert [(entry.name, entry.value) for entry in all_brokers_entries(settings)] == [("message.max.bytes", "9")]
    assert "secret" not in repr(entries)

"""The options of the Spark source: what they mean, and what a user is told about a mistake."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import pytest

from semel.client.partitions import TopicPartition
from semel.errors import ConfigError
from semel.spark.source import SemelSource
from semel.spark.source_options import (
    Assigned,
    AtOffsets,
    AtTime,
    Committed,
    Pattern,
    SourceOptions,
    Topics,
    parse_options,
)

BOOTSTRAP = {"kafka.bootstrap.servers": "127.0.0.1:9092"}
ORDERS_0 = TopicPartition("orders", 0)


def parse(**options: str) -> SourceOptions:
    """With a topic to read, and underscores for dots."""
    named = {name.replace("_", "."): value for name, value in options.items()}
    return parse_options(BOOTSTRAP | {"subscribe": "orders"} | named)


@pytest.mark.parametrize(
    ("options", "subscription"),
    [
        ({"subscribe": " orders ,payments,, orders"}, Topics(("orders", "payments"))),
        ({"subscribepattern": "or.*"}, Pattern("or.*")),
        ({"ASSIGN": '{"orders":[0,2]}'}, Assigned(frozenset({ORDERS_0, TopicPartition("orders", 2)}))),
    ],
)
def test_topics_are_named_in_one_of_three_ways_in_any_case(options: dict[str, str], subscription: object) -> None:
    """Spark's option names do not mind their case."""
    assert parse_options(BOOTSTRAP | options).subscription == subscription


@pytest.mark.parametrize(
    ("options", "starting"),
    [
        ({}, None),
        ({"startingOffsets": "EARLIEST"}, "earliest"),
        ({"startingOffsets": '{"orders":{"0":23}}'}, AtOffsets({ORDERS_0: 23})),
        ({"startingOffsets": '{"orders":{"0":-2}}'}, AtOffsets({ORDERS_0: -2})),
        ({"startingOffsets": "committed", "kafka_group_id": "g"}, Committed("g")),
        ({"startingOffsets": "committed", "group": "g"}, Committed("g")),
        ({"startingTimestamp": "1000", "startingOffsets": "earliest"}, AtTime(1000)),
        (
            {"startingOffsetsByTimestamp": '{"orders":{"0":1000}}', "startingOffsets": "latest"},
            AtTime({ORDERS_0: 1000}),
        ),
    ],
)
def test_a_start_is_a_word_or_offsets_or_a_time_and_the_time_wins(options: dict[str, str], starting: object) -> None:
    """The order of preference is that of Spark's Kafka source."""
    assert parse(**options).starting == starting


def test_a_batch_reads_everything_and_a_stream_what_is_new_unless_told_otherwise() -> None:
    """The defaults of Spark's Kafka source."""
    batch = parse().for_batch()
    assert (batch.starting, batch.ending) == ("earliest", "latest")
    assert parse().for_stream().starting == "latest"
    options = parse()
    assert (options.fail_on_data_loss, options.include_headers, options.max_trigger_delay_ms) == (True, False, 900_000)
    assert options.fetch.isolation == "read_committed"


def test_settings_of_kafka_are_passed_through_and_no_message_shows_a_password() -> None:
    """kafka.* is what Semel's clients take; a secret stays out of every repr, which ends up in logs."""
    options = parse(
        kafka_security_protocol="SASL_PLAINTEXT",
        kafka_sasl_mechanism="PLAIN",
        kafka_sasl_username="ada",
        kafka_sasl_password="hunter2",
        kafka_isolation_level="read_uncommitted",
    )
    assert options.settings["sasl.password"] == "hunter2"
    assert options.fetch.isolation == "read_uncommitted"
    assert "hunter2" not in repr(options)


@pytest.mark.parametrize(
    ("text", "delay_ms"), [("15m", 900_000), ("500", 500), ("250ms", 250), ("2 min", 120_000), ("1h", 3_600_000)]
)
def test_durations_are_read_as_spark_reads_them(text: str, delay_ms: float) -> None:
    """A number with a unit, milliseconds without."""
    assert parse(maxTriggerDelay=text).max_trigger_delay_ms == delay_ms


def test_options_that_only_steer_sparks_own_consumer_are_accepted() -> None:
    """A user changes one word, format("kafka") to format("semel"), and keeps the rest."""
    parse_options(
        BOOTSTRAP | {"subscribe": "orders", "kafkaConsumer.pollTimeoutMs": "512", "fetchOffset.numRetries": "3"}
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subscibe": "x"}, "subscibe is no option of format.'semel'.: did you mean subscribe?"),
        ({"max.offsets.per.trigger": "5"}, "did you mean maxOffsetsPerTrigger?"),
        ({"security.protocol": "SSL"}, "remove it, or write kafka.security.protocol if it is one of Kafka's"),
        ({"path": "orders"}, "takes no path: name the topics with option..subscribe"),
        ({"assign": '{"orders":[0]}'}, "and subscribe and assign are given"),
        ({"subscribe": " , "}, "subscribe is empty"),
        ({"kafka.isolation.level": "read_all"}, "isolation.level='read_all' is not supported"),
        ({"kafka.isolation.lvl": "read_committed"}, "did you mean isolation.level?"),
        ({"startingOffsets": "earlyest"}, "startingOffsets='earlyest' is not understood: write earliest, latest"),
        ({"startingOffsets": '{"orders":{"0":1}'}, "startingOffsets is not understood: it is not JSON"),
        ({"startingOffsets": "{}"}, "it names no topic"),
        ({"startingOffsets": '{"orders":[0]}'}, "'orders' has no object of partitions"),
        ({"startingOffsets": '{"orders":{"x":1}}'}, "'x' is no partition of 'orders'"),
        ({"startingOffsets": '{"orders":{"0":-3}}'}, "-3 of 'orders' partition 0 is out of place"),
        ({"startingOffsets": '{"orders":{"0":"1"}}'}, "'1' of 'orders' partition 0 is out of place"),
        ({"startingOffsetsByTimestamp": '{"orders":{"0":-1}}'}, "startingOffsetsByTimestamp is not understood"),
        ({"startingTimestamp": "today"}, "startingTimestamp='today' is not a whole number"),
        ({"startingOffsets": "committed"}, "needs to know whose: write the group of consumers as kafka.group.id"),
        ({"group": "a", "kafka.group.id": "b"}, "group=a and kafka.group.id=b mean the same and differ"),
        ({"kafka.auto.offset.reset": "latest"}, "auto.offset.reset only serves startingOffsets=committed"),
        ({"minPartitions": "0"}, "minPartitions='0' is not a whole number of at least 1"),
        ({"maxOffsetsPerTrigger": "many"}, "maxOffsetsPerTrigger='many' is not a whole number"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "5"}, "minOffsetsPerTrigger=9 is above"),
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay='soon' is no duration"),
        ({"includeHeaders": "yes"}, "includeHeaders='yes' is not understood: write false or true"),
        ({"failOnDataLoss": "no"}, "failOnDataLoss='no' is not understood"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(options: dict[str, str], message: str) -> None:
    """Before anything is sent, and by the name that the user wrote."""
    with pytest.raises(ConfigError, match=message):
        parse_options(BOOTSTRAP | {"subscribe": "orders"} | options)


def test_what_to_read_and_from_where_must_be_said() -> None:
    """There is no default for either."""
    with pytest.raises(ConfigError, match=r"One of subscribe, subscribePattern and assign .* none is given"):
        parse_options(BOOTSTRAP)
    with pytest.raises(ConfigError, match=r"kafka\.bootstrap\.servers is missing"):
        parse_options({"subscribe": "orders"})
    with pytest.raises(ConfigError, match=r"subscribePattern='or\(' is no regular expression"):
        parse_options(BOOTSTRAP | {"subscribePattern": "or("})
    with pytest.raises(ConfigError, match="assign is not understood: 'orders' has no list of partitions"):
        parse_options(BOOTSTRAP | {"assign": '{"orders":{"0":1}}'})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffsets": "latest"}, "startingOffsets is latest, where a batch query would find nothing"),
        ({"startingOffsets": '{"orders":{"0":-1}}'}, "startingOffsets is latest"),
        ({"endingOffsets": "earliest"}, "endingOffsets is earliest"),
        ({"endingOffsets": '{"orders":{"0":-2}}'}, "endingOffsets is earliest"),
        (
            {"startingOffsets": '{"orders":{"0":5}}', "endingOffsets": '{"orders":{"0":4}}'},
            "startingOffsets 5 of topic 'orders' partition 0 is behind endingOffsets 4",
        ),
    ],
)
def test_a_batch_that_could_find_nothing_is_refused(options: dict[str, str], message: str) -> None:
    """As Spark's Kafka source does."""
    with pytest.raises(ConfigError, match=message):
        parse(**options).for_batch()


def test_limits_of_a_trigger_are_named_as_idle_in_a_batch(caplog: pytest.LogCaptureFixture) -> None:
    """Spark's Kafka source passes over them with a warning."""
    parse(maxOffsetsPerTrigger="5").for_batch()
    assert "maxOffsetsPerTrigger count in streaming queries only" in caplog.text


@pytest.mark.parametrize("name", ["endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"])
def test_a_stream_has_no_end(name: str) -> None:
    """An end that would be ignored is refused."""
    value = {"endingOffsets": "latest", "endingTimestamp": "5"}.get(name, '{"orders":{"0":5}}')
    with pytest.raises(ConfigError, match=f"{name} is for batch queries, a stream has no end"):
        parse(**{name: value}).for_stream()


def test_an_older_pyspark_is_refused_on_use_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python data source of a session is imported when one is looked for: only using this one may fail."""
    monkeypatch.setattr("pyspark.__version__", "4.1.1")
    source = SemelSource(BOOTSTRAP | {"subscribe": "orders"})
    with pytest.raises(ConfigError, match=r"needs pyspark 4\.2 or later, and this is 4\.1\.1: upgrade pyspark"):
        source.schema()


def test_spark_finds_the_source_by_the_name_of_its_module() -> None:
    """Spark looks for `DefaultSource` in every module whose name begins with pyspark_."""
    module = import_module("pyspark_semel")
    assert module.DefaultSource is SemelSource
    assert module.DefaultSource.name() == "semel"
    assert "pyspark_semel" in {info.name for info in iter_modules()}

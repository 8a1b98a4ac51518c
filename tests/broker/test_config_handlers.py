"""The APIs about configs and about the broker itself: every served version, from bytes to bytes."""

from __future__ import annotations

from typing import Any

import pytest
from handler_calls import ADDRESS, SmallBroker, ask
from kio.index import load_response_schema
from kio.schema.errors import ErrorCode
from memory_meta import MemoryMeta

from semel.broker.acls import AclBinding, Authorizer, Operation, ResourceType
from semel.broker.handlers.k18_api_versions import answer_newer_client
from semel.wire.api import Api, BrokerCapabilities, VersionRange
from semel.wire.messages import decode_response
from semel.wire.server import SERVER_VERSIONS

TOPIC, BROKER = 2, 4
SET, DELETE, APPEND, SUBTRACT = range(4)
NOT_ASKED = -(2**31)


def versions(api: Api) -> Any:
    served = SERVER_VERSIONS[api]
    return pytest.mark.parametrize("version", range(served.lowest, served.highest + 1))


@pytest.fixture
def broker() -> SmallBroker:
    broker = SmallBroker(log_retention_hours=2)
    broker.new_topic("a", 1, retention_ms="5")
    return broker


def restrict(broker: SmallBroker, *allowed: tuple[ResourceType, str, Operation]) -> None:
    broker.authorizer = Authorizer()
    broker.authorizer.add([AclBinding(kind, name, operation=operation) for kind, name, operation in allowed])


# -- DescribeConfigs ---------------------------------------------------------------------------------------------------


def describe(
    broker: SmallBroker, kind: int, name: str, keys: list[str] | None = None, version: int = 4, synonyms: bool = True
) -> Any:
    resource = {"resource_type": kind, "resource_name": name, "configuration_keys": keys}
    [result] = ask(
        broker,
        Api.DESCRIBE_CONFIGS,
        version,
        resources=[resource],
        include_synonyms=synonyms,
        include_documentation=True,
    ).results
    return result


def described(broker: SmallBroker, kind: int, name: str) -> dict[str, tuple[str | None, int]]:
    return {config.name: (config.value, config.config_source) for config in describe(broker, kind, name).configs}


@versions(Api.DESCRIBE_CONFIGS)
def test_configs_of_a_topic_are_described(broker: SmallBroker, version: int) -> None:
    """Value, source and what it would be otherwise; all of them, or those named."""
    result = describe(broker, TOPIC, "a", version=version)
    configs = {config.name: config for config in result.configs}
    assert result.error_code is ErrorCode.none
    assert len(configs) == 33
    retention = configs["retention.ms"]
    assert (retention.value, retention.config_source, retention.read_only) == ("5", 1, False)
    assert [(each.name, each.value, each.source) for each in retention.synonyms] == [
        ("retention.ms", "5", 1),
        ("log.retention.hours", "2", 4),
        ("log.retention.hours", "168", 5),
    ]
    assert configs["segment.bytes"].config_source == 5
    if version >= 3:
        assert (configs["cleanup.policy"].config_type, configs["cleanup.policy"].documentation) == (7, None)
    [named] = describe(broker, TOPIC, "a", ["flush.ms", "nope"], version, synonyms=False).configs
    assert (named.name, named.synonyms) == ("flush.ms", ())


def test_configs_of_the_broker_are_described() -> None:
    """Alterable ones are not read-only; an unknown one is not shown, since it may be a secret."""
    broker = SmallBroker(num_partitions=3, ssl_key_password="secret", log_dirs="/data")
    configs = {config.name: config for config in describe(broker, BROKER, "1").configs}
    assert (configs["num.partitions"].value, configs["num.partitions"].config_source) == ("3", 4)
    assert configs["num.partitions"].read_only
    assert not configs["log.retention.ms"].read_only
    assert (configs["log.dirs"].value, configs["log.dirs"].read_only) == ("/data", True)
    assert (configs["ssl.key.password"].value, configs["ssl.key.password"].is_sensitive) == (None, True)
    assert describe(broker, BROKER, "").configs == ()


@pytest.mark.parametrize(
    ("kind", "name", "code"),
    [
        (TOPIC, "missing", ErrorCode.unknown_topic_or_partition),
        (TOPIC, "", ErrorCode.invalid_topic_exception),
        (BROKER, "7", ErrorCode.invalid_request),
        (BROKER, "x", ErrorCode.invalid_request),
        (32, "group", ErrorCode.invalid_request),
    ],
)
def test_configs_of_nothing_are_not_described(broker: SmallBroker, kind: int, name: str, code: ErrorCode) -> None:
    """Each with Kafka's code."""
    assert describe(broker, kind, name).error_code is code


def test_describing_configs_needs_the_right(broker: SmallBroker) -> None:
    """On the topic, or on the cluster for the broker's."""
    restrict(broker)
    assert describe(broker, TOPIC, "a").error_code is ErrorCode.topic_authorization_failed
    assert describe(broker, BROKER, "1").error_code is ErrorCode.cluster_authorization_failed
    restrict(
        broker,
        (ResourceType.TOPIC, "a", Operation.DESCRIBE_CONFIGS),
        (ResourceType.CLUSTER, "kafka-cluster", Operation.DESCRIBE_CONFIGS),
    )
    assert describe(broker, TOPIC, "a").error_code is ErrorCode.none
    assert describe(broker, BROKER, "1").error_code is ErrorCode.none


# -- altering ----------------------------------------------------------------------------------------------------------

Operations = list[tuple[str, int, str | None]]


def change(
    broker: SmallBroker, kind: int, name: str, operations: Operations, *, version: int = 1, validate_only: bool = False
) -> tuple[ErrorCode, str | None]:
    configs = [{"name": key, "config_operation": number, "value": text} for key, number, text in operations]
    resources = [{"resource_type": kind, "resource_name": name, "configs": configs}]
    [answer] = ask(
        broker, Api.INCREMENTAL_ALTER_CONFIGS, version, resources=resources, validate_only=validate_only
    ).responses
    assert (answer.resource_type, answer.resource_name) == (kind, name)
    return answer.error_code, answer.error_message


OK = (ErrorCode.none, None)


def own_configs(broker: SmallBroker, name: str = "a") -> dict[str, str]:
    topic = broker.topics.get(name)
    assert topic is not None
    return dict(topic.configs)


@versions(Api.INCREMENTAL_ALTER_CONFIGS)
def test_configs_are_set_and_deleted_one_by_one(broker: SmallBroker, version: int) -> None:
    """What is not named stays; the partitions work with the new ones at once."""
    assert change(broker, TOPIC, "a", [("flush.ms", SET, "7")], version=version) == OK
    assert own_configs(broker) == {"retention.ms": "5", "flush.ms": "7"}
    assert change(broker, TOPIC, "a", [("retention.ms", DELETE, None)], version=version) == OK
    assert own_configs(broker) == {"flush.ms": "7"}
    assert broker.partitions["a", 0].settings.retention_ms == 2 * 3_600_000


def test_lists_are_appended_to_and_subtracted_from(broker: SmallBroker) -> None:
    """From the default if nothing is set; a word that is there is not put in twice, an empty list is one."""
    assert change(broker, TOPIC, "a", [("cleanup.policy", APPEND, "compact")]) == OK
    assert own_configs(broker)["cleanup.policy"] == "delete,compact"
    assert change(broker, TOPIC, "a", [("cleanup.policy", APPEND, "delete, compact")]) == OK
    assert change(broker, TOPIC, "a", [("cleanup.policy", SUBTRACT, "delete")]) == OK
    assert own_configs(broker)["cleanup.policy"] == "compact"
    assert change(broker, TOPIC, "a", [("cleanup.policy", SUBTRACT, "compact")]) == OK
    assert own_configs(broker)["cleanup.policy"] == ""


# The answers of Apache Kafka 4.3.
WRONG: list[tuple[int, str, Operations, ErrorCode, str]] = [
    (TOPIC, "a", [("retention.ms", APPEND, "5")], ErrorCode.invalid_config, "because its type is not LIST."),
    (TOPIC, "a", [("flush.ms", SET, "5")] * 2, ErrorCode.invalid_request, "Error due to duplicate config keys"),
    (TOPIC, "a", [("flush.ms", SET, None)], ErrorCode.invalid_request, "Null value not supported for : flush.ms"),
    (TOPIC, "a", [("flush.ms", SET, "x")], ErrorCode.invalid_config, "Not a number of type LONG"),
    (TOPIC, "a", [("nope", SET, "1")], ErrorCode.invalid_config, "Unknown topic config name: nope"),
    (TOPIC, "a", [("flush.ms", 9, "1")], ErrorCode.invalid_request, "Unknown config operation 9."),
    (TOPIC, "missing", [("flush.ms", SET, "1")], ErrorCode.unknown_topic_or_partition, "'missing' does not exist."),
    (TOPIC, "", [("flush.ms", SET, "1")], ErrorCode.invalid_request, "Default topic resources are not allowed."),
    (BROKER, "1", [("num.partitions", SET, "3")], ErrorCode.invalid_request, "dynamically: [num.partitions]"),
    (BROKER, "1", [("log.retention.ms", SET, "abc")], ErrorCode.invalid_request, "Not a number of type LONG"),
    (BROKER, "3", [("log.retention.ms", SET, "1")], ErrorCode.invalid_request, "expected 1, but received 3"),
    (BROKER, "x", [("log.retention.ms", SET, "1")], ErrorCode.invalid_request, "Node id must be an integer"),
    (BROKER, "1", [("log.retention.ms", APPEND, "1")], ErrorCode.invalid_config, "its type is not LIST."),
    (7, "x", [("flush.ms", SET, "1")], ErrorCode.invalid_request, "Unknown resource type 7"),
]


@pytest.mark.parametrize(("kind", "name", "operations", "code", "words"), WRONG)
def test_a_change_that_cannot_be_changes_nothing(
    broker: SmallBroker, kind: int, name: str, operations: Operations, code: ErrorCode, words: str
) -> None:
    """With Kafka's code and words."""
    before = dict(broker.meta.files), broker.settings
    answered, message = change(broker, kind, name, operations)
    assert answered is code
    assert words in (message or "")
    assert (broker.meta.files, broker.settings) == before


def test_a_change_that_is_only_checked_changes_nothing(broker: SmallBroker) -> None:
    """validate_only, for topics and for the broker."""
    before = dict(broker.meta.files), broker.settings
    assert change(broker, TOPIC, "a", [("flush.ms", SET, "1")], validate_only=True) == OK
    assert change(broker, BROKER, "1", [("log.retention.ms", SET, "1")], validate_only=True) == OK
    assert (broker.meta.files, broker.settings) == before


def test_broker_configs_take_effect_at_once_and_survive_a_restart(broker: SmallBroker) -> None:
    """For topics without a config of their own; this broker's wins over that of all brokers."""
    broker.new_topic("b")
    assert change(broker, BROKER, "", [("log.retention.ms", SET, "70"), ("message.max.bytes", SET, "900")]) == OK
    assert broker.partitions["b", 0].settings.retention_ms == 70
    assert change(broker, BROKER, "1", [("log.retention.ms", SET, "80")]) == OK
    assert broker.partitions["b", 0].settings.retention_ms == 80
    assert broker.partitions["a", 0].settings.retention_ms == 5
    assert broker.settings.values["message.max.bytes"] == 900
    assert described(broker, TOPIC, "b")["retention.ms"] == ("80", 2)
    assert described(broker, TOPIC, "b")["max.message.bytes"] == ("900", 3)
    assert described(broker, BROKER, "") == {"log.retention.ms": ("70", 3), "message.max.bytes": ("900", 3)}

    again = SmallBroker(meta=broker.meta)
    assert again.topics.broker_configs == {
        "": {"log.retention.ms": "70", "message.max.bytes": "900"},
        "1": {"log.retention.ms": "80"},
    }
    assert change(broker, BROKER, "1", [("log.retention.ms", DELETE, None)]) == OK
    assert broker.partitions["b", 0].settings.retention_ms == 70


def test_altering_configs_needs_the_right(broker: SmallBroker) -> None:
    """On the topic, or on the cluster for the broker's; to describe them is not enough."""
    restrict(
        broker,
        (ResourceType.TOPIC, "a", Operation.DESCRIBE_CONFIGS),
        (ResourceType.CLUSTER, "kafka-cluster", Operation.DESCRIBE_CONFIGS),
    )
    assert change(broker, TOPIC, "a", [("flush.ms", SET, "1")])[0] is ErrorCode.topic_authorization_failed
    assert change(broker, BROKER, "1", [("log.retention.ms", SET, "1")])[0] is ErrorCode.cluster_authorization_failed


def test_a_resource_named_twice_is_refused(broker: SmallBroker) -> None:
    """Which of the two changes would come last is not to be guessed."""
    configs = [{"name": "flush.ms", "config_operation": SET, "value": "1"}]
    resources = [{"resource_type": TOPIC, "resource_name": "a", "configs": configs}] * 2
    answer = ask(broker, Api.INCREMENTAL_ALTER_CONFIGS, 1, resources=resources, validate_only=False)
    assert [each.error_code for each in answer.responses] == [ErrorCode.invalid_request] * 2
    assert own_configs(broker) == {"retention.ms": "5"}


def test_a_change_that_cannot_be_stored_is_not_made() -> None:
    """Neither for the topic nor for the broker."""
    meta = MemoryMeta()
    broker = SmallBroker(meta=meta)
    broker.new_topic("a")
    settings = broker.settings
    meta.writes_until_full = 0
    assert change(broker, TOPIC, "a", [("flush.ms", SET, "1")])[0] is ErrorCode.kafka_storage_error
    assert change(broker, BROKER, "1", [("log.retention.ms", SET, "1")])[0] is ErrorCode.kafka_storage_error
    assert own_configs(broker) == {}
    assert broker.settings is settings


@versions(Api.ALTER_CONFIGS)
def test_the_old_call_replaces_all_configs(broker: SmallBroker, version: int) -> None:
    """What is not named is gone; a null value is refused."""

    def replace(kind: int, name: str, *configs: tuple[str, str | None]) -> ErrorCode:
        items = [{"name": key, "value": text} for key, text in configs]
        resources = [{"resource_type": kind, "resource_name": name, "configs": items}]
        return ask(broker, Api.ALTER_CONFIGS, version, resources=resources, validate_only=False).responses[0].error_code

    assert replace(TOPIC, "a", ("flush.ms", "1")) is ErrorCode.none
    assert own_configs(broker) == {"flush.ms": "1"}
    assert replace(TOPIC, "a", ("flush.ms", None)) is ErrorCode.invalid_request
    assert replace(TOPIC, "a", ("flush.ms", "1"), ("flush.ms", "2")) is ErrorCode.invalid_request
    assert replace(BROKER, "1", ("message.max.bytes", "900")) is ErrorCode.none
    assert replace(BROKER, "1") is ErrorCode.none
    assert broker.settings.values["message.max.bytes"] == 1_048_588


# -- ApiVersions -------------------------------------------------------------------------------------------------------


def api_versions(broker: SmallBroker, version: int, name: str = "test") -> Any:
    return ask(broker, Api.API_VERSIONS, version, client_software_name=name, client_software_version="1.0")


def ranges(answer: Any) -> dict[int, VersionRange]:
    return {each.api_key: VersionRange(each.min_version, each.max_version) for each in answer.api_keys}


@versions(Api.API_VERSIONS)
def test_all_that_is_served_is_advertised(broker: SmallBroker, version: int) -> None:
    """Produce from 0 on, without which older librdkafka turns compression off; two-phase commit where it is on."""
    answer = api_versions(broker, version)
    expected = {int(api): served for api, served in SERVER_VERSIONS.items()} | {0: VersionRange(0, 12)}
    assert answer.error_code is ErrorCode.none
    assert ranges(answer) == expected | {int(Api.INIT_PRODUCER_ID): VersionRange(0, 5)}
    with_two_phase = SmallBroker(transaction_two_phase_commit_enable=True)
    assert ranges(api_versions(with_two_phase, version)) == expected


def features(answer: Any) -> dict[str, int]:
    return {each.name: each.max_version_level for each in answer.finalized_features}


def test_transaction_protocol_2_is_agreed_on_by_default(broker: SmallBroker) -> None:
    """The finalized feature and an epoch of 0 or more; version 3 must not see a lowest version of 0 (KIP-1022)."""
    for version in (3, 4):
        answer = api_versions(broker, version)
        assert features(answer) == {"transaction.version": 2, "group.version": 1}
        capabilities = BrokerCapabilities(ranges(answer), features(answer), answer.finalized_features_epoch)
        assert capabilities.transaction_protocol == 2
        supported = {each.name: (each.min_version, each.max_version) for each in answer.supported_features}
        assert supported == ({} if version == 3 else {"transaction.version": (0, 2), "group.version": (0, 1)})


@pytest.mark.parametrize(("level", "finalized"), [(0, {}), (1, {"transaction.version": 1})])
def test_protocol_1_looks_like_kafka_3_9(level: int, finalized: dict[str, int]) -> None:
    """The versions that speak protocol 2 are not offered then."""
    broker = SmallBroker(transaction_version=level)
    answer = api_versions(broker, 4)
    highest = {key: served.highest for key, served in ranges(answer).items()}
    assert (highest[Api.PRODUCE], highest[Api.END_TXN], highest[Api.TXN_OFFSET_COMMIT]) == (11, 4, 4)
    assert features(answer) == finalized | {"group.version": 1}


def test_consumer_groups_that_are_switched_off_are_not_offered() -> None:
    """Neither the APIs nor the feature."""
    broker = SmallBroker(group_coordinator_rebalance_protocols="classic")
    answer = api_versions(broker, 4)
    assert not {Api.CONSUMER_GROUP_HEARTBEAT, Api.CONSUMER_GROUP_DESCRIBE} & ranges(answer).keys()
    assert features(answer) == {"transaction.version": 2}


def test_a_client_that_misnames_itself_is_refused(broker: SmallBroker) -> None:
    """Kafka's rule from version 3 on."""
    assert api_versions(broker, 3, "-bad-").error_code is ErrorCode.invalid_request
    assert api_versions(broker, 3, "apache-kafka-java").error_code is ErrorCode.none


def test_a_newer_client_gets_the_list_in_version_0(broker: SmallBroker) -> None:
    """It can read that, whatever it speaks, and asks again."""
    answer: Any = answer_newer_client(broker, 7)  # pyright: ignore[reportArgumentType]
    frame = b"".join(answer.pieces)[4:]
    read = decode_response(load_response_schema(Api.API_VERSIONS, 0), frame)
    assert read.error_code is ErrorCode.unsupported_version
    assert ranges(read)[Api.API_VERSIONS] == VersionRange(0, 4)


# -- DescribeCluster ---------------------------------------------------------------------------------------------------


@versions(Api.DESCRIBE_CLUSTER)
def test_the_cluster_is_described(broker: SmallBroker, version: int) -> None:
    """One broker, which is its own controller; operations only when asked for."""
    answer = ask(broker, Api.DESCRIBE_CLUSTER, version, include_cluster_authorized_operations=False, endpoint_type=1)
    assert (answer.error_code, answer.cluster_id, answer.controller_id) == (ErrorCode.none, broker.topics.cluster_id, 1)
    assert [(each.broker_id, each.host, each.port) for each in answer.brokers] == [(1, *ADDRESS)]
    assert answer.cluster_authorized_operations == NOT_ASKED
    asked = {"include_cluster_authorized_operations": True, "endpoint_type": 1}
    assert ask(broker, Api.DESCRIBE_CLUSTER, version, **asked).cluster_authorized_operations == 8096
    restrict(broker)
    assert ask(broker, Api.DESCRIBE_CLUSTER, version, **asked).cluster_authorized_operations == 0


def test_there_are_no_controllers_to_describe(broker: SmallBroker) -> None:
    """MISMATCHED_ENDPOINT_TYPE, as from a Kafka broker."""
    answer = ask(broker, Api.DESCRIBE_CLUSTER, 1, include_cluster_authorized_operations=False, endpoint_type=2)
    assert answer.error_code is ErrorCode.mismatched_endpoint_type

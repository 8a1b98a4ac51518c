"""Altering the configs of a topic or of the broker while it runs: AlterConfigs and IncrementalAlterConfigs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import CLUSTER_NAME, Operation, ResourceType
from semel.broker.config_types import ConfigKey, ConfigType, InvalidConfig, Value, is_integer
from semel.broker.configs import BROKER_CONFIGS, BrokerSettings
from semel.broker.pacing import Pace, Slices
from semel.broker.topic_configs import TOPIC_CONFIGS
from semel.broker.topics import decide_configs
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.context import RequestContext
    from semel.broker.state import Broker
    from semel.broker.topics import Topic

AUTHORIZATION_FAILED: Final = "Authorization failed."
_CHANGES_AT_ONCE: Final = 8
"""Each rewrites the list of all topics."""


class ConfigResource(IntEnum):
    """What a config belongs to, by its number on the wire (not the one of ACLs)."""

    TOPIC = 2
    BROKER = 4


class ConfigOperation(IntEnum):
    """What IncrementalAlterConfigs does to one config."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


@dataclass(frozen=True, slots=True)
class Current:
    """The configs of a resource before the change: what is set, and what the rest is."""

    keys: Mapping[str, ConfigKey]
    texts: Mapping[str, str]
    defaults: Mapping[str, Value]


Change = Callable[[Current], dict[str, str]]
"""From the configs before to the configs after; raises Refused."""


def alter_resources(
    broker: Broker, context: RequestContext, request: Any, changes: Sequence[Change]
) -> Slices[list[Mapping[str, Any]]]:
    """The answers for the request's resources, each changed durably or not at all."""
    resources = [(item.resource_type, item.resource_name) for item in request.resources]
    counts = Counter(resources)
    pace = Pace(_CHANGES_AT_ONCE)
    answers: list[Mapping[str, Any]] = []
    for resource, change in zip(resources, changes, strict=True):
        code, message = ErrorCode.none, None
        try:
            if counts[resource] > 1:
                raise Refused(ErrorCode.invalid_request, "Each resource must appear at most once.")
            yield from _alter(broker, context, *resource, change, validate_only=request.validate_only)
        except Refused as refusal:
            code, message = refusal.code, refusal.reason
        answers.append(
            {
                "error_code": code,
                "error_message": message,
                "resource_type": resource[0],
                "resource_name": resource[1],
            }
        )
        if pace.is_over():
            yield
    return answers


def _alter(
    broker: Broker, context: RequestContext, resource_type: int, name: str, change: Change, *, validate_only: bool
) -> Slices[None]:
    if resource_type == ConfigResource.TOPIC:
        return _alter_topic(broker, context, name, change, validate_only=validate_only)
    if resource_type == ConfigResource.BROKER:
        return _alter_broker(broker, context, name, change, validate_only=validate_only)
    raise Refused(ErrorCode.invalid_request, f"Unknown resource type {resource_type}")


def _alter_topic(
    broker: Broker, context: RequestContext, name: str, change: Change, *, validate_only: bool
) -> Slices[None]:
    if not name:
        raise Refused(ErrorCode.invalid_request, "Default topic resources are not allowed.")
    if not broker.authorizer.allows(context, Operation.ALTER_CONFIGS, ResourceType.TOPIC, name):
        raise Refused(ErrorCode.topic_authorization_failed, AUTHORIZATION_FAILED)

    def decide(topic: Topic) -> dict[str, str]:
        changed = change(Current(TOPIC_CONFIGS, topic.configs, broker.settings.topic_defaults))
        return decide_configs(changed, broker.settings)

    if not validate_only:
        yield from broker.topics.alter_config_in_slices(name, decide)
    elif (topic := broker.topics.get(name)) is not None:
        decide(topic)
    else:
        raise Refused(ErrorCode.unknown_topic_or_partition, f"The topic '{name}' does not exist.")


def _alter_broker(
    broker: Broker, context: RequestContext, name: str, change: Change, *, validate_only: bool
) -> Slices[None]:
    if not broker.authorizer.allows(context, Operation.ALTER_CONFIGS, ResourceType.CLUSTER, CLUSTER_NAME):
        raise Refused(ErrorCode.cluster_authorization_failed, AUTHORIZATION_FAILED)
    node_id = broker.settings.node_id
    if name and not is_integer(name):
        raise Refused(ErrorCode.invalid_request, f"Node id must be an integer, but it is: {name}")
    if name and int(name) != node_id:
        raise Refused(ErrorCode.invalid_request, f"Unexpected broker id, expected {node_id}, but received {name}")
    altered = broker.settings

    def decide() -> dict[str, str]:
        nonlocal altered
        texts, altered = _decide_broker_configs(broker.settings, change, is_default=not name)
        return texts

    if validate_only:
        decide()
    else:
        yield from broker.topics.alter_broker_config_in_slices(str(node_id) if name else "", decide)
        broker.settings = altered
        broker.topics.reconfigure_all()


def _decide_broker_configs(
    settings: BrokerSettings, change: Change, *, is_default: bool
) -> tuple[dict[str, str], BrokerSettings]:
    before = settings.dynamic_default if is_default else settings.dynamic
    texts = change(Current(BROKER_CONFIGS, before, settings.values))
    fixed = [key for key in texts if key not in BROKER_CONFIGS or not BROKER_CONFIGS[key].is_dynamic]
    if fixed:
        raise Refused(ErrorCode.invalid_request, f"Cannot update these configs dynamically: [{', '.join(fixed)}]")
    try:
        return texts, settings.with_dynamic(
            default=texts if is_default else settings.dynamic_default,
            own=settings.dynamic if is_default else texts,
        )
    except InvalidConfig as error:
        raise Refused(ErrorCode.invalid_request, str(error)) from error


# -- the two kinds of change -------------------------------------------------------------------------------------------


def replacing(configs: Sequence[tuple[str, str | None]]) -> Change:
    """AlterConfigs: these and no others."""

    def change(current: Current) -> dict[str, str]:
        _refuse_duplicates([name for name, _ in configs])
        for name, text in configs:
            if text is None:
                raise _null_value(name)
        return {name: text for name, text in configs if text is not None}

    return change


def incremental(operations: Sequence[tuple[str, int, str | None]]) -> Change:
    """IncrementalAlterConfigs: name, operation and value of each config that changes; the others stay.

    >>> current = Current(TOPIC_CONFIGS, {"flush.ms": "1"}, {"cleanup.policy": ("delete",)})
    >>> incremental([("flush.ms", 1, None), ("cleanup.policy", 2, "compact")])(current)
    {'cleanup.policy': 'delete,compact'}
    """

    def change(current: Current) -> dict[str, str]:
        _refuse_duplicates([name for name, _, _ in operations])
        texts = dict(current.texts)
        for name, number, text in operations:
            operation = _operation(number)
            if operation is ConfigOperation.DELETE:
                texts.pop(name, None)
            elif text is None:
                raise _null_value(name)
            elif operation is ConfigOperation.SET:
                texts[name] = text
            else:
                texts[name] = ",".join(_changed_list(current, name, operation, text))
        return texts

    return change


def _changed_list(current: Current, name: str, operation: ConfigOperation, text: str) -> list[str]:
    key = current.keys.get(name)
    if key is None or key.type is not ConfigType.LIST:
        raise Refused(ErrorCode.invalid_config, f"Can't {operation.name} to key {name} because its type is not LIST.")
    given = [word.strip() for word in text.split(",") if word.strip()]
    before = key.parse(current.texts[name]) if name in current.texts else current.defaults[name]
    if operation is ConfigOperation.SUBTRACT:
        return [word for word in before if word not in given]
    return [*before, *(word for word in dict.fromkeys(given) if word not in before)]


def _operation(number: int) -> ConfigOperation:
    try:
        return ConfigOperation(number)
    except ValueError:
        raise Refused(ErrorCode.invalid_request, f"Unknown config operation {number}.") from None


def _refuse_duplicates(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise Refused(ErrorCode.invalid_request, "Error due to duplicate config keys")


def _null_value(name: str) -> Refused:
    return Refused(ErrorCode.invalid_request, f"Null value not supported for : {name}")

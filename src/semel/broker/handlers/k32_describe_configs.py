"""DescribeConfigs (32), versions 1-4: the configs of topics and of this broker, with where each comes from.

Not done: documentation texts (null), and the configs of loggers, groups and client metrics (INVALID_REQUEST).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import CLUSTER_NAME, Operation, ResourceType
from semel.broker.config_changes import AUTHORIZATION_FAILED, ConfigResource
from semel.broker.config_entries import ConfigEntry, all_brokers_entries, broker_entries, topic_entries
from semel.broker.config_types import is_integer
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import answer_list, sliced
from semel.broker.topic_names import refuse_bad_name
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.state import Broker

_Known = dict[ConfigEntry, Mapping[str, Any]]


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    # Each resource once: a broker's configs a thousand times over are a hundred megabytes.
    resources = {(item.resource_type, item.resource_name): item for item in request.resources}
    known: _Known = {}
    found = (_describe(broker, context, request, item, known) for item in resources.values())
    work = sliced(found, weigh=lambda answer: 1 + len(answer["configs"]))
    return answer_list(broker, context, request, "results", work)


def _describe(broker: Broker, context: RequestContext, request: Any, item: Any, known: _Known) -> Mapping[str, Any]:
    resource = {"resource_type": item.resource_type, "resource_name": item.resource_name}
    try:
        entries = _entries(broker, context, item.resource_type, item.resource_name)
    except Refused as refusal:
        return {**resource, "error_code": refusal.code, "error_message": refusal.reason, "configs": []}
    wanted = set(item.configuration_keys or ())
    # Most topics have the same configs: thousands of equal entries would be a hundred megabytes.
    configs: list[Mapping[str, Any]] = []
    for entry in entries:
        if not wanted or entry.name in wanted:
            if entry not in known:
                known[entry] = _config(entry, with_synonyms=request.include_synonyms)
            configs.append(known[entry])
    return {**resource, "error_code": ErrorCode.none, "error_message": "", "configs": configs}


def _entries(broker: Broker, context: RequestContext, resource_type: int, name: str) -> Iterable[ConfigEntry]:
    allows = broker.authorizer.allows
    if resource_type == ConfigResource.TOPIC:
        if not allows(context, Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC, name):
            raise Refused(ErrorCode.topic_authorization_failed, AUTHORIZATION_FAILED)
        refuse_bad_name(name)
        topic = broker.topics.get(name)
        if topic is None:
            raise Refused(ErrorCode.unknown_topic_or_partition, "")
        return topic_entries(topic.configs, broker.settings)
    if resource_type != ConfigResource.BROKER:
        raise Refused(ErrorCode.invalid_request, f"Configs of resource type {resource_type} are not kept here.")
    if not allows(context, Operation.DESCRIBE_CONFIGS, ResourceType.CLUSTER, CLUSTER_NAME):
        raise Refused(ErrorCode.cluster_authorization_failed, AUTHORIZATION_FAILED)
    if not name:
        return all_brokers_entries(broker.settings)
    if not is_integer(name):
        raise Refused(ErrorCode.invalid_request, f"Broker id must be an integer, but it is: {name}")
    if int(name) != broker.settings.node_id:
        raise Refused(
            ErrorCode.invalid_request,
            f"Unexpected broker id, expected {broker.settings.node_id} or empty string, but received {name}",
        )
    return broker_entries(broker.settings)


def _config(entry: ConfigEntry, *, with_synonyms: bool) -> Mapping[str, Any]:
    synonyms = entry.synonyms if with_synonyms else ()
    return {
        "name": entry.name,
        "value": entry.value,
        "read_only": entry.is_read_only,
        "config_source": int(entry.source),
        "is_sensitive": entry.is_sensitive,
        "synonyms": [{"name": each.name, "value": each.value, "source": int(each.source)} for each in synonyms],
        "config_type": int(entry.type),
        "documentation": None,
    }

"""FindCoordinator (10), versions 0-6: who coordinates a group or transactional id. Here that is always this broker.

Several keys in one request from version 4. Not done: share groups (key type 2), which get INVALID_REQUEST.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import Pace, Slices, answer_in_slices, answer_list
from semel.broker.topics import OFFSETS_TOPIC, TRANSACTION_TOPIC
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.state import Broker

_BATCHED_SINCE: Final = 4
_KINDS: Final = {
    0: (ResourceType.GROUP, ErrorCode.group_authorization_failed, OFFSETS_TOPIC),
    1: (
        ResourceType.TRANSACTIONAL_ID,
        ErrorCode.transactional_id_authorization_failed,
        TRANSACTION_TOPIC,
    ),
}


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    key_type = getattr(request, "key_type", 0)
    if context.api_version < _BATCHED_SINCE:
        return answer_in_slices(broker, context, request, _find(broker, context, key_type, request.key))
    keys = dict.fromkeys(request.coordinator_keys)
    return answer_list(broker, context, request, "coordinators", _find_all(broker, context, key_type, keys))


def _find_all(
    broker: Broker, context: RequestContext, key_type: int, keys: Iterable[str]
) -> Slices[list[Mapping[str, Any]]]:
    pace = Pace()
    found: list[Mapping[str, Any]] = []
    for key in keys:
        found.append({"key": key, **(yield from _find(broker, context, key_type, key))})
        if pace.is_over():
            yield
    return found


def _find(broker: Broker, context: RequestContext, key_type: int, key: str) -> Slices[Mapping[str, Any]]:
    try:
        yield from _check(broker, context, key_type, key)
    except Refused as refusal:
        return {
            "error_code": refusal.code,
            "error_message": refusal.reason,
            "node_id": -1,
            "host": "",
            "port": -1,
        }
    host, port = broker.advertised(context)
    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        "node_id": broker.settings.node_id,
        "host": host,
        "port": port,
    }


def _check(broker: Broker, context: RequestContext, key_type: int, key: str) -> Slices[None]:
    kind = _KINDS.get(key_type)
    if kind is None:
        raise Refused(ErrorCode.invalid_request, f"There is no coordinator for key type {key_type} here.")
    resource_type, not_authorized, internal_topic = kind
    if not broker.authorizer.allows(context, Operation.DESCRIBE, resource_type, key):
        raise Refused(not_authorized, "Authorization failed.")
    try:
        yield from broker.topics.ensure_internal_in_slices(internal_topic, broker.settings)
    except Refused as refusal:
        raise Refused(ErrorCode.coordinator_not_available, refusal.reason) from refusal

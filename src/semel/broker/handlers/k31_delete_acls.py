"""DeleteAcls, versions 1-3: removes what each filter picks, and lists it. Needs ALTER on the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acl_requests import NOT_WRITTEN, STORE_FAILURES, check_acls, filter_of
from semel.broker.acls import AclBinding, AclFilter, Operation
from semel.broker.pacing import Slices, answer_list
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.context import Reply, RequestContext
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    return answer_list(broker, context, request, "filter_results", _delete(broker, context, request))


def _delete(broker: Broker, context: RequestContext, request: Any) -> Slices[list[Any]]:
    try:
        check_acls(broker, context, Operation.ALTER)
    except Refused as refused:
        return [_refusal(refused) for _ in request.filters]
    filters = [_read(each) for each in request.filters]
    try:
        chosen = [each for each in filters if isinstance(each, AclFilter)]
        removed = iter((yield from broker.authorizer.remove_in_slices(chosen)))
    except STORE_FAILURES:
        failed = _refusal(Refused(ErrorCode.kafka_storage_error, NOT_WRITTEN))
        results = [failed if isinstance(each, AclFilter) else _refusal(each) for each in filters]
    else:
        results = [_result(next(removed)) if isinstance(each, AclFilter) else _refusal(each) for each in filters]
    return results


def _read(each: Any) -> AclFilter | Refused:
    try:
        return filter_of(each)
    except Refused as refused:
        return refused


def _result(removed: Sequence[AclBinding]) -> dict[str, Any]:
    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        "matching_acls": [_matching(binding) for binding in removed],
    }


def _matching(binding: AclBinding) -> dict[str, Any]:
    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        "resource_type": binding.resource_type.value,
        "resource_name": binding.name,
        "pattern_type": binding.pattern_type.value,
        "principal": binding.principal,
        "host": binding.host,
        "operation": binding.operation.value,
        "permission_type": binding.permission.value,
    }


def _refusal(refused: Refused) -> dict[str, Any]:
    return {"error_code": refused.code, "error_message": refused.reason, "matching_acls": ()}

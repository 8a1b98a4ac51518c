"""DescribeAcls, versions 1-3: the bindings that a filter picks. Needs DESCRIBE on the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acl_requests import check_acls, filter_of
from semel.broker.acls import AclBinding, Operation
from semel.broker.pacing import ENTRIES_AT_ONCE, Slices, answer_in_slices
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.context import Reply, RequestContext
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    return answer_in_slices(broker, context, request, _describe(broker, context, request))


def _describe(broker: Broker, context: RequestContext, request: Any) -> Slices[Mapping[str, Any]]:
    try:
        check_acls(broker, context, Operation.DESCRIBE)
        found = yield from broker.authorizer.find_in_slices(filter_of(request))
    except Refused as refused:
        return {"error_code": refused.code, "error_message": refused.reason, "resources": ()}
    if len(found) > ENTRIES_AT_ONCE:
        yield
    resources = [
        {
            "resource_type": resource_type.value,
            "resource_name": name,
            "pattern_type": pattern_type.value,
            "acls": [_entry(binding) for binding in bindings],
        }
        for (resource_type, name, pattern_type), bindings in groupby(found, key=_resource)
    ]
    return {"error_code": ErrorCode.none, "error_message": None, "resources": resources}


def _resource(binding: AclBinding) -> tuple[Any, str, Any]:
    return binding.resource_type, binding.name, binding.pattern_type


def _entry(binding: AclBinding) -> dict[str, Any]:
    return {
        "principal": binding.principal,
        "host": binding.host,
        "operation": binding.operation.value,
        "permission_type": binding.permission.value,
    }

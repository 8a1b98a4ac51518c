"""DescribeUserScramCredentials, version 0 (KIP-554): mechanisms and iterations. Needs DESCRIBE on the cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acl_requests import check_cluster
from semel.broker.acls import Operation
from semel.broker.pacing import Slices, answer_in_slices, sliced
from semel.broker.scram import MECHANISM_NUMBERS, ScramCredential
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.context import Reply, RequestContext
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    return answer_in_slices(broker, context, request, _describe(broker, context, request))


def _describe(broker: Broker, context: RequestContext, request: Any) -> Slices[Mapping[str, Any]]:
    try:
        check_cluster(broker, context, Operation.DESCRIBE)
    except Refused as refused:
        return {"error_code": refused.code, "error_message": refused.reason, "results": ()}
    users = yield from broker.credentials.scram_users_in_slices()
    # No names means all of them.
    asked = Counter([user.name for user in request.users] if request.users else list(users))
    results = yield from sliced(_result(name, count, users.get(name, ())) for name, count in asked.items())
    return {"error_code": ErrorCode.none, "error_message": None, "results": results}


def _result(name: str, count: int, credentials: Sequence[ScramCredential]) -> dict[str, Any]:
    code, message = ErrorCode.none, None
    if count > 1:
        code = ErrorCode.duplicate_resource
        message = f"Cannot describe SCRAM credentials for the same user twice in a single request: {name}"
    elif not credentials:
        code = ErrorCode.resource_not_found
        message = f"Attempt to describe a user credential that does not exist: {name}"
    infos = [{"mechanism": MECHANISM_NUMBERS[each.mechanism], "iterations": each.iterations} for each in credentials]
    return {
        "user": name,
        "error_code": code,
        "error_message": message,
        "credential_infos": infos if code is ErrorCode.none else (),
    }

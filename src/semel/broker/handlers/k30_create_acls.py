"""CreateAcls, versions 1-3: adds bindings; an invalid one does not keep the others out. Needs ALTER on the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acl_requests import NOT_WRITTEN, STORE_FAILURES, binding_of, check_acls
from semel.broker.acls import AclBinding, Operation
from semel.core.refusal import Refused
from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.context import Reply, RequestContext
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    try:
        check_acls(broker, context, Operation.ALTER)
    except Refused as refused:
        return respond(request, results=[_refusal(refused) for _ in request.creations])
    outcomes = [_read(creation) for creation in request.creations]
    try:
        broker.authorizer.add([outcome for outcome in outcomes if isinstance(outcome, AclBinding)])
    except STORE_FAILURES:
        failed = Refused(ErrorCode.kafka_storage_error, NOT_WRITTEN)
        outcomes = [failed if isinstance(outcome, AclBinding) else outcome for outcome in outcomes]
    return respond(request, results=[_result(outcome) for outcome in outcomes])


def _read(creation: Any) -> AclBinding | Refused:
    try:
        return binding_of(creation)
    except Refused as refused:
        return refused


def _result(outcome: AclBinding | Refused) -> dict[str, Any]:
    if isinstance(outcome, Refused):
        return _refusal(outcome)
    return {"error_code": ErrorCode.none, "error_message": None}


def _refusal(refused: Refused) -> dict[str, Any]:
    return {"error_code": refused.code, "error_message": refused.reason}

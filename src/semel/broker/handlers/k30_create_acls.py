"""CreateAcls, versions 1-3: adds bindings; an invalid one does not keep the others out. Needs ALTER on the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acl_requests import NOT_WRITTEN, STORE_FAILURES, binding_of, check_acls
from semel.broker.acls import AclBinding, Operation, lines_of
from semel.broker.pacing import Pace, Slices, answer_list
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.context import Reply, RequestContext
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    return answer_list(broker, context, request, "results", _create(broker, context, request))


def _create(broker: Broker, context: RequestContext, request: Any) -> Slices[list[Any]]:
    try:
        check_acls(broker, context, Operation.ALTER)
    except Refused as refused:
        return [_refusal(refused) for _ in request.creations]
    lines: dict[AclBinding, str] = {}
    outcomes: list[AclBinding | Refused] = []
    pace = Pace()
    for creation in request.creations:
        outcome = _read(creation)
        outcomes.append(outcome)
        if isinstance(outcome, AclBinding):
            lines |= lines_of([outcome])
        if pace.is_over():
            yield
    failed: Refused | None = None
    try:
        yield from broker.authorizer.add_lines(lines)
    except STORE_FAILURES:
        failed = Refused(ErrorCode.kafka_storage_error, NOT_WRITTEN)
    except Refused as refused:
        failed = refused
    return [_result(failed if failed and isinstance(outcome, AclBinding) else outcome) for outcome in outcomes]


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

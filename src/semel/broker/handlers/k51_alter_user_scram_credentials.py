"""AlterUserScramCredentials, version 0 (KIP-554): sets and deletes credentials. Needs ALTER on the cluster.

One user can be altered once in a request. What is wrong about one user does not keep the others from being altered.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acl_requests import NOT_WRITTEN, STORE_FAILURES, check_cluster
from semel.broker.acls import Operation
from semel.broker.credentials import CredentialChange
from semel.broker.pacing import Pace, Slices, answer_list
from semel.broker.scram import (
    ITERATIONS_MAX,
    ITERATIONS_MIN,
    MECHANISM_NUMBERS,
    SALT_BYTES_MAX,
    USERNAME_BYTES_MAX,
    ScramCredential,
)
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.context import Reply, RequestContext
    from semel.broker.credentials import CredentialStore
    from semel.broker.state import Broker

_NAMES = {number: name for name, number in MECHANISM_NUMBERS.items()}


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    return answer_list(broker, context, request, "results", _alter(broker, context, request))


def _alter(broker: Broker, context: RequestContext, request: Any) -> Slices[list[Any]]:
    asked = Counter(each.name for each in (*request.deletions, *request.upsertions))
    try:
        check_cluster(broker, context, Operation.ALTER)
    except Refused as refused:
        return [_result(name, refused) for name in asked]
    outcomes: dict[str, CredentialChange | Refused] = {}
    pace = Pace()
    for each in (*request.deletions, *request.upsertions):
        outcomes[each.name] = _read(broker.credentials, each, asked[each.name])
        if pace.is_over():
            yield
    failed: Refused | None = None
    try:
        changes = [each for each in outcomes.values() if isinstance(each, CredentialChange)]
        yield from broker.credentials.change_in_slices(changes)
    except STORE_FAILURES:
        failed = Refused(ErrorCode.kafka_storage_error, NOT_WRITTEN)
    except Refused as refused:
        failed = refused
    return [
        _result(name, failed if failed and isinstance(outcome, CredentialChange) else outcome)
        for name, outcome in outcomes.items()
    ]


def _read(credentials: CredentialStore, each: Any, count: int) -> CredentialChange | Refused:
    try:
        if count > 1:
            raise Refused(ErrorCode.duplicate_resource, "A user credential cannot be altered twice in the same request")
        if not each.name:
            raise Refused(ErrorCode.unacceptable_credential, "Username must not be empty")
        if each.mechanism not in _NAMES:
            raise Refused(ErrorCode.unsupported_sasl_mechanism, "Unknown SCRAM mechanism")
        if hasattr(each, "salted_password"):
            return _upsertion(each)
        return _deletion(credentials, each)
    except Refused as refused:
        return refused


def _upsertion(each: Any) -> CredentialChange:
    if each.iterations < ITERATIONS_MIN:
        raise Refused(ErrorCode.unacceptable_credential, "Too few iterations")
    if each.iterations > ITERATIONS_MAX:
        raise Refused(ErrorCode.unacceptable_credential, "Too many iterations")
    if len(each.name.encode()) > USERNAME_BYTES_MAX:
        raise Refused(ErrorCode.unacceptable_credential, f"Username of more than {USERNAME_BYTES_MAX:,} bytes")
    if max(len(each.salt), len(each.salted_password)) > SALT_BYTES_MAX:
        raise Refused(
            ErrorCode.unacceptable_credential, f"Salt or salted password of more than {SALT_BYTES_MAX:,} bytes"
        )
    mechanism = _NAMES[each.mechanism]
    credential = ScramCredential.from_salted(
        mechanism, bytes(each.salted_password), salt=bytes(each.salt), iterations=each.iterations
    )
    return CredentialChange(each.name, mechanism, credential)


def _deletion(credentials: CredentialStore, each: Any) -> CredentialChange:
    mechanism = _NAMES[each.mechanism]
    if credentials.scram(each.name, mechanism) is None:
        raise Refused(ErrorCode.resource_not_found, "Attempt to delete a user credential that does not exist")
    return CredentialChange(each.name, mechanism, None)


def _result(name: str, outcome: CredentialChange | Refused) -> dict[str, Any]:
    if isinstance(outcome, Refused):
        return {"user": name, "error_code": outcome.code, "error_message": outcome.reason}
    return {"user": name, "error_code": ErrorCode.none, "error_message": None}

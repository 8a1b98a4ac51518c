"""TxnOffsetCommit (28), versions 0-5: a group's positions inside a transaction, fenced by generation (KIP-447).

Up to version 4 the group must have been added to the transaction by AddOffsetsToTxn; version 5 (protocol 2) adds it.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.offset_commits import Codes, commit_and_answer
from semel.core.group_coordinator import Committer
from semel.core.group_offsets import OffsetCommit
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.state import Broker

_PROTOCOL_2_SINCE: Final = 5
_ABORTABLE_KNOWN_SINCE: Final = 4


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    def check() -> None:
        _check_authorization(broker, context, request)

    def commit(commits: list[OffsetCommit]) -> Codes:
        return _commit(broker, context, request, commits)

    def code_for_client(code: ErrorCode) -> ErrorCode:
        return _code_for_client(code, context.api_version)

    def wait_safe() -> Awaitable[None] | None:
        transactions, name = broker.transactions, request.transactional_id
        return transactions.wait_prepared(name) if transactions.is_two_phase(name) else None

    return commit_and_answer(broker, context, request, check, commit, code_for_client, wait_safe)


def _check_authorization(broker: Broker, context: RequestContext, request: Any) -> None:
    allows = broker.authorizer.allows
    if not allows(context, Operation.WRITE, ResourceType.TRANSACTIONAL_ID, request.transactional_id):
        raise Refused(ErrorCode.transactional_id_authorization_failed, request.transactional_id)
    if not allows(context, Operation.READ, ResourceType.GROUP, request.group_id):
        raise Refused(ErrorCode.group_authorization_failed, request.group_id)


def _commit(broker: Broker, context: RequestContext, request: Any, commits: list[OffsetCommit]) -> Codes:
    committer = Committer(
        getattr(request, "member_id", ""),
        getattr(request, "generation_id", -1),
        getattr(request, "group_instance_id", None),
    )
    decision = broker.groups.coordinator.decide_txn_commit(
        request.group_id, committer, commits, now_ms=broker.clock.now_ms()
    )
    if decision.records:
        _join_transaction(broker, context, request)
        broker.groups.carry_out_transactional(request.group_id, decision, request.producer_id, request.producer_epoch)
    return decision.codes


def _join_transaction(broker: Broker, context: RequestContext, request: Any) -> None:
    """Without it, offsets delayed past the end of their transaction would wait for a marker that never comes."""
    identity = (request.transactional_id, request.producer_id, request.producer_epoch)
    name = broker.groups.partition_name_of(request.group_id)
    if context.api_version >= _PROTOCOL_2_SINCE and broker.settings.transaction_version >= 2:
        broker.transactions.add_partitions(*identity, [name], client_version=2)
        return
    abortable = context.api_version >= _ABORTABLE_KNOWN_SINCE
    codes = broker.transactions.verify_partitions(
        *identity,
        [name],
        code_if_missing=ErrorCode.transaction_abortable if abortable else ErrorCode.invalid_txn_state,
    )
    if codes[name] is not ErrorCode.none:
        raise Refused(codes[name], f"the group {request.group_id!r} was not added to the transaction")


def _code_for_client(code: ErrorCode, version: int) -> ErrorCode:
    if code is ErrorCode.producer_fenced:
        return ErrorCode.invalid_producer_epoch
    if code is ErrorCode.concurrent_transactions and version < _PROTOCOL_2_SINCE:
        # Older clients take the plain code for fatal here; this one they retry, and the markers are soon written.
        return ErrorCode.coordinator_load_in_progress
    return code

"""OffsetCommit (8), versions 2-9: positions of a group, from a member or from whoever assigns partitions itself.

Version 9 knows member epochs (KIP-848). Not done: version 10, which names topics by id.
"""

from __future__ import annotations

from datetime import timedelta
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

_MS: Final = timedelta(milliseconds=1)


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    def check() -> None:
        if not broker.authorizer.allows(context, Operation.READ, ResourceType.GROUP, request.group_id):
            raise Refused(ErrorCode.group_authorization_failed, request.group_id)

    def commit(commits: list[OffsetCommit]) -> Codes:
        return _commit(broker, context, request, commits)

    return commit_and_answer(broker, context, request, check, commit)


def _commit(broker: Broker, context: RequestContext, request: Any, commits: list[OffsetCommit]) -> Codes:
    retention = getattr(request, "retention_time", None)
    decision = broker.groups.coordinator.decide_commit(
        request.group_id,
        Committer(
            request.member_id, request.generation_id_or_member_epoch, getattr(request, "group_instance_id", None)
        ),
        commits,
        now_ms=broker.clock.now_ms(),
        # Versions 2-4 bring a retention time of their own, unless it is -1.
        retention_ms=None if retention is None or retention < timedelta(0) else retention // _MS,
        api_version=context.api_version,
    )
    broker.groups.carry_out(request.group_id, decision)
    return decision.codes

"""InitProducerId (22), versions 0-5: a producer id, and the epoch that shuts older owners of a transactional id out.

Not done: version 6, two-phase commit with an outside coordinator (KIP-939).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import CLUSTER_NAME, Operation, ResourceType
from semel.broker.context import Answer, RequestContext
from semel.broker.storage.failures import StorageError
from semel.core.refusal import Refused
from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.state import Broker

FENCED_KNOWN_SINCE = 4


async def handle(broker: Broker, context: RequestContext, request: Any) -> Answer:
    transactional_id: str | None = request.transactional_id
    try:
        if transactional_id is None:
            _authorize_idempotent(broker, context)
            # A producer without a name has nothing that a higher epoch could protect: it gets a new id (KIP-360).
            identity = (broker.producer_ids.next_id(), 0)
        else:
            _authorize_transactional(broker, context, transactional_id)
            identity = await broker.transactions.init_producer_id(
                transactional_id,
                round(request.transaction_timeout.total_seconds() * 1000),
                getattr(request, "producer_id", -1),
                getattr(request, "producer_epoch", -1),
            )
    except StorageError as error:
        broker.note_storage_error(error)
        return respond(request, error_code=ErrorCode.coordinator_not_available, producer_id=-1, producer_epoch=-1)
    except Refused as refusal:
        broker.metrics.count_refusal(refusal.code)
        code = refusal.code
        if code is ErrorCode.producer_fenced and context.api_version < FENCED_KNOWN_SINCE:
            code = ErrorCode.invalid_producer_epoch
        return respond(request, error_code=code, producer_id=-1, producer_epoch=-1)
    return respond(request, error_code=ErrorCode.none, producer_id=identity[0], producer_epoch=identity[1])


def _authorize_idempotent(broker: Broker, context: RequestContext) -> None:
    authorizer = broker.authorizer
    if not authorizer.allows(context, Operation.IDEMPOTENT_WRITE, ResourceType.CLUSTER, CLUSTER_NAME) and not (
        authorizer.allows_any(context, Operation.WRITE, ResourceType.TOPIC)
    ):
        raise Refused(ErrorCode.cluster_authorization_failed, "no topic may be written to")


def _authorize_transactional(broker: Broker, context: RequestContext, transactional_id: str) -> None:
    if not broker.authorizer.allows(context, Operation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id):
        raise Refused(ErrorCode.transactional_id_authorization_failed, transactional_id)

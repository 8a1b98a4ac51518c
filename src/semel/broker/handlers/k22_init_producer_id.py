"""InitProducerId (22), versions 0-6: a producer id, and the epoch that shuts older owners of a transactional id out.

Version 6 is two-phase commit with an outside coordinator (KIP-939). It is offered where
`transaction.two.phase.commit.enable` is true; `enable2Pc` takes TWO_PHASE_COMMIT on the transactional id besides WRITE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import CLUSTER_NAME, Operation, ResourceType
from semel.broker.context import Answer, RequestContext
from semel.broker.storage.failures import StorageError
from semel.core.refusal import Refused
from semel.core.transaction_metadata import NO_IDENTITY, ProducerIdentity
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
            identity, kept = ProducerIdentity(broker.producer_ids.next_id(), 0), NO_IDENTITY
        else:
            two_phase = getattr(request, "enable2_pc", False)
            _authorize_transactional(broker, context, transactional_id, two_phase=two_phase)
            identity, kept = await broker.transactions.init_producer_id(
                transactional_id,
                round(request.transaction_timeout.total_seconds() * 1000),
                getattr(request, "producer_id", -1),
                getattr(request, "producer_epoch", -1),
                two_phase=two_phase,
                keep_prepared=getattr(request, "keep_prepared_txn", False),
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
    return respond(
        request,
        error_code=ErrorCode.none,
        producer_id=identity.producer_id,
        producer_epoch=identity.producer_epoch,
        ongoing_txn_producer_id=kept.producer_id,
        ongoing_txn_producer_epoch=kept.producer_epoch,
    )


def _authorize_idempotent(broker: Broker, context: RequestContext) -> None:
    authorizer = broker.authorizer
    if not authorizer.allows(context, Operation.IDEMPOTENT_WRITE, ResourceType.CLUSTER, CLUSTER_NAME) and not (
        authorizer.allows_any(context, Operation.WRITE, ResourceType.TOPIC)
    ):
        raise Refused(ErrorCode.cluster_authorization_failed, "no topic may be written to")


def _authorize_transactional(
    broker: Broker, context: RequestContext, transactional_id: str, *, two_phase: bool
) -> None:
    operations = (Operation.WRITE, Operation.TWO_PHASE_COMMIT) if two_phase else (Operation.WRITE,)
    for operation in operations:
        if not broker.authorizer.allows(context, operation, ResourceType.TRANSACTIONAL_ID, transactional_id):
            raise Refused(ErrorCode.transactional_id_authorization_failed, transactional_id)

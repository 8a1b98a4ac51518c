"""DescribeCluster (60), versions 0-1: the cluster's id and its one broker. There are no controllers apart from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.context import Reply, RequestContext
from semel.broker.topic_answers import NOT_ASKED, cluster_operations
from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.state import Broker

_BROKERS: Final = 1
_NO_CONTROLLER: Final = (
    "The request was sent to an endpoint of type BROKER, but we wanted an endpoint of type CONTROLLER"
)


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    if getattr(request, "endpoint_type", _BROKERS) != _BROKERS:
        return respond(
            request,
            error_code=ErrorCode.mismatched_endpoint_type,
            error_message=_NO_CONTROLLER,
            endpoint_type=_BROKERS,
            cluster_id="",
            controller_id=-1,
            brokers=[],
            cluster_authorized_operations=NOT_ASKED,
        )
    host, port = broker.advertised(context)
    node = broker.settings.node_id
    return respond(
        request,
        error_code=ErrorCode.none,
        error_message=None,
        endpoint_type=_BROKERS,
        cluster_id=broker.topics.cluster_id,
        controller_id=node,
        brokers=[{"broker_id": node, "host": host, "port": port, "rack": broker.settings.rack}],
        cluster_authorized_operations=cluster_operations(
            broker, context, is_asked=request.include_cluster_authorized_operations
        ),
    )

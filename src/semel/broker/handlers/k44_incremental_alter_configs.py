"""IncrementalAlterConfigs (44), versions 0-1: SET, DELETE, APPEND and SUBTRACT on a topic's or this broker's configs.

Not done: the configs of loggers, groups and client metrics (INVALID_REQUEST).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semel.broker.config_changes import alter_resources, incremental
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import answer_list

if TYPE_CHECKING:
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    changes = [
        incremental([(config.name, config.config_operation, config.value) for config in item.configs])
        for item in request.resources
    ]
    return answer_list(broker, context, request, "responses", alter_resources(broker, context, request, changes))

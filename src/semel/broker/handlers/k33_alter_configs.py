"""AlterConfigs (33), versions 0-2: the old call, which replaces all configs of a topic or of this broker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semel.broker.config_changes import alter_resources, replacing
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import answer_list

if TYPE_CHECKING:
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    changes = [replacing([(config.name, config.value) for config in item.configs]) for item in request.resources]
    return answer_list(broker, context, request, "responses", alter_resources(broker, context, request, changes))

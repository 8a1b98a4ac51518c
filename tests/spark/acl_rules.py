"""Rights on topics, granted by librdkafka."""
# confluent-kafka hands its names on without saying so to type checkers.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)


def allow(bootstrap: str, principal: str, operation: AclOperation, *, topic: str = "closed") -> None:
    binding = AclBinding(
        ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, principal, "*", operation, AclPermissionType.ALLOW
    )
    client = AdminClient({"bootstrap.servers": bootstrap})
    for done in client.create_acls([binding]).values():
        done.result(30)

"""A sink without the right to write: found when it takes its pipeline over, before any row is computed."""
# confluent-kafka hands its names on without saying so to type checkers.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from semel.broker.process import Broker
from semel.client.admin import Admin
from semel.errors import NotAuthorized
from semel.spark.sink import KafkaSink


def allow(bootstrap: str, principal: str, operation: AclOperation) -> None:
    binding = AclBinding(
        ResourceType.TOPIC, "closed", ResourcePatternType.LITERAL, principal, "*", operation, AclPermissionType.ALLOW
    )
    client = AdminClient({"bootstrap.servers": bootstrap})
    for done in client.create_acls([binding]).values():
        done.result(30)


def test_a_topic_that_is_closed_to_this_user_is_refused_at_the_start() -> None:
    """E4: who may only describe a topic cannot write to it; what nobody restricted is open."""
    config = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with Broker(config=config) as broker:
        with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics("closed", "open", partitions=1)
        allow(broker.bootstrap, "User:somebody", AclOperation.WRITE)
        allow(broker.bootstrap, "User:ANONYMOUS", AclOperation.DESCRIBE)
        open_sink = KafkaSink(name="a", bootstrap=broker.bootstrap, topic="open")
        open_sink.open()
        open_sink.close()
        closed_sink = KafkaSink(name="b", bootstrap=broker.bootstrap, topic="closed")
        with pytest.raises(NotAuthorized, match="may not write to topic 'closed'; nothing was computed"):
            closed_sink.open()
        closed_sink.close()

"""A sink without the right to write: found when it takes its pipeline over, before any row is computed."""
# confluent-kafka hands its names on without saying so to type checkers.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import logging

import pytest
from acl_rules import allow
from confluent_kafka.admin import AclOperation

from semel.broker.process import Broker
from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.settings import parse_config
from semel.client.topic_rules import TopicLookup, TopicRules
from semel.errors import NotAuthorized
from semel.spark.ledger import Entry
from semel.spark.options import make_options
from semel.spark.owner import PipelineOwner
from semel.spark.sink import KafkaSink


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
        open_sink.check()
        open_sink.close()
        closed_sink = KafkaSink(name="b", bootstrap=broker.bootstrap, topic="closed")
        with pytest.raises(NotAuthorized, match="may not write to topic 'closed'; nothing was computed"):
            closed_sink.check()
        closed_sink.close()


def test_rights_that_dead_letters_need() -> None:
    """D8: Write on their topic. Without DescribeConfigs no limit is known."""
    config = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with Broker(config=config) as broker:
        with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics("closed", "silent", "bad", partitions=1, config={"max.message.bytes": "5000"})
        allow(broker.bootstrap, "User:somebody", AclOperation.WRITE)
        allow(broker.bootstrap, "User:ANONYMOUS", AclOperation.DESCRIBE)
        allow(broker.bootstrap, "User:ANONYMOUS", AclOperation.WRITE, topic="silent")
        closed = KafkaSink(name="a", bootstrap=broker.bootstrap, topic="silent", dead_letter="closed")
        with pytest.raises(NotAuthorized, match="Dead letters cannot be written: This user may not write to topic"):
            closed.check()
        closed.close()
        with Cluster(parse_config({"bootstrap.servers": broker.bootstrap}).client) as cluster:
            lookup = TopicLookup(lambda: cluster)
            assert lookup.rules("silent") == TopicRules(1), "no limit is known"
            assert lookup.rules("bad") == TopicRules(1, bytes_max=5_000)
            assert lookup.rules("closed").problem == "This user may not write to topic 'closed'."


def test_a_cluster_that_refuses_the_ledgers_settings_still_has_a_ledger(caplog: pytest.LogCaptureFixture) -> None:
    """E2: managed clusters keep settings such as segment.ms to themselves; only compaction is needed."""
    config = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with Broker(config=config) as broker:
        for operation in (AclOperation.CREATE, AclOperation.READ, AclOperation.WRITE, AclOperation.DESCRIBE):
            allow(broker.bootstrap, "User:ANONYMOUS", operation, topic="ledger")
        options = make_options(
            name="a", bootstrap=broker.bootstrap, topic=None, settings=None, more_settings={}, ledger="ledger"
        )
        with caplog.at_level(logging.INFO, "semel.spark"):
            owner = PipelineOwner(options, "a")
        owner.begin()
        owner.settle([], Entry(query="q", batch=0), {})
        owner.close()
        again = PipelineOwner(options, "a")
        again.close()
    assert "ledger setting refused" in caplog.text
    assert again.committed is not None
    assert again.committed.batch == 0

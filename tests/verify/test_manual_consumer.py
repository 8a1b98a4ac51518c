"""A consumer with a fixed share of the partitions, whose positions are kept in a group's name."""

from __future__ import annotations

import semel
from semel.testing.proxy import KafkaProxy
from semel.verify.clients.face import Surroundings
from semel.verify.clients.libraries import open_clients
from semel.verify.clients.manual_consumer import ManualConsumer
from semel.wire import Api


def test_its_requests_carry_the_name_of_its_worker(semel_broker: semel.Broker) -> None:
    """Faults that are meant for one worker find it by this name, also where it asks for and commits positions."""
    with semel.Admin({"bootstrap.servers": semel_broker.bootstrap}) as admin:
        admin.create_topics("manual")
    with KafkaProxy(semel_broker.bootstrap) as proxy:
        surroundings = Surroundings(proxy.bootstrap, [("manual", 0)], "worker-7")
        reader = open_clients("semel", surroundings).reader({0: 0}, "read_committed")
        consumer = ManualConsumer(surroundings, reader, "manual-group", [0])
        consumer.rewind()
        consumer.commit({0: 0})
        consumer.close()
        asked = [passage for passage in proxy.passages if passage.api_key in (Api.OFFSET_FETCH, Api.OFFSET_COMMIT)]
    assert {passage.api_key for passage in asked} == {Api.OFFSET_FETCH, Api.OFFSET_COMMIT}
    assert {passage.client_id for passage in asked} == {"worker-7"}

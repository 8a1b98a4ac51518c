"""A user's own test file: the broker comes from Semel's pytest plugin, the client is confluent-kafka."""

import json

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

ORDERS = 300


def committed(bootstrap, topic):
    reader = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    reader.assign([TopicPartition(topic, 0, 0)])
    values = []
    while (message := reader.poll(30)) is not None and not message.error():
        values.append(json.loads(message.value()))
    reader.close()
    return values


def copy_orders(bootstrap, count):
    """The code under test: consume, transform, produce, with the offsets in the transaction."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "copier",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe(["orders"])
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": "copier"})
    producer.init_transactions(30)
    while count > 0:
        messages = consumer.consume(min(count, 50), 5)
        if not messages:
            continue
        producer.begin_transaction()
        for message in messages:
            producer.produce("copied", message.value())
        producer.send_offsets_to_transaction(
            consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), 30
        )
        producer.commit_transaction(30)
        count -= len(messages)
    consumer.close()


@pytest.fixture
def orders(semel_broker):
    admin = AdminClient({"bootstrap.servers": semel_broker.bootstrap})
    for future in admin.create_topics([NewTopic("orders", 1), NewTopic("copied", 1)]).values():
        future.result(30)
    producer = Producer({"bootstrap.servers": semel_broker.bootstrap, "enable.idempotence": True})
    for number in range(ORDERS):
        producer.produce("orders", json.dumps({"id": number}))
    assert producer.flush(30) == 0
    return semel_broker


def test_the_copier_goes_on_after_a_restart_of_itself_and_of_the_broker(orders):
    copy_orders(orders.bootstrap, 100)
    orders.restart()
    copy_orders(orders.bootstrap, ORDERS - 100)
    assert [order["id"] for order in committed(orders.bootstrap, "copied")] == list(range(ORDERS))

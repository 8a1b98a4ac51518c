"""A correct program with confluent-kafka: consume, produce and commit the positions in one transaction.

`confluent_copier.py BOOTSTRAP INPUT OUTPUT[,OUTPUT...]`
"""

from __future__ import annotations

import sys

from confluent_kafka import Consumer, KafkaException, Producer


def main(bootstrap: str, source: str, outputs: str) -> None:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "copier",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "session.timeout.ms": 6_000,
            "group.instance.id": "copier-0",
            "metadata.recovery.strategy": "none",
        }
    )
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": "copier",
            "transaction.timeout.ms": 6_000,
            # Otherwise librdkafka 2.16 can leave the positions queued for good when its only broker was away.
            "metadata.recovery.strategy": "none",
        }
    )
    producer.init_transactions()
    consumer.subscribe([source])
    while True:
        messages = consumer.consume(200, timeout=0.2)
        if not messages:
            continue
        producer.begin_transaction()
        for message in messages:
            if message.error():
                raise KafkaException(message.error())
            for output in outputs.split(","):
                producer.produce(output, value=message.value(), key=message.key())
        positions = consumer.position(consumer.assignment())
        producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata())
        producer.commit_transaction()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Bill what the session has priced: a consumer as everybody writes it, with librdkafka."""

import json
import sys

from confluent_kafka import Consumer

consumer = Consumer(
    {
        "bootstrap.servers": sys.argv[1],
        "group.id": "billing",
        "isolation.level": "read_committed",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
)
consumer.subscribe(["warehouse"])
with open("bills.txt", "a") as bills:
    try:
        while True:
            message = consumer.poll(1.0)
            if message is None:
                continue
            if message.error():
                raise SystemExit(message.error())
            bills.write(f"{json.loads(message.value())['id']}\n")
            bills.flush()
            consumer.commit(message, asynchronous=False)
    except KeyboardInterrupt:
        consumer.close()

"""Bill each order: a consumer as everybody writes it, stopped in order by SIGTERM, on whichever cluster it is told."""

import json
import signal
import sys

from confluent_kafka import Consumer

stopped = False


def stop(*_):
    global stopped
    stopped = True


signal.signal(signal.SIGTERM, stop)
consumer = Consumer(
    {
        "bootstrap.servers": sys.argv[1],
        "group.id": "billing",
        "isolation.level": "read_committed",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
)
consumer.subscribe(["orders"])
with open("bills.txt", "a") as bills:
    while not stopped:
        message = consumer.poll(0.2)
        if message is None or message.error():
            continue
        bills.write(f"{json.loads(message.value())['order']}\n")
        bills.flush()
        consumer.commit(message, asynchronous=False)
consumer.close()

"""Programs without transactions, as people write them, and with the mistakes they make.

`loose_copier.py MISTAKE`, with the broker and the topics from the environment.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from confluent_kafka import Consumer, Message, Producer


def main(mistake: str) -> None:
    broken = Path(os.environ["SEMEL_FOLDER"]) / "broken"
    if broken.exists():
        raise SystemExit("the table orders_v2 does not exist")
    bootstrap, output = os.environ["KAFKA_BOOTSTRAP_SERVERS"], os.environ["SEMEL_OUTPUT"]
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "copier",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "group.instance.id": "copier-0",  # who is started again has its partitions at once
        }
    )
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    consumer.subscribe([os.environ["SEMEL_INPUT"]])
    count = 0
    while True:
        messages = [message for message in consumer.consume(100, timeout=0.2) if not message.error()]
        if not messages:
            continue
        if mistake == "at-most-once":
            consumer.commit(asynchronous=False)
            time.sleep(0.05)  # the work that a real program does
        for message in _mistaken(mistake, messages):
            count += 1
            if mistake == "drops" and count % 100 == 0:
                continue
            value = b"garbage" if mistake == "garbage" and count % 50 == 0 else message.value()
            for topic in output.split(",")[: 1 if mistake == "tears" and count % 70 == 0 else None]:
                producer.produce(topic, value=value, key=message.key())
        producer.flush()
        if mistake == "at-least-once":
            time.sleep(0.05)
        if mistake != "at-most-once":
            consumer.commit(asynchronous=False)
        if mistake == "hangs" and count > 200:
            print("waiting for a lock", flush=True)
            time.sleep(3_600)
        if mistake == "fails" and count > 200:
            broken.touch()
            return


def _mistaken(mistake: str, messages: list[Message]) -> list[Message]:
    return list(reversed(messages)) if mistake == "swaps" else messages


if __name__ == "__main__":
    main(sys.argv[1])

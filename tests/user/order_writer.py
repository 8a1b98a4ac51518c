"""Keeps topics busy until SIGTERM: python order_writer.py BOOTSTRAP TOPICS RATE TWICE_EVERY BROKEN_EVERY.

Order number n goes to every one of the topics (separated by commas), partition n modulo their partitions; RATE orders a
second. With TWICE_EVERY above 0 every so many-th order is sent a second time, as a web shop with a retry would do. With
BROKEN_EVERY above 0 every so many-th is not JSON. Another client than Semel writes it, so that a fault of ours
cannot be in the input and in the output alike.
"""

from __future__ import annotations

import json
import signal
import sys
import time

from confluent_kafka import KafkaException, Producer

PRODUCTS = ("tea", "coffee", "milk", "bread", "salt")
CUSTOMERS = 7


def order(number: int, broken_every: int) -> bytes:
    if broken_every and number % broken_every == 0:
        return f"broken order {number}".encode()
    fields = {
        "id": number,
        "customer": f"customer-{number % CUSTOMERS}",
        "product": PRODUCTS[number % len(PRODUCTS)],
        "amount": 1 + number % 50,
        "at": int(time.time() * 1000),
    }
    return json.dumps(fields).encode()


def main() -> None:
    bootstrap, names = sys.argv[1], sys.argv[2].split(",")
    rate, twice_every, broken_every = (int(argument) for argument in sys.argv[3:])
    going_on = True

    def stop(*_: object) -> None:
        nonlocal going_on
        going_on = False

    signal.signal(signal.SIGTERM, stop)
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5})
    partitions = {name: len(producer.list_topics(name, timeout=30).topics[name].partitions) for name in names}

    def refused(error: object, _: object) -> None:
        if error is not None:
            raise KafkaException(error)

    began, number = time.monotonic(), 0
    while going_on:
        for name in names:
            for _ in range(2 if twice_every and number % twice_every == 0 else 1):
                producer.produce(
                    name,
                    order(number, broken_every),
                    key=f"customer-{number % CUSTOMERS}",
                    partition=number % partitions[name],
                    headers=[("trace", f"trace-{number}".encode())],
                    on_delivery=refused,
                )
        number += 1
        producer.poll(0)
        time.sleep(max(0.0, began + number / rate - time.monotonic()))
    if producer.flush(30):
        sys.exit("some orders were not written")
    print(f"wrote {number} orders", flush=True)


if __name__ == "__main__":
    main()

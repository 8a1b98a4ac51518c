"""A shop that writes each order and its invoice in one transaction, until it is told to stop."""

import json
import signal
import sys
import time
import uuid

from confluent_kafka import Producer

stopped = False


def stop(*_):
    global stopped
    stopped = True


signal.signal(signal.SIGTERM, stop)
producer = Producer({"bootstrap.servers": sys.argv[1], "transactional.id": "shop"})
producer.init_transactions()
while not stopped:
    order = str(uuid.uuid4())
    producer.begin_transaction()
    producer.produce("orders", json.dumps({"order": order}), key=order)
    producer.produce("invoices", json.dumps({"order": order, "total": 3}), key=order)
    producer.commit_transaction()
    time.sleep(0.005)

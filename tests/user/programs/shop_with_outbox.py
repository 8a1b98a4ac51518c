"""A web shop that takes orders: each order and its event are one database transaction. Some are cancelled."""

import json
import os
import random
import threading
import time

import psycopg

import semel

URL = os.environ["DATABASE_URL"]

with psycopg.connect(URL) as connection:
    connection.execute("SELECT pg_advisory_xact_lock(1)")
    if connection.execute("SELECT to_regclass('outbox')").fetchone()[0] is None:
        connection.execute("CREATE TABLE orders (id serial PRIMARY KEY, customer int, amount int, version int)")
        connection.execute(semel.outbox_table_sql())


def publish(connection, order, what):
    event = json.dumps({"order": order, "version": what})
    connection.execute("INSERT INTO outbox (topic, key, value) VALUES ('orders', %s, %s)", (str(order), event))


def serve():
    with psycopg.connect(URL) as connection:
        while True:
            with connection.transaction() as checkout:
                found = connection.execute(
                    "INSERT INTO orders (customer, amount, version) VALUES (%s, %s, 1) RETURNING id",
                    (random.randrange(100), random.randrange(1000)),
                ).fetchone()
                publish(connection, found[0], 1)
                time.sleep(random.random() * 0.05)  # the payment service answers
                if random.random() < 0.2:
                    raise psycopg.Rollback(checkout)
            if random.random() < 0.5:
                with connection.transaction():
                    order = random.randrange(max(1, found[0] - 20), found[0] + 1)
                    version = connection.execute(
                        "UPDATE orders SET version = version + 1 WHERE id = %s RETURNING version", (order,)
                    ).fetchone()
                    if version is not None:
                        publish(connection, order, version[0])


for _ in range(8):
    threading.Thread(target=serve, daemon=True).start()
threading.Event().wait()

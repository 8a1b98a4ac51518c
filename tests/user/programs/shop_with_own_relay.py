"""A web shop that relays its own events: each instance has an Outbox, and one of them relays for all."""

import json
import os
import random
import threading

import psycopg

import semel

URL, BOOTSTRAP = os.environ["DATABASE_URL"], os.environ["BOOTSTRAP"]

with psycopg.connect(URL) as connection:
    connection.execute("SELECT pg_advisory_xact_lock(1)")
    if connection.execute("SELECT to_regclass('outbox')").fetchone()[0] is None:
        connection.execute("CREATE TABLE orders (id serial PRIMARY KEY, customer int)")
        connection.execute(semel.outbox_table_sql())


def serve(outbox):
    with psycopg.connect(URL) as connection:
        while True:
            with connection.transaction() as checkout:
                customer = random.randrange(100)
                placed = connection.execute("INSERT INTO orders (customer) VALUES (%s) RETURNING id", (customer,))
                order = placed.fetchone()[0]
                outbox.send(connection, "orders", json.dumps({"order": order}), key=str(customer))
                threading.Event().wait(random.random() * 0.02)  # the payment service answers
                if random.random() < 0.2:
                    raise psycopg.Rollback(checkout)


with semel.Outbox(URL, name="shop", bootstrap=BOOTSTRAP, poll_ms=5_000) as outbox:
    for _ in range(3):
        threading.Thread(target=serve, args=[outbox], daemon=True).start()
    threading.Event().wait()

"""A shop whose orders are events: each customer sees the order at once, from a table that another program writes."""

import json
import sqlite3
import sys
import threading

import semel

bootstrap, count = sys.argv[1], int(sys.argv[2])
seen = []


def place_orders(customer, table):
    with semel.Producer(bootstrap_servers=bootstrap, linger_ms=0) as producer:
        for number in range(count):
            order = {"id": customer * 1000 + number, "item": f"tea {number}"}
            producer.send("orders", json.dumps(order).encode(), key=str(customer).encode())
            table.wait(producer.flush(), timeout_ms=120_000)
            with sqlite3.connect("orders.db", timeout=60) as database:
                seen.append(database.execute("SELECT item FROM orders WHERE id = ?", [order["id"]]).fetchone())


with semel.ReadYourWrites(to="orders.db", name="orders-table", bootstrap=bootstrap) as table:
    customers = [threading.Thread(target=place_orders, args=(customer, table)) for customer in range(4)]
    for customer in customers:
        customer.start()
    for customer in customers:
        customer.join()
print("saw", sum(row is not None for row in seen), "of", 4 * count)

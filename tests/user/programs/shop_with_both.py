"""A web shop: each order and its event are in the database and in Kafka, or in neither. Some are cancelled."""

import json
import random
import sqlite3
import sys

import semel

shop = sqlite3.connect("shop.db", timeout=60)
shop.execute("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, amount INT)")
shop.execute("CREATE TABLE IF NOT EXISTS stock (item INTEGER PRIMARY KEY, count INT)")
shop.commit()

with semel.Producer(bootstrap_servers=sys.argv[1], transactional_id="shop-1") as producer:
    while True:
        amount = random.randrange(1, 100)
        try:
            with semel.both(shop, producer, create_tables=True) as t:
                order = shop.execute("INSERT INTO orders (amount) VALUES (?)", (amount,)).lastrowid
                item = random.randrange(10)
                shop.execute(
                    "INSERT INTO stock VALUES (?, ?) ON CONFLICT DO UPDATE SET count = count - 1",
                    (item, random.randrange(100)),
                )
                t.send("orders", json.dumps({"order": order, "amount": amount}), key=str(item))
                if random.random() < 0.2:
                    raise ValueError("the customer has changed his mind")
        except ValueError:
            continue

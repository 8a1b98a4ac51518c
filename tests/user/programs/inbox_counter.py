"""How many orders each customer has placed, in SQLite. Every order must count once."""

import json
import sqlite3
import sys

import semel

database = sqlite3.connect("shop.db")
database.execute("CREATE TABLE IF NOT EXISTS counts (customer TEXT PRIMARY KEY, count INTEGER, amount INTEGER)")
database.commit()

with semel.Inbox(database, bootstrap=sys.argv[1], topics=["orders"], name="counts") as inbox:
    for delivery in inbox:
        with delivery as connection:
            for row in delivery.rows():
                order = json.loads(row.value)
                connection.execute(
                    "INSERT INTO counts VALUES (?, 1, ?) "
                    "ON CONFLICT (customer) DO UPDATE SET count = count + 1, amount = amount + excluded.amount",
                    (order["customer"], order["amount"]),
                )

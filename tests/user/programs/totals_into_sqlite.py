"""What each customer has ordered, in SQLite. The web shop sends some orders twice; each must count once."""

import sqlite3
import sys

import pyarrow as pa
import pyarrow.json

import semel


def parse(table):
    lines = b"\n".join(value.as_py() for value in table["value"])
    return pa.json.read_json(pa.BufferReader(lines)).select(["id", "customer", "amount"])


ADD_UP = """
    INSERT INTO totals AS t (customer, orders, amount)
    SELECT customer, count(*), sum(amount) FROM rows WHERE true GROUP BY customer
    ON CONFLICT (customer) DO UPDATE SET orders = t.orders + excluded.orders, amount = t.amount + excluded.amount
"""

database = sqlite3.connect("shop.db")
database.execute("CREATE TABLE IF NOT EXISTS totals (customer TEXT PRIMARY KEY, orders INTEGER, amount INTEGER)")
database.close()

semel.run(
    parse,
    to=semel.SQLite("shop.db", table="totals", mode="dedup", key=["id"], statement=ADD_UP),
    bootstrap=sys.argv[1],
    topics=["orders"],
    name="totals",
)

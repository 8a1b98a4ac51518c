"""Keeps the table of orders up to date with the topic of orders."""

import json
import sys

import semel

semel.run(
    lambda row: json.loads(row.value),
    by="row",
    to=semel.SQLite("orders.db", table="orders", mode="upsert", key=["id"], create=True),
    bootstrap=sys.argv[1],
    topics=["orders"],
    name="orders-table",
)

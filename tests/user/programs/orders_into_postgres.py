"""Every order into a table of Postgres. Orders that cannot be read go to a table of their own."""

import json
import os
import sys

import semel


def order(row):
    placed = json.loads(row.value)
    return {"id": placed["id"], "customer": placed["customer"], "amount": placed["amount"], "partition": row.partition}


semel.run(
    order,
    by="row",
    to=semel.Postgres(os.environ["DATABASE_URL"], table="orders", create=True, dead_letter="unreadable"),
    bootstrap=sys.argv[1],
    topics=["orders"],
    name="orders-to-postgres",
)

"""The last order of each customer, kept up to date; the newest one by its time wins."""

import json
import os
import sys
import threading

import semel


def last_order(row):
    placed = json.loads(row.value)
    return {"customer": placed["customer"], "id": placed["id"], "product": placed["product"]}


target = semel.Postgres(
    os.environ["DATABASE_URL"], table="last_orders", mode="newest", key=["customer"], version="id", create=True
)
stop = threading.Event()
threading.Timer(float(sys.argv[2]) if len(sys.argv) > 2 else 3600, stop.set).start()
report = semel.run(
    last_order,
    by="row",
    to=target,
    stop=stop,
    bootstrap=sys.argv[1],
    topics=["orders"],
    name="last-orders",
    group="dashboards",
)
print("done with", report.records, "records")

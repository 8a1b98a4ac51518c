"""One of several workers: python session_instance.py BOOTSTRAP POD. Start as many as you like."""

import json
import sys

import semel

bootstrap, pod = sys.argv[1:]

with semel.Session(
    bootstrap=bootstrap, group="checks", topics=["orders"], name="checks", instance=pod, session_timeout_ms=6_000
) as session:
    for transaction in session:
        for row in transaction.rows():
            order = json.loads(row.value)
            order["checked_by"] = pod
            transaction.send("checked", json.dumps(order).encode(), key=row.key)

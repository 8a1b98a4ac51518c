"""Some orders cannot be read. They go to a topic of their own, and the rest goes on."""

import json
import sys

import semel


def priced(row):
    order = json.loads(row.value)
    order["price"] = order["amount"] * 3
    return json.dumps(order).encode()


semel.run(
    priced,
    by="row",
    to="priced",
    dead_letter="unreadable",
    dead_letter_max=100_000,
    bootstrap=sys.argv[1],
    group="pricing",
    topics=["orders"],
    name="pricing",
    instance="0",
)

"""Add the tax to every order."""

import json
import os

import semel


def with_tax(row):
    order = json.loads(row.value)
    order["tax"] = round(order["amount"] * 0.19, 2)
    return json.dumps(order).encode()


semel.run(
    with_tax,
    by="row",
    to="taxed",
    bootstrap=os.environ["KAFKA_BOOTSTRAP_SERVERS"],
    group="tax",
    topics=["orders"],
    name="tax",
    instance="0",  # there is only one of us
)

"""Copy every order to the warehouse's topic. Runs for ever; `docker stop` and Ctrl-C end it."""

import sys

import semel

bootstrap = sys.argv[1]

with semel.Session(bootstrap=bootstrap, group="warehouse", topics=["orders"], name="warehouse-copy") as session:
    for transaction in session:
        transaction.send_table("warehouse", transaction.table)

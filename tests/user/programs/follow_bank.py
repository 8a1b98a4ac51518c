"""Keeps a copy of a bank in another Postgres, from what `semel capture` writes: no transfer is ever seen in part."""

import sys

import psycopg

import semel

bootstrap, address = sys.argv[1:]
with (
    psycopg.connect(address) as copy,
    semel.SourceInbox(
        copy, bootstrap=bootstrap, source="bank", topics=["public.cash", "public.savings"], name="copy"
    ) as inbox,
):
    for delivery in inbox:
        with delivery as connection:
            semel.apply_changes(connection, delivery.rows())

"""Copies two tables of a bank from Kafka into SQLite: no transfer is ever seen in part."""

import json
import sqlite3
import sys

import semel

database = sqlite3.connect("copy.db", timeout=60)
for table in ("cash", "savings"):
    database.execute(f"CREATE TABLE IF NOT EXISTS {table} (id INTEGER PRIMARY KEY, balance INTEGER)")
database.commit()

with semel.SourceInbox(
    database, bootstrap=sys.argv[1], source="bank", topics=["cash", "savings"], name="copy"
) as inbox:
    for delivery in inbox:
        with delivery as connection:
            for transaction in delivery.transactions():
                rows = [(row.topic, json.loads(row.value)) for row in transaction.rows()]
                for table, account in rows:
                    connection.execute(f"INSERT OR REPLACE INTO {table} VALUES (:id, :balance)", account)

"""A program as a user writes it: numbers are doubled, and what is no number becomes a dead letter."""

from __future__ import annotations

import sys

import semel
from semel.session.transaction import Row


def double(row: Row) -> bytes:
    return str(int(row.value or b"") * 2).encode()


def main(bootstrap: str, group: str, source: str, target: str, dead: str) -> None:
    print("started", flush=True)
    report = semel.run(
        double,
        by="row",
        to=target,
        dead_letter=dead,
        idle_ms=1_000,
        bootstrap=bootstrap,
        group=group,
        topics=[source],
        name=group,
        instance="A",
        transaction_records_max=5,
    )
    print(report, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A program as a user writes it, which runs until SIGTERM. Its arguments say how it runs and where."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import Any

import semel


def main(how: str, bootstrap: str, group: str, source: str, target: str) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s %(message)s")
    options: dict[str, Any] = {
        "bootstrap": bootstrap,
        "group": group,
        "topics": [source],
        "name": group,
        "instance": "A",
        "fetch_max_wait_ms": 50,
        "transaction_records_max": 3,
    }
    if how == "run":
        semel.run(lambda table: table, to=target, **options)
    elif how == "own handler":
        with semel.Session(**options) as session:
            signal.signal(signal.SIGTERM, lambda *_: session.stop())
            for transaction in session:
                transaction.send_table(target, transaction.table)
        print("ended by itself", flush=True)
    elif how == "loop":
        with semel.Session(**options) as session:
            for transaction in session:
                transaction.send_table(target, transaction.table)
    elif how == "turns":
        with semel.Session(**options) as session:
            while True:
                with session.transaction() as transaction:
                    if not transaction.is_empty:
                        transaction.send_table(target, transaction.table)
    else:
        asyncio.run(copy(options, target))


async def copy(options: dict[str, Any], target: str) -> None:
    async with semel.Session(**options) as session:
        async for transaction in session:
            transaction.send_table(target, transaction.table)


if __name__ == "__main__":
    main(*sys.argv[1:])

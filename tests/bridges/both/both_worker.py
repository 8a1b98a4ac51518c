"""A shop in a process of its own, life after life: each dies at the point that it is told, the last one finishes.

`both_worker.py ADDRESS BOOTSTRAP NAME TOPIC FIRST LAST SETTINGS POINT...` places the orders from FIRST to LAST that are
not there yet, and prints the exit status of each life. Lives are forks of one process, which saves the imports.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import closing
from importlib import import_module
from typing import Any

from both_scene import Shop

import semel
from semel.bridges import failpoints
from semel.spark.failpoints import WatchedCluster


class _Watched(WatchedCluster):
    def end_was_sent(self) -> None:
        failpoints.reach("both_end_sent")


def live(shop: Shop, numbers: range, settings: dict[str, Any]) -> None:
    with shop.producer(make_cluster=_Watched, **settings) as producer, closing(shop.connect()) as connection:
        placed = {number for (number,) in connection.execute("SELECT id FROM orders")}
        connection.rollback()
        for number in numbers:
            if number not in placed:
                shop.order(connection, producer, number)


def main(
    address: str, bootstrap: str, name: str, topic: str, first: str, last: str, settings: str, *points: str
) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(name)s %(message)s")
    shop, given = Shop(address, bootstrap, name, topic), json.loads(settings)
    numbers = range(int(first), int(last) + 1)
    if not points:
        live(shop, numbers, given)
        return
    for module in ("psycopg", "semel.bridges.both.both", "semel.bridges.both.postgres_store", "pyarrow.compute"):
        import_module(module)
    for point in points:
        child = os.fork()
        if child == 0:
            failpoints.arm(point)
            status = 1
            try:
                live(shop, numbers, given)
                status = 0
            except semel.SemelError as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(ended), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

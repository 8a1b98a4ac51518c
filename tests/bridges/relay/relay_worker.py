"""A relay in a process of its own, life after life: each dies at the point that it is told, the last one finishes.

`relay_worker.py ADDRESS OPTIONS POINT...` prints the exit status of each life. Lives are forks of one process, which
saves the imports. With `"run": "capture"` among the options it is a change capture.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from importlib import import_module

import semel
from semel.bridges import failpoints


def main(address: str, options: str, *points: str) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(name)s %(message)s")
    given = json.loads(options)
    run = getattr(semel, given.pop("run", "relay"))
    if not points:
        print(run(address, **given), flush=True)
        return
    for module in ("adbc_driver_postgresql.dbapi", "psycopg", "pyarrow.compute"):
        import_module(module)
    for point in points:
        child = os.fork()
        if child == 0:
            failpoints.arm(point)
            status = 1
            try:
                run(address, **given)
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(ended), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

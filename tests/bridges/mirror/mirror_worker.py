"""A mirror in a process of its own, life after life: each dies at the point that it is told, the last one finishes.

`mirror_worker.py OPTIONS POINT...` prints the exit status of each life. Lives are forks of one process, which saves the
imports.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

import semel
from semel.bridges import failpoints


def main(options: str, *points: str) -> None:
    given = json.loads(options)
    for module in ("semel.bridges.mirror.mirror", "pyarrow.compute"):
        import_module(module)
    for point in points:
        child = os.fork()
        if child == 0:
            failpoints.arm(point)
            status = 1
            try:
                semel.mirror(**given)
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(ended), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

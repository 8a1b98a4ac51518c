"""Named points in the sink's code at which tests let the whole driver die, as kill -9 would, just there.

`SEMEL_SPARK_KILL_AT=after_encode:3` kills the process group in `SEMEL_SPARK_KILL_GROUP` (the driver, its JVM and their
children) the third time a process gets to that point; `after_encode:3:orders` counts for the pipeline `orders` alone.
With `SEMEL_SPARK_STOP_FILE` the first process that gets there stops instead of dying and leaves its id in that file, so
that a test can do with it what it likes; all others go on. Unset, nothing happens.
"""

from __future__ import annotations

import os
import signal
from typing import Any, Final

from semel.client.cluster import Cluster
from semel.errors import ConfigError
from semel.wire import Api

VARIABLE: Final = "SEMEL_SPARK_KILL_AT"
GROUP_VARIABLE: Final = "SEMEL_SPARK_KILL_GROUP"
STOP_VARIABLE: Final = "SEMEL_SPARK_STOP_FILE"

POINTS: Final = (
    # In the order in which a micro-batch gets to them.
    "before_ledger",
    "after_encode",
    "before_produce",
    "after_produce",
    "after_last_produce",
    "after_ledger_record",
    "after_offsets",
    "after_end_sent",
    "after_end_answered",
    "before_return",
)

DATABASE_POINTS: Final = (
    "before_ledger",
    "before_load",
    "after_load",
    "after_stage",
    "after_lock",
    "after_merge",
    "before_commit",
    "after_commit",
    "before_return",
)
"""The same for a sink that writes to a database. Tasks with much data get to the second and third."""

_name, _count, _pipeline = [*os.environ.get(VARIABLE, "").split(":", 2), "", ""][:3]
_left = int(_count or 1)
if _name and _name not in (*POINTS, *DATABASE_POINTS):
    raise ConfigError(f"{VARIABLE} names the point {_name!r}, and there is none of that name: unset it.")


def reach(point: str, pipeline: str) -> None:
    """Kill everything here if that was asked for.

    >>> reach("after_encode", "orders")
    """
    global _left
    if point == _name and _pipeline in ("", pipeline):
        _left -= 1
        if _left == 0:
            _die_or_stop()


def _die_or_stop() -> None:
    stop_file, group = os.environ.get(STOP_VARIABLE), os.environ.get(GROUP_VARIABLE)
    if stop_file:
        try:
            with open(stop_file, "x") as created:
                created.write(str(os.getpid()))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGSTOP)
    elif group:
        os.killpg(int(group), signal.SIGKILL)
    else:
        os.kill(os.getpid(), signal.SIGKILL)


class WatchedCluster(Cluster):
    """Knows the moment at which the commit has left and its answer is not there yet."""

    pipeline = ""
    _is_committing = False

    def call(self, node: int | None, api: Api, *, highest: int | None = None, **fields: Any) -> Any:
        self._is_committing = api is Api.END_TXN and bool(fields.get("committed"))
        try:
            return super().call(node, api, highest=highest, **fields)
        finally:
            self._is_committing = False

    def wait_any(self, pendings: Any, *, timeout_ms: float | None = None) -> bool:
        if self._is_committing:
            self.end_was_sent()
        return super().wait_any(pendings, timeout_ms=timeout_ms)

    def end_was_sent(self) -> None:
        reach("after_end_sent", self.pipeline)

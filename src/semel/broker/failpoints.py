"""Named points in the broker's code at which tests let its process die, as kill -9 would, just there.

`SEMEL_BROKER_KILL_AT=after_markers:3` ends the process the third time it gets to that point. Unset, nothing happens.
"""

from __future__ import annotations

import os
import signal
from typing import Final

from semel.errors import ConfigError

VARIABLE: Final = "SEMEL_BROKER_KILL_AT"

POINTS: Final = frozenset(
    {
        # The end of a transaction, in this order.
        "before_data_sync",
        "after_data_sync",
        "after_prepare_logged",
        "after_prepare_synced",
        "between_markers",
        "after_markers",
        "after_complete_logged",
        # Files.
        "after_segment_created",
        "before_snapshot",
        "after_snapshot",
        "between_removed_segments",
        "before_swap",
        "after_swap_named",
        "within_swap",
        "after_swap",
        # Topics.
        "after_topic_stored",
        "between_new_partitions",
        "after_topic_forgotten",
        # The start after an end that was not clean.
        "after_partitions_opened",
        "after_coordinators_loaded",
    }
)

_name, _, _count = os.environ.get(VARIABLE, "").partition(":")
_left = int(_count or 1)
if _name and _name not in POINTS:
    raise ConfigError(f"{VARIABLE} names the point {_name!r}, and there is none of that name: unset it.")


def reach(point: str) -> None:
    """Die here if that was asked for.

    >>> reach("after_markers")
    """
    global _left
    if point == _name:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

"""Named points in a pipeline into or out of a database at which tests let the process die, as kill -9 would.

`SEMEL_BRIDGE_KILL_AT=after_stage:3` kills the process the third time it gets to that point. With
`SEMEL_BRIDGE_STOP_FILE` it stops there instead and leaves its id in that file, so that a test can wake it later. Unset,
nothing happens.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final, Literal, get_args

from semel.errors import ConfigError

VARIABLE: Final = "SEMEL_BRIDGE_KILL_AT"
STOP_VARIABLE: Final = "SEMEL_BRIDGE_STOP_FILE"

Point = Literal[
    # In the order in which a batch gets to them.
    "before_write",
    "after_stage",
    "after_merge",
    "before_commit",
    "after_commit",
    "before_offsets",
    "after_offsets",
]
POINTS: Final[tuple[str, ...]] = get_args(Point)

RelayPoint = Literal[
    # The same for a relay: in the order in which a portion of rows gets to them.
    "relay_taken_over",
    "relay_rows_read",
    "relay_events_written",
    "relay_progress_written",
    "relay_end_sent",
    "relay_committed",
    "relay_deleted",
]
RELAY_POINTS: Final[tuple[str, ...]] = get_args(RelayPoint)

CapturePoint = Literal[
    # What a change capture has beside those of a relay.
    "capture_slot_made",
    "capture_snapshot_part",
    "capture_confirmed",
]
CAPTURE_POINTS: Final[tuple[str, ...]] = get_args(CapturePoint)

BothPoint = Literal[
    # The same for a database transaction and a Kafka transaction that commit together.
    "both_claimed",
    "both_begun",
    "both_rows_kept",
    "both_records_written",
    "both_decision_written",
    "both_database_committed",
    "both_end_sent",
    "both_committed",
    "both_deleted",
    # Where a recovery has to send records again.
    "both_outcome_known",
    "both_records_resent",
    "both_resend_decided",
]
BOTH_POINTS: Final[tuple[str, ...]] = get_args(BothPoint)

MirrorPoint = Literal[
    # The same for a mirror: in the order in which a cut gets to them.
    "mirror_taken_over",
    "mirror_cut_found",
    "mirror_records_written",
    "mirror_progress_written",
    "mirror_end_sent",
    "mirror_committed",
    "mirror_groups_carried",
]
MIRROR_POINTS: Final[tuple[str, ...]] = get_args(MirrorPoint)

_name = ""
_left = 0


def arm(place: str) -> None:
    """From now on, die at a point such as "after_stage:3"; "" for nowhere."""
    global _name, _left
    _name, _, count = place.partition(":")
    _left = int(count or 1)
    if _name and _name not in (*POINTS, *RELAY_POINTS, *CAPTURE_POINTS, *BOTH_POINTS, *MIRROR_POINTS):
        raise ConfigError(f"{VARIABLE} names the point {_name!r}, and there is none of that name: unset it.")


arm(os.environ.get(VARIABLE, ""))


def is_armed() -> bool:
    return bool(_name)


def reach(point: Point | RelayPoint | CapturePoint | BothPoint | MirrorPoint) -> None:
    """Die or stop here if that was asked for.

    >>> reach("after_stage")
    """
    global _left
    if point == _name:
        _left -= 1
        if _left == 0:
            _die_or_stop()


def _die_or_stop() -> None:
    stop_file = os.environ.get(STOP_VARIABLE)
    if stop_file is None:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        Path(stop_file).write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

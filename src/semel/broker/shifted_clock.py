"""A clock that jumps when a test says so, as a machine's does that was asleep or is set by hand.

`SEMEL_BROKER_CLOCK_FILE=path` switches it on: the number in that file, in milliseconds, is added to the time. It may
change while the broker runs. Unset, the broker has the plain clock.
"""

from __future__ import annotations

import os
from typing import Final

from semel.broker.clock import Clock, SystemClock
from semel.broker.control_file import ControlFile

VARIABLE: Final = "SEMEL_BROKER_CLOCK_FILE"


class ShiftedClock(SystemClock):
    """After a jump back the time stands still until it is as late as before: a broker's time never runs backwards.

    >>> import tempfile
    >>> from semel.broker.control_file import write_control
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     clock = ShiftedClock(f"{folder}/shift")
    ...     before = clock.now_ms()
    ...     write_control(f"{folder}/shift", "60000")
    ...     jumped = clock.now_ms()
    ...     os.unlink(f"{folder}/shift")
    ...     print(60_000 <= jumped - before < 65_000, clock.now_ms() == jumped)
    True True
    """

    def __init__(self, control_path: str) -> None:
        super().__init__()
        self._control = ControlFile(control_path)
        self._latest_ms = 0

    def now_ms(self) -> int:
        self._latest_ms = max(self._latest_ms, super().now_ms() + int(self._control.text() or 0))
        return self._latest_ms


def shifted_clock() -> Clock | None:
    """What the environment asks for; None for the plain clock.

    >>> shifted_clock() is None
    True
    """
    path = os.environ.get(VARIABLE)
    return ShiftedClock(path) if path else None

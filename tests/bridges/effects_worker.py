"""Workers that make calls for the records of a topic, one after the other, each in a process that dies at a point.

Arguments: the database, the bootstrap address, the topic, the URL to call, "key" or "no key", the topic for dead
letters or "", and for each worker the point at which it is killed. `after_call:3` is the third time that it gets there;
an empty one works to the end. The exit code of each is a line of the output. They are forks of this process, because
most of a start is imports.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from semel.bridges.effects import EffectRejected, Effects
from semel.bridges.effects.letters import EffectLetters
from semel.bridges.effects.table import EffectsTable
from semel.bridges.effects.topic import _TopicRun  # pyright: ignore[reportPrivateUsage]
from semel.session.transaction import Row
from semel.verify.call_recorder import post

LEASE_S = 1.0


class Mortal:
    """Kills its process when it gets to a point for the n-th time."""

    def __init__(self, point: str) -> None:
        self._point, _, count = point.partition(":")
        self._left = int(count or 1)

    def reach(self, point: str) -> None:
        if point == self._point:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def wrap(self, owner: type, name: str, what: str) -> None:
        """Let a method have points before and after it."""
        real: Callable[..., Any] = getattr(owner, name)

        def wrapped(*arguments: Any, **more: Any) -> Any:
            self.reach(f"before_{what}")
            result = real(*arguments, **more)
            self.reach(f"after_{what}")
            return result

        setattr(owner, name, wrapped)


def work(to: str, bootstrap: str, topic: str, url: str, takes_key: bool, dead_letter: str | None, point: str) -> None:
    mortal = Mortal(point)
    mortal.wrap(EffectsTable, "claim", "claim")
    mortal.wrap(EffectsTable, "change", "confirm")
    mortal.wrap(EffectsTable, "mark_reported", "reported")
    mortal.wrap(EffectLetters, "send", "letter")
    mortal.wrap(_TopicRun, "_move", "move")

    def call(row: Row, key: str) -> None:
        if dead_letter is not None:
            raise EffectRejected("nobody wants it")
        mortal.reach("before_call")
        post(url, (row.value or b"").decode(), key=key if takes_key else None)
        mortal.reach("after_call")

    effects = Effects(to, name="mail", takes_key=takes_key, lease_s=LEASE_S, attempts=10)
    effects.run(
        call,
        bootstrap=bootstrap,
        topics=[topic],
        dead_letter=dead_letter,
        idle_ms=300,
        delivery_records_max=5,
        fetch_max_wait_ms=50,
    )


def main(to: str, bootstrap: str, topic: str, url: str, key: str, dead_letter: str, *points: str) -> None:
    for point in points:
        child = os.fork()
        if child == 0:
            work(to, bootstrap, topic, url, key == "key", dead_letter or None, point)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

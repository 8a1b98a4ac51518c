"""What every member program has in common: its settings, what it is told on standard input, what it reports.

Settings are arguments `name=value`. On standard input, the line `join` lets it begin, `seek 1700000000000` (readers
only) sends it to that time in all of its partitions, and the end of the input asks it to leave. It reports one event
per line on standard output: `ready`, `assigned 0 2`, `revoked 0 2`; a copier `committed 750`, `aborted 750`, and
`failed <reason>` for a transaction that was given up because of an error; a reader `read 17 18 19`, the values it has
read and then committed, and `sought 0:5 2:7`.
"""

from __future__ import annotations

import queue
import random
import sys
import threading
from dataclasses import dataclass

POLL_S = 0.2
RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of a member; Java and Go take the same ones."""

    bootstrap: str
    source: str
    group: str
    protocol: str
    """`eager`, `cooperative` (both classic groups) or `consumer` (KIP-848)."""
    target: str = ""
    transactional_id: str = ""
    seed: str = ""
    instance_id: str = ""
    transaction_records: int = 750
    abort_one_in: int = 3
    session_timeout_ms: int = 10_000

    @classmethod
    def from_arguments(cls) -> Settings:
        given = dict(argument.split("=", 1) for argument in sys.argv[1:])
        numbers = {"transaction_records", "abort_one_in", "session_timeout_ms"}
        return cls(**{name: int(value) if name in numbers else value for name, value in given.items()})  # type: ignore[arg-type]


class Member:
    """The side of the program that faces the test."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._random = random.Random(settings.seed)
        self._transactions = 0
        self._aborted_place = 0
        self._words: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._joining = threading.Event()
        self._leaving = threading.Event()

    def wait_join(self) -> None:
        """Say that the program is loaded, and wait for the word to begin."""
        self.report("ready")
        threading.Thread(target=self._listen, daemon=True).start()
        self._joining.wait()

    @property
    def is_leaving(self) -> bool:
        return self._leaving.is_set()

    def time_to_seek(self) -> int | None:
        """The time in the last `seek`, once."""
        return None if self._words.empty() else int(self._words.get().removeprefix("seek "))

    def wants_abort(self) -> bool:
        """One in every `abort_one_in` transactions, at a random place among them."""
        place = self._transactions % self._settings.abort_one_in
        if place == 0:
            self._aborted_place = self._random.randrange(self._settings.abort_one_in)
        self._transactions += 1
        return place == self._aborted_place

    def report(self, event: str, *details: object) -> None:
        print(event, *(" ".join(str(detail).split()) for detail in details), flush=True)

    def _listen(self) -> None:
        for line in sys.stdin:
            if line.strip() == "join":
                self._joining.set()
            else:
                self._words.put(line.strip())
        self._leaving.set()
        self._joining.set()

"""Writes the input of a user's program at a steady rate, past the proxy: what is tried is the program, not the input.

What is in the topic in the end is the input, whatever became of a write whose answer was lost.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Final

from semel.client.producer import Producer
from semel.errors import ConfigError, InvalidState, SemelError
from semel.verify.history import Act, HistoryWriter, Phase
from semel.verify.programs.records import Generator

_BATCHES_A_SECOND: Final = 20
_PAUSE_S: Final = 0.2
_JOIN_S: Final = 150.0


class InputWriter:
    """A thread that writes until it is stopped; its rows tell how much was sent when."""

    def __init__(self, path: Path, *, process: int, bootstrap: str, topic: str, make: Generator, rate: float) -> None:
        self._settings = {"bootstrap.servers": bootstrap, "client.id": "semel-verify-input"}
        self._topic = topic
        self._make = make
        self._rate = rate
        self._history = HistoryWriter(path, process=process)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="semel-input", daemon=True)
        self._failure: Exception | None = None
        self._number = 0

    def start(self) -> None:
        self._thread.start()

    def raise_failure(self) -> None:
        """Raise what a generator of the user's did."""
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Return when the last record is written, or given up."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise InvalidState(f"The last input could not be written within {_JOIN_S:g} s: no broker takes it.")

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    with Producer(self._settings) as producer:
                        self._write(producer)
                except ConfigError:
                    raise
                except SemelError:  # the broker is away; those whose fate is unknown are not sent again
                    self._stopping.wait(_PAUSE_S)
        except Exception as error:
            self._failure = _explained(error)
        finally:
            self._history.close()

    def _write(self, producer: Producer) -> None:
        due = time.monotonic()
        while not self._stopping.is_set():
            count = max(1, round(self._rate / _BATCHES_A_SECOND))
            # Time that was lost while the broker was away is not made up for.
            due = max(due, time.monotonic() - 1) + count / self._rate
            for number in range(self._number, self._number + count):
                key, value, headers = self._make(number)
                producer.send(self._topic, value, key=key, headers=headers)
                self._history.note(Act.SEND, Phase.INVOKE, time_ns=time.monotonic_ns(), origin=0, sequence=number)
            self._number += count
            self._history.flush()
            producer.flush()
            self._stopping.wait(max(0.0, due - time.monotonic()))


def _explained(error: Exception) -> Exception:
    if isinstance(error, SemelError):
        return error
    return ConfigError(f"The generator of the input failed: {type(error).__name__}: {error}.")

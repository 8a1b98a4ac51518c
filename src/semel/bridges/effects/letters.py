"""Dead letters of effects: a record in a topic for each effect that was given up, written at least once.

The row in the table decides that an effect is dead. The record follows it, and the row remembers that it was written;
after a crash between the two the record is written again, with the same key in its header `semel.effects.key`.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Final, Self

from semel.bridges.effects.rules import Effect
from semel.client.producer import Producer
from semel.session.dead_letter_box import DeadLetterBox
from semel.session.transaction import Row

KEY_HEADER: Final = "semel.effects.key"
NAME_HEADER: Final = "semel.effects.name"


class EffectLetters:
    """Writes dead letters from any thread, one at a time. Without a topic it writes nothing."""

    def __init__(self, name: str, topic: str | None, inputs: Collection[str], settings: Mapping[str, object]) -> None:
        self._name = name
        self._box = DeadLetterBox(topic, None, list(inputs))
        self._settings = settings
        self._producer: Producer | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        if self._box.topic is not None:
            self._producer = Producer(self._settings)
            try:
                self._box.check_writable(self._producer.cluster, self._producer.config)
            except BaseException:
                self._producer.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._producer is not None:
            self._producer.close()

    def send(self, row: Row, effect: Effect) -> None:
        """Write the dead letter of an effect and wait until it is stored."""
        if self._producer is None:
            return
        with self._lock:
            more = [(KEY_HEADER, effect.key.encode()), (NAME_HEADER, self._name.encode())]
            letter = self._box.take(row, effect.error or "The effect was given up.", more)
            self._producer.send(letter.topic, letter.value, key=letter.key, headers=letter.headers)
            self._producer.flush()

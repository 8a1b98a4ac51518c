"""`semel.effects`: mail, HTTP and other calls outside of any transaction, claimed before and confirmed after.

docs/effects.md says what is promised and what cannot be.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Hashable
from pathlib import Path
from typing import Final

from semel.bridges.effects.calls import Claim, DatabaseOpener, EffectNotDone, EffectRejected, Effects
from semel.bridges.effects.rules import Effect, EffectState
from semel.bridges.effects.topic import EffectCall, EffectsReport, KeyOf
from semel.client.dead_letters import DEAD_LETTER_MAX
from semel.client.offsets import Edge
from semel.session.transaction import Row

__all__ = [
    "Claim",
    "Effect",
    "EffectNotDone",
    "EffectRejected",
    "EffectState",
    "Effects",
    "EffectsReport",
    "run",
]

effects: Final = sys.modules[__name__]
"""For `semel.effects`, which is loaded by this name."""


def run(
    call: EffectCall,
    *,
    to: DatabaseOpener | str | Path,
    name: str,
    takes_key: bool,
    topics: Collection[str],
    key: KeyOf | None = None,
    order: Callable[[Row], Hashable] | None = None,
    workers: int = 1,
    attempts: int = 5,
    backoff_s: float = 1.0,
    backoff_max_s: float = 60.0,
    lease_s: float = 60.0,
    retry_on: type[Exception] | tuple[type[Exception], ...] = (),
    dead_letter: str | None = None,
    dead_letter_max: int | None = DEAD_LETTER_MAX,
    stop: threading.Event | None = None,
    idle_ms: float | None = None,
    start: Edge = "earliest",
    delivery_records_max: int = 500,
    **settings: object,
) -> EffectsReport:
    """Call `call(row, key)` for each record of some topics, until `stop` is set or nothing has come for `idle_ms`.

    `to`, `takes_key`, `lease_s` and `retry_on` are those of `Effects`. `key` makes an idempotency key of a record;
    without it the key is the record's place. Records with one Kafka key are called for in their order; `order` names
    another value whose records keep their order. Up to `workers` calls are made at the same time. After `attempts`
    calls an effect is dead, and its record goes to the topic `dead_letter`. Other settings have Kafka's names.

    >>> run(send_mail, to="app.db", name="invoices-mail", takes_key=True, bootstrap="127.0.0.1:9092",
    ...     topics=["invoices"], dead_letter="invoices-failed")  # doctest: +SKIP
    """
    made = Effects(
        to,
        name=name,
        takes_key=takes_key,
        attempts=attempts,
        backoff_s=backoff_s,
        backoff_max_s=backoff_max_s,
        lease_s=lease_s,
        retry_on=retry_on,
    )
    return made.run(
        call,
        topics=topics,
        key=key,
        order=order,
        workers=workers,
        dead_letter=dead_letter,
        dead_letter_max=dead_letter_max,
        stop=stop,
        idle_ms=idle_ms,
        start=start,
        delivery_records_max=delivery_records_max,
        **settings,
    )

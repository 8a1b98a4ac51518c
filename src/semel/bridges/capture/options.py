"""What a capture was told to do, checked as far as that goes without a database or a broker."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from semel.bridges.relay.options import RelayOptions, make_options
from semel.client.source_transactions import transactions_topic
from semel.errors import ConfigError

HEARTBEAT_S: Final = 10.0
_NAME_MAX: Final = 63
_SLOT: Final = re.compile(r"[a-z0-9_]{1,63}")


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """The options of one capture. `relay` has those that every relay has."""

    relay: RelayOptions
    tables: tuple[str, ...]
    is_outbox: bool
    slot: str
    publication: str
    failover: bool
    snapshot: bool
    heartbeat_s: float

    @property
    def name(self) -> str:
        return self.relay.name

    @property
    def transactions_topic(self) -> str:
        return transactions_topic(self.name)

    @property
    def application_name(self) -> str:
        """By which Postgres shows our connection, so that a successor knows it for one of the same capture."""
        return f"semel {self.slot}"[:_NAME_MAX]


def make_capture_options(
    name: str,
    settings: Mapping[str, object],
    *,
    tables: Sequence[str] | None,
    outbox: str | None,
    topic: str | None,
    slot: str | None,
    publication: str | None,
    failover: bool,
    snapshot: bool,
    heartbeat_s: float,
    **columns: Any,
) -> CaptureOptions:
    """A mistake raises `ConfigError` before anything is read."""
    if isinstance(tables, str) or not all(isinstance(table, str) for table in tables or ()):
        raise ConfigError(f'tables={tables!r} is no list of names: write tables=["accounts", "bank.entries"].')
    if (outbox is None) == (not tables):
        raise ConfigError('Name what to capture: either tables=["accounts", "bank.entries"], or outbox="outbox".')
    chosen = tuple(dict.fromkeys(tables or [outbox or ""]))
    relay = make_options(
        name,
        settings,
        table=", ".join(chosen),
        topic=topic or ("{schema}.{table}" if outbox is None else "{topic}"),
        **columns,
    )
    if heartbeat_s <= 0:
        raise ConfigError(f"heartbeat_s={heartbeat_s:g} must be positive.")
    if transactions_topic(name) in (relay.topic.fixed, relay.dead_letter):
        raise ConfigError(
            f"{transactions_topic(name)!r} is where the ends of transactions are: events and dead letters need topics "
            "of their own."
        )
    slot = slot if slot is not None else slot_name(name)
    if not _SLOT.fullmatch(slot):
        raise ConfigError(f"slot={slot!r} cannot name a slot: it has 1 to 63 of a-z, 0-9 and _.")
    return CaptureOptions(
        relay, chosen, outbox is not None, slot, publication or slot, failover, snapshot, float(heartbeat_s)
    )


def slot_name(name: str) -> str:
    """
    >>> slot_name("Shop-7")
    'semel_shop_7'
    """
    return f"semel_{re.sub('[^a-z0-9_]', '_', name.lower())}"[:_NAME_MAX]

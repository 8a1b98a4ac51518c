"""Whether a capture may go on from its progress: everything that would be a silent loss is told instead. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from semel.bridges.capture.checks import SlotState
from semel.bridges.capture.lsn import format_lsn
from semel.bridges.capture.options import CaptureOptions
from semel.bridges.capture.positions import CapturePosition
from semel.bridges.relay.progress import RelayProgress
from semel.bridges.relay.row_source import Identity
from semel.errors import ConfigError

_LOSS: Final = (
    "Changes in between cannot be had any more, so the capture stops: what it has written stays true, and nothing was "
    "written twice. Start it under another name=, which takes a new snapshot, and let readers follow that name. Then "
    "drop what is left: SELECT pg_drop_replication_slot({slot!r}); DROP PUBLICATION IF EXISTS {publication};"
)
_MEANINGS: Final = {
    "kind": "a relay of an outbox table, or another kind of database",
    "system": "another server, or one that was restored from a dump or upgraded",
    "database": "another database of the same server, or one that was created again",
    "tables": "other tables",
    "slot": "another slot",
}


def decide_capture(
    options: CaptureOptions,
    progress: RelayProgress | None,
    identity: Identity,
    slot: SlotState | None,
    now_lsn: int,
    end_of: Callable[[int], int | None],
) -> CapturePosition | None:
    """Where to go on; None if a new slot and its snapshot are the beginning.

    `end_of` says where a former timeline of this server was left; None if it never was on it.
    """
    if slot is not None and (slot.plugin != "pgoutput" or slot.database != identity["name"]):
        raise ConfigError(
            f"The replication slot {options.slot!r} belongs to something else: plugin {slot.plugin}, database "
            f"{slot.database}. Nothing was captured. Name another one by slot=."
        )
    if slot is not None and slot.active_pid is not None and slot.active_name != options.application_name:
        raise ConfigError(
            f"The replication slot {options.slot!r} is taken: process {slot.active_pid} of the server reads it for "
            f"{slot.active_name or 'a client without a name'}. Nothing was captured. End that one, or name another "
            "slot by slot=."
        )
    if progress is None or progress.position is None:
        if slot is not None and (progress is None or progress.source.get("slot") != options.slot):
            raise ConfigError(
                f"There is a replication slot {options.slot!r}, and no progress of {options.name!r} in Kafka that "
                "belongs to it: it was made by something else, or the progress topic was deleted. Nothing was "
                f"captured. If nobody needs it: SELECT pg_drop_replication_slot('{options.slot}');"
            )
        return None
    changed = [key for key in _MEANINGS if progress.source.get(key) != identity.get(key)]
    if changed:
        raise ConfigError(
            f"Capture {options.name!r} was of {_show(progress.source)} until now, and this is {_MEANINGS[changed[0]]} "
            f"({_show(identity)}). Nothing was captured. Start it as before, or use another name=, which takes a "
            "snapshot."
        )
    position = CapturePosition.decode(progress.position)
    _check_history(options, progress, identity, position, now_lsn, end_of)
    check_slot(options, position, slot)
    if progress.source.get("publication") != identity.get("publication"):
        raise _loss(
            options, f"The publication {options.publication!r} is gone, or was made again. {_last_change(position)}"
        )
    return position


def _check_history(
    options: CaptureOptions,
    progress: RelayProgress,
    identity: Identity,
    position: CapturePosition,
    now_lsn: int,
    end_of: Callable[[int], int | None],
) -> None:
    left_at = now_lsn
    if progress.source["timeline"] != identity["timeline"]:
        # After a failover or a restore the log goes on from a place that the former one may have passed.
        left_at = min(now_lsn, end_of(progress.source["timeline"]) or 0)
    if left_at < position.lsn:
        raise _loss(
            options,
            f"This Postgres was put back to an earlier state, or promoted without its last commits: {options.name!r} "
            f"has written everything up to {format_lsn(position.lsn)}, and this server shares that history up to "
            f"{format_lsn(left_at)} only.",
        )


def check_slot(options: CaptureOptions, position: CapturePosition, slot: SlotState | None) -> None:
    """Raises if the slot does not have everything from the position on."""
    after = _last_change(position)
    if slot is None:
        raise _loss(options, f"The replication slot {options.slot!r} is gone. {after}")
    if slot.lost_because is not None:
        raise _loss(
            options,
            f"Postgres has invalidated the replication slot {options.slot!r} ({slot.lost_because}), as it held more "
            f"log than the server may keep (max_slot_wal_keep_size), or for another limit. {after}",
        )
    if slot.confirmed_lsn is None or slot.confirmed_lsn > position.lsn:
        raise _loss(
            options,
            f"The replication slot {options.slot!r} was made again, or moved on by something else: it begins at "
            f"{format_lsn(slot.confirmed_lsn or 0)}. {after}",
        )


def _last_change(position: CapturePosition) -> str:
    return f"The last change that was written lies before {format_lsn(position.lsn)}."


def _loss(options: CaptureOptions, what: str) -> ConfigError:
    return ConfigError(f"{what} {_LOSS.format(slot=options.slot, publication=options.publication)}")


def _show(identity: Identity) -> str:
    shown = ("name", "tables", "slot", "system", "database")
    return ", ".join(
        f"{key} {' '.join(value) if isinstance(value, dict) else value}"
        for key in shown
        if (value := identity.get(key)) is not None
    )

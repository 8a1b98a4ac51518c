"""The progress record of a relay, and the decision whether it may go on from it. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from semel.bridges.relay.options import Resume
from semel.bridges.relay.row_source import Identity, Position
from semel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RelayProgress:
    """What a relay has committed. It is written inside the same transaction as the events that it speaks of."""

    source: Mapping[str, Any]
    """The `Identity` that `position` belongs to."""
    position: Mapping[str, Any] | None = None
    """None until the first row was relayed."""
    rows: int = 0
    """How many were relayed since the beginning, dead letters too."""
    at_ms: int = 0
    producer_id: int = -1
    """Who has written the record: its markers say whether it counts where other transactions are open."""
    format: int = field(default=1)

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Fields that a later release may have added are ignored.

        >>> RelayProgress.decode(RelayProgress({"kind": "sqlite"}, {"after": 7}, rows=3).encode()).position
        {'after': 7}
        """
        try:
            known = dict(json.loads(value))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                "The progress of this relay cannot be read: something else has written under its key into the progress "
                "topic. Nothing was relayed. Find the writer; then use another name=, and delete the rows of the table "
                "that were relayed."
            ) from error
        if known.get("format") != 1:
            raise ConfigError(
                f"The progress of this relay has format {known.get('format')}, which this release cannot read. Nothing "
                "was relayed. Use the release that has written it, or a newer one."
            )
        return cls(**{name: known[name] for name in cls.__dataclass_fields__ if name in known})


def progress_key(name: str) -> str:
    """The key of a relay's record, and its `transactional.id`. No pipeline has it: their names hold no `/`."""
    return f"/relay/{name}"


_MEANINGS = {
    "kind": "another kind of database",
    "system": "another server, or one that was restored from a dump or upgraded",
    "timeline": "a server that was promoted, or restored to an earlier time",
    "database": "another database of the same server, or one that was created again",
    "home": "another file, or one that was created again",
    "table": "another table",
}


def decide_start(
    name: str,
    progress: RelayProgress | None,
    identity: Identity,
    resume: Resume | None,
    *,
    is_behind: bool,
    advice: Callable[[Position], str],
) -> Position | None:
    """Where to go on; None for the beginning. Raises if the progress does not belong to this database and table.

    `resume` counts only where something has changed, so that it may stay in a start script. `is_behind`: the database
    stands before the position, as after a restore.
    """
    if progress is None or progress.position is None:
        return None
    changed = [key for key in _MEANINGS if progress.source.get(key) != identity.get(key)]
    if not changed and not is_behind:
        return progress.position
    if resume == "all":
        return None
    is_same_kind = "kind" not in changed
    if resume == "continue" and is_same_kind and not is_behind:
        return progress.position
    what = _MEANINGS[changed[0]] if changed else "a database that was put back to an earlier state"
    raise ConfigError(
        f"Relay {name!r} has relayed {_show(progress.source)} until now, and this is {what} ({_show(identity)}), where "
        "its position means nothing. Nothing was relayed. "
        + ("" if changed == ["table"] or is_behind or not is_same_kind else _CONTINUE)
        + (_RENAMED if changed == ["table"] and not is_behind else "")
        + (advice(progress.position) + " " if is_same_kind else "")
        + "For another table or database use another name."
    )


_CONTINUE = (
    "If ids go on from where they were (pg_upgrade, or a standby that had every commit when it was promoted), pass "
    'resume="continue". '
)
_RENAMED = 'If the table was renamed, pass resume="continue". '


def _show(identity: Identity) -> str:
    return ", ".join(f"{key} {value}" for key, value in identity.items() if key != "kind")

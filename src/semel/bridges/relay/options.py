"""What a relay was told to do, checked as far as that goes without a database or a broker."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from semel.bridges.relay.routes import TopicTemplate
from semel.client.config import ProducerConfig
from semel.client.dead_letters import DEAD_LETTER_MAX
from semel.client.settings import parse_config
from semel.errors import ConfigError

DEFAULT_PROGRESS_TOPIC: Final = "semel-relay-progress"
ROWS_MAX: Final = 50_000
POLL_MS: Final = 100.0
RETRY_S: Final = 300.0

Resume = Literal["continue", "all"]
"""How a relay goes on in a database or table that its progress does not speak of."""

_OURS: Final = {
    "transactional.id": "the relay's transactions are named after it, so that a restart finds them: use name=",
    "enable.idempotence": "a transaction always is",
    "acks": "a transaction always waits for every replica",
}


@dataclass(frozen=True, slots=True)
class Columns:
    """Where a row's parts are. None for `key`, `headers` and `timestamp`: rows have none."""

    id: str
    topic: tuple[str, ...]
    value: str
    key: str | None
    headers: str | None
    timestamp: str | None
    xid: str | None = None
    """In Postgres, the id of the transaction that has written the row."""


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """The options of one relay."""

    name: str
    settings: Mapping[str, object] = field(repr=False)
    table: str
    topic: TopicTemplate
    id: str
    value: str
    key: str | None
    headers: str | None
    timestamp: str | None
    xid: str
    delete: bool
    dead_letter: str | None
    dead_letter_max: int
    resume: Resume | None
    progress_topic: str
    rows_max: int
    poll_ms: float
    retry_s: float

    @property
    def producer_config(self) -> ProducerConfig:
        return parse_config(self.settings).producer


def make_options(
    name: str,
    settings: Mapping[str, object],
    *,
    table: str = "outbox",
    topic: str = "{topic}",
    id: str = "id",
    value: str = "value",
    key: str | None = None,
    headers: str | None = None,
    timestamp: str | None = None,
    xid: str = "semel_xid",
    delete: bool = False,
    dead_letter: str | None = None,
    dead_letter_max: int = DEAD_LETTER_MAX,
    resume: Resume | None = None,
    progress_topic: str = DEFAULT_PROGRESS_TOPIC,
    rows_max: int = ROWS_MAX,
    poll_ms: float = POLL_MS,
    retry_s: float = RETRY_S,
) -> RelayOptions:
    """A mistake raises `ConfigError` before anything is read."""
    if not isinstance(name, str) or not name or "/" in name:
        raise ConfigError(f"name={name!r} cannot name a relay: it must be text, not empty, and without '/'.")
    if resume is not None and resume not in get_args(Resume):
        raise ConfigError(f"resume={resume!r} is not supported: write {' or '.join(map(repr, get_args(Resume)))}.")
    if rows_max < 1 or poll_ms <= 0 or retry_s < 0:
        raise ConfigError(
            f"transaction_rows_max={rows_max}, poll_ms={poll_ms:g} and retry_s={retry_s:g} must be positive."
        )
    template = TopicTemplate.parse(topic)
    if template.fixed == progress_topic:
        raise ConfigError(f"topic={topic!r} is where progress is kept: events need a topic of their own.")
    if dead_letter is not None:
        if dead_letter in (template.fixed, progress_topic):
            raise ConfigError(f"dead_letter={dead_letter!r} is used for something else: dead letters need a topic.")
        if dead_letter_max < 1:
            raise ConfigError(f"dead_letter_max={dead_letter_max} allows no dead letter: write 1 or more.")
    for written in settings:
        if (reason := _OURS.get(written.replace("_", "."))) is not None:
            raise ConfigError(f"{written} cannot be set here: {reason}.")
    parse_config(settings)
    return RelayOptions(
        name=name,
        settings=settings,
        table=table,
        topic=template,
        id=id,
        value=value,
        key=key,
        headers=headers,
        timestamp=timestamp,
        xid=xid,
        delete=delete,
        dead_letter=dead_letter,
        dead_letter_max=dead_letter_max,
        resume=resume,
        progress_topic=progress_topic,
        rows_max=rows_max,
        poll_ms=poll_ms,
        retry_s=retry_s,
    )


_OPTIONAL: Final = {"key": "key", "headers": "headers", "timestamp": "created_at"}
"""Parts that a row need not have, and the columns that hold them unless the user names others."""


def choose_columns(options: RelayOptions, available: Collection[str]) -> Columns:
    """The columns to read of a table that has these. Raises if one that is needed is not there."""
    chosen = {part: getattr(options, part) for part in _OPTIONAL}
    for part, usual in _OPTIONAL.items():
        if chosen[part] is None and usual in available:
            chosen[part] = usual
    needed = {"id": options.id, "value": options.value, **{part: name for part, name in chosen.items() if name}}
    for part, name in needed.items():
        if name not in available:
            raise ConfigError(_missing(options.table, name, f"{part}=", available))
    for name in options.topic.columns:
        if name not in available:
            raise ConfigError(_missing(options.table, name, "topic=", available))
    return Columns(options.id, options.topic.columns, options.value, **chosen)


def _missing(table: str, column: str, option: str, available: Collection[str]) -> str:
    return (
        f"Table {table!r} has no column {column!r}; it has {', '.join(available)}. Nothing was relayed. Name the right "
        f"column by {option}"
        + (" (in braces, or write the topic's own name without braces)." if option == "topic=" else ".")
    )

"""The options of `df.writeStream.format("semel")` and `df.write.format("semel")`, read into those of the sink."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Final

from semel.client.dead_letters import DEAD_LETTER_MAX
from semel.errors import ConfigError
from semel.spark.options import DEFAULT_LEDGER, SinkOptions, make_options

_NAMES: Final = (
    "name",
    "topic",
    "job.id",
    "checkpointLocation",
    "ledger",
    "group",
    "resume",
    "attempts",
    "deadLetter",
    "deadLetterMax",
)
_IGNORED: Final = ("includeHeaders", "queryName")
"""Of Spark's Kafka sink, where a column `headers` is always written here; and Spark's own name for the query."""
_KAFKA: Final = "kafka."
_BOOTSTRAP: Final = "bootstrap.servers"
_STREAM_ONLY: Final = ("checkpointLocation", "group", "resume")
_NO_GROUP: Final = "none"
_FROM_TABLES: Final = (
    "A table cannot be written by format('semel'), because Spark does not hand over its options. Use "
    "df.write.format('semel'), or semel.write_batch(df, ...)."
)


def parse_stream_options(options: Mapping[str, str]) -> SinkOptions:
    """Those of a streaming query, as Spark hands them over, names in any case.

    >>> parse_stream_options({"name": "orders", "kafka.bootstrap.servers": "h:1", "topic": "out",
    ...                       "checkpointlocation": "/data/orders"}).checkpoint
    '/data/orders'
    """
    given, settings = _sorted(options)
    if "job.id" in given:
        raise ConfigError("job.id is for df.write; a streaming query is known by its checkpoint: remove it.")
    if not given.get("checkpointLocation"):
        raise ConfigError(
            'checkpointLocation is missing; nothing was written. Write option("checkpointLocation", ...) at the query: '
            "one from Spark's configuration does not reach the sink."
        )
    return _make(given, settings, checkpoint=given["checkpointLocation"])


def parse_job_options(options: Mapping[str, str]) -> tuple[SinkOptions, str]:
    """Those of a batch, and its job id."""
    given, settings = _sorted(options)
    for name in _STREAM_ONLY:
        if name in given:
            raise ConfigError(f"{name} is for writeStream, and a batch has none: remove it.")
    if not given.get("job.id"):
        raise ConfigError(
            'job.id is missing; nothing was written. Write option("job.id", ...) with what this run stands for, such '
            "as the day that it reports: a job of the same id is written once."
        )
    return _make(given, settings, group=_NO_GROUP), given["job.id"]


def _sorted(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The sink's own options, and Kafka's settings without their prefix."""
    by_name = {_plain(name): name for name in (*_NAMES, *_IGNORED)}
    given: dict[str, str] = {}
    settings: dict[str, str] = {}
    for written, value in options.items():
        if _plain(written) in by_name:
            given[by_name[_plain(written)]] = value.strip()
        elif written.lower().startswith(_KAFKA):
            settings[written.lower().removeprefix(_KAFKA)] = value
        else:
            raise ConfigError(_unknown(written))
    if not given and not settings:
        raise ConfigError(_FROM_TABLES)
    return given, settings


def _plain(name: str) -> str:
    """
    >>> _plain("deadLetter") == _plain("dead_letter") == _plain("dead.letter")
    True
    """
    return re.sub(r"[._]", "", name.lower())


def _unknown(written: str) -> str:
    if written.lower() in ("path", "paths"):
        return 'start() and save() take no path; nothing was written. Name the topic with option("topic", ...).'
    by_plain = {_plain(name): name for name in (*_NAMES, "kafka.bootstrap.servers")}
    close = difflib.get_close_matches(_plain(written), by_plain, n=1, cutoff=0.6)
    if close:
        return f"{written} is no option of format('semel') for writing: did you mean {by_plain[close[0]]}?"
    return (
        f"{written} is no option of format('semel') for writing: remove it, or write kafka.{written} if it is one of "
        "Kafka's."
    )


def _make(
    given: Mapping[str, str], settings: Mapping[str, str], *, checkpoint: str | None = None, group: str | None = None
) -> SinkOptions:
    if not given.get("name"):
        raise ConfigError(
            'name is missing; nothing was written. Write option("name", ...) with a name of this pipeline\'s own: it '
            "becomes the transactional.id, and the ledger knows the pipeline by it."
        )
    if not settings.get(_BOOTSTRAP):
        raise ConfigError("kafka.bootstrap.servers is missing: write host:port of one or more brokers.")
    named: dict[str, Any] = {}
    group = given.get("group", group)
    if group is not None:
        named["group"] = None if group == _NO_GROUP else group
    return make_options(
        name=given["name"],
        bootstrap=settings[_BOOTSTRAP],
        topic=given.get("topic"),
        settings={name: value for name, value in settings.items() if name != _BOOTSTRAP},
        more_settings={},
        ledger=given.get("ledger", DEFAULT_LEDGER),
        attempts=_whole(given, "attempts", 3),
        checkpoint=checkpoint,
        dead_letter=given.get("deadLetter"),
        dead_letter_max=_whole(given, "deadLetterMax", DEAD_LETTER_MAX),
        resume=given.get("resume"),  # pyright: ignore[reportArgumentType] - make_options checks it
        **named,
    )


def _whole(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigError(f"{name}={text!r} is not a whole number.")
    return int(text)
